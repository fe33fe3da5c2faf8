"""The Responses API: items, events, and reasoning that comes back."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from pyluce.engine import RequestError
from pyluce.server.responses_input import seal, unseal
from tests.support.sse import SentEvent, parse

URL = "/v1/responses"


def stream(client: httpx.Client, text: str, **options: Any) -> list[SentEvent]:
    response = client.post(URL, json={"input": text, "stream": True, **options})
    assert response.status_code == 200, response.text
    events = parse(response.content)
    assert [event.json["sequence_number"] for event in events] == list(range(len(events)))
    return events


def plain(response: dict[str, Any]) -> dict[str, Any]:
    """A response without what is new each time."""
    items = [{key: value for key, value in item.items() if key != "id"} for item in response["output"]]
    usage = {key: value for key, value in response["usage"].items() if key != "timings"}
    kept = {key: value for key, value in response.items() if key not in ("id", "created_at")}
    return {**kept, "output": items, "usage": usage}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_output_tokens": 4},
        {"instructions": "be brief", "temperature": 0.0},
        {"reasoning": {"effort": "none"}},
        {"include": ["reasoning.encrypted_content"]},
        {"include": ["message.output_text.logprobs"], "top_logprobs": 2},
    ],
)
def test_streamed_is_unstreamed(client: httpx.Client, options: dict[str, Any]) -> None:
    text = "why 漢</think>\n\nhello 😀"
    whole = client.post(URL, json={"input": text, **options}).json()
    events = stream(client, text, **options)
    last = events[-1].json
    assert last["type"] == f"response.{whole['status']}"
    assert plain(last["response"]) == plain(whole)
    texts = [event.json["delta"] for event in events if event.name == "response.output_text.delta"]
    done = [event.json["text"] for event in events if event.name == "response.output_text.done"]
    assert "".join(texts) == "".join(done)
    items = [event.json["item"] for event in events if event.name == "response.output_item.done"]
    assert items == last["response"]["output"]


def test_items(client: httpx.Client) -> None:
    whole = client.post(URL, json={"input": "why</think>hello"}).json()
    reasoning, message = whole["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "why"}]
    assert message["content"] == [{"type": "output_text", "text": "hello", "annotations": [], "logprobs": []}]
    assert whole["usage"]["total_tokens"] == whole["usage"]["input_tokens"] + whole["usage"]["output_tokens"]
    assert (whole["status"], whole["store"], whole["error"]) == ("completed", False, None)
    cut = client.post(URL, json={"input": "LONG", "max_output_tokens": 3}).json()
    assert (cut["status"], cut["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})


def test_a_turn_can_be_sent_back(client: httpx.Client) -> None:
    first = client.post(URL, json={"input": "why</think>hello", "include": ["reasoning.encrypted_content"]}).json()
    again = {"input": [{"role": "user", "content": "why"}, *first["output"], {"role": "user", "content": "</think>x"}]}
    whole = client.post(URL, json=again).json()
    assert whole["output"][-1]["content"][0]["text"] == "x"
    sealed = [{"type": "reasoning", "summary": [], "encrypted_content": first["output"][0]["encrypted_content"]}]
    short = {"input": [{"role": "user", "content": "why"}, *sealed, first["output"][1], *again["input"][-1:]]}
    assert client.post(URL, json=short).json()["usage"]["input_tokens"] == whole["usage"]["input_tokens"]


def test_sealed_reasoning() -> None:
    assert unseal(seal("a 漢 \ud800"), "x") == "a 漢 \ud800"
    for bad in ("", "luce1:%%%", "other:YQ==", seal("x")[:-1] + "!"):
        with pytest.raises(RequestError, match=r"^x: "):
            unseal(bad, "x")


def test_an_error_inside_a_stream(client: httpx.Client) -> None:
    last = stream(client, "NAN")[-1].json
    assert last["type"] == "response.failed"
    assert last["response"]["error"]["code"] == "server_error"
