"""Anthropic's messages: blocks, events, counts."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.support.sse import SentEvent, parse

URL = "/v1/messages"


def body(text: str, **options: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 100, **options}


def stream(client: httpx.Client, text: str, **options: Any) -> list[SentEvent]:
    response = client.post(URL, json=body(text, stream=True, **options))
    assert response.status_code == 200, response.text
    events = parse(response.content)
    assert all(event.name == event.json["type"] for event in events)
    return events


def add_up(events: list[SentEvent]) -> dict[str, Any]:
    """The message that the events build, as Anthropic's own clients do it."""
    message: dict[str, Any] = {}
    partial: dict[int, str] = {}
    for event in (event.json for event in events):
        kind = event["type"]
        if kind == "message_start":
            message = event["message"]
        elif kind == "content_block_start":
            assert event["index"] == len(message["content"])
            message["content"].append(event["content_block"])
            partial[event["index"]] = ""
        elif kind == "content_block_delta":
            block, delta = message["content"][event["index"]], event["delta"]
            if delta["type"] == "input_json_delta":
                partial[event["index"]] += delta["partial_json"]
            else:
                key = {"text_delta": "text", "thinking_delta": "thinking"}[delta["type"]]
                block[key] += delta[key]
        elif kind == "content_block_stop":
            block = message["content"][event["index"]]
            if block["type"] == "tool_use" and partial[event["index"]]:
                block["input"] = json.loads(partial[event["index"]])
        elif kind == "message_delta":
            message.update(event["delta"])
            message["usage"].update(event["usage"])
    return message


def without(message: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in message.items() if key not in keys}


@pytest.mark.parametrize(
    "options", [{}, {"max_tokens": 3}, {"stop_sequences": ["wor"]}, {"thinking": {"type": "disabled"}}, {"top_k": 5}]
)
def test_streamed_is_unstreamed(client: httpx.Client, options: dict[str, Any]) -> None:
    text = "why 漢</think>\n\nhello 😀 world"
    whole = client.post(URL, json=body(text, **options)).json()
    streamed = add_up(stream(client, text, **options))
    whole["usage"].pop("timings")
    streamed["usage"].pop("timings")
    assert without(streamed, "id") == without(whole, "id")


def test_blocks_and_stop_reasons(client: httpx.Client) -> None:
    whole = client.post(URL, json=body("why</think>hello world")).json()
    assert whole["content"] == [
        {"type": "thinking", "thinking": "why", "signature": ""},
        {"type": "text", "text": "hello world"},
    ]
    assert (whole["stop_reason"], whole["stop_sequence"]) == ("end_turn", None)
    stopped = client.post(URL, json=body("</think>hello world", stop_sequences=["wor", "x"])).json()
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "wor")
    assert client.post(URL, json=body("LONG", max_tokens=2)).json()["stop_reason"] == "max_tokens"


def test_order_of_events(client: httpx.Client) -> None:
    kinds = [event.json["type"] for event in stream(client, "a</think>b")]
    assert kinds[:3] == ["message_start", "ping", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 2


def test_counted_tokens_are_the_prompt(client: httpx.Client) -> None:
    conversation = {
        "system": [{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": "a"},
            {
                "role": "assistant",
                "content": [{"type": "thinking", "thinking": "t", "signature": ""}, {"type": "text", "text": "b"}],
            },
            {"role": "user", "content": [{"type": "text", "text": "</think>c"}]},
        ],
    }
    count = client.post(URL + "/count_tokens", json=conversation).json()
    message = client.post(URL, json={**conversation, "max_tokens": 9}).json()
    assert count == {"input_tokens": message["usage"]["input_tokens"]}
    assert message["content"] == [{"type": "text", "text": "c"}]


def test_an_error_inside_a_stream(client: httpx.Client) -> None:
    events = stream(client, "NAN")
    assert events[-1].name == "error"
    assert events[-1].json["error"]["type"] == "api_error"
