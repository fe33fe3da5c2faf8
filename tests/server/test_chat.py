"""Chat completions: whole and streamed answers are the same, and usage says what was computed."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.sse import chunks

URL = "/v1/chat/completions"
# 4 bytes over 4 tokens, a family of several characters, CJK, line separators that split no frame
HARD_TEXT = 'A😀👨‍👩‍👧漢字\u2028\u0085\x0b\r\n\\"</think>'


def ask(client: httpx.Client, text: str, **options: Any) -> dict[str, Any]:
    response = client.post(URL, json={"messages": [{"role": "user", "content": text}], **options})
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body


def ask_streamed(client: httpx.Client, text: str, **options: Any) -> list[dict[str, Any]]:
    body = {"messages": [{"role": "user", "content": text}], "stream": True, **options}
    response = client.post(URL, json=body)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return chunks(response.content)


def add_up(parts: list[dict[str, Any]], n: int = 1) -> list[dict[str, Any]]:
    """Choices as the unstreamed answer has them."""
    choices: list[dict[str, Any]] = [
        {"content": "", "reasoning_content": "", "finish_reason": None, "logprobs": []} for _ in range(n)
    ]
    for part in parts:
        for choice in part["choices"]:
            sum_ = choices[choice["index"]]
            assert sum_["finish_reason"] is None, "something follows the end"
            sum_["content"] += choice["delta"].get("content") or ""
            sum_["reasoning_content"] += choice["delta"].get("reasoning_content") or ""
            sum_["finish_reason"] = choice["finish_reason"]
            sum_["logprobs"] += (choice["logprobs"] or {}).get("content", [])
    return choices


def whole(body: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            "content": choice["message"]["content"],
            "reasoning_content": choice["message"].get("reasoning_content", ""),
            "finish_reason": choice["finish_reason"],
            "logprobs": (choice["logprobs"] or {}).get("content", []),
        }
        for choice in body["choices"]
    ]


def test_an_answer(client: httpx.Client) -> None:
    body = ask(client, "why\n</think>\n\nbecause")
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    assert body["model"] == "fake"
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": "because", "reasoning_content": "why"}
    assert choice["finish_reason"] == "stop"
    usage = body["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0}
    assert usage["timings"]["prefilled_tokens"] == usage["prompt_tokens"]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_tokens": 9},
        {"max_tokens": 1},
        {"stop": ["字"]},
        {"stop": "👩"},
        {"stop": ["nothing like it"], "max_completion_tokens": 30},
        {"logprobs": True, "top_logprobs": 3},
        {"n": 3, "temperature": 0.0},
        {"enable_thinking": False},
    ],
)
def test_streamed_is_unstreamed(client: httpx.Client, options: dict[str, Any]) -> None:
    text = "first 漢\n\n</think>\n\n" + HARD_TEXT
    n = options.get("n", 1)
    body = ask(client, text, **options)
    parts = ask_streamed(client, text, **options)
    assert add_up(parts, n) == whole(body)
    assert len({part["id"] for part in parts}) == 1
    assert all("usage" not in part for part in parts)


@settings(max_examples=25, deadline=None)
@given(
    reasoning=st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
    answer=st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
    stop=st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=3), max_size=2),
    max_tokens=st.integers(1, 80),
)
def test_any_text(client: httpx.Client, reasoning: str, answer: str, stop: list[str], max_tokens: int) -> None:
    text = f"{reasoning}</think>{answer}"
    options = {"stop": stop, "max_tokens": max_tokens}
    body = ask(client, text, **options)
    assert add_up(ask_streamed(client, text, **options)) == whole(body)
    assert not any(string in whole(body)[0]["content"] for string in stop)


def test_stop_strings_are_not_shown(client: httpx.Client) -> None:
    body = ask(client, "</think>one two three", stop=["two"])
    assert body["choices"][0]["message"]["content"] == "one "
    assert body["choices"][0]["finish_reason"] == "stop"


def test_length(client: httpx.Client) -> None:
    body = ask(client, "</think>LONG ", max_tokens=7)
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 7


def test_reasoning_that_does_not_end(client: httpx.Client) -> None:
    body = ask(client, "LONG thoughts", max_tokens=8)
    message = body["choices"][0]["message"]
    assert message["content"] == ""
    assert message["reasoning_content"]
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] == 8


def test_usage_in_the_stream(client: httpx.Client) -> None:
    body = ask(client, "</think>hello world", n=2)
    parts = ask_streamed(client, "</think>hello world", n=2, stream_options={"include_usage": True})
    assert all(part["usage"] is None for part in parts[:-1])
    last = parts[-1]
    assert last["choices"] == []
    for key in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert last["usage"][key] == body["usage"][key]
    one = ask(client, "</think>hello world")["usage"]
    assert body["usage"]["prompt_tokens"] == one["prompt_tokens"]
    assert body["usage"]["completion_tokens"] == 2 * one["completion_tokens"]


def test_choices_equal_their_solo_runs(client: httpx.Client) -> None:
    prompt = {"prompt": "abc", "max_tokens": 12, "temperature": 1.0}
    together = client.post("/v1/completions", json={**prompt, "n": 3, "seed": 7}).json()["choices"]
    alone = [client.post("/v1/completions", json={**prompt, "seed": 7 + i}).json()["choices"][0] for i in range(3)]
    assert [choice["text"] for choice in together] == [choice["text"] for choice in alone]
    assert len({choice["text"] for choice in together}) == 3


def test_one_log_probability_a_token(client: httpx.Client) -> None:
    body = ask(client, "</think>漢", logprobs=True, top_logprobs=2)
    entries = body["choices"][0]["logprobs"]["content"]
    assert len(entries) == body["usage"]["completion_tokens"]
    text = b"".join(bytes(entry["bytes"]) for entry in entries)
    assert text.decode() == "</think>漢"
    for entry in entries:
        assert len(entry["top_logprobs"]) == 2
        assert entry["top_logprobs"][0]["token"] == entry["token"]
        assert entry["logprob"] <= 0.0


def test_conversation_fields_reach_the_template(client: httpx.Client) -> None:
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "c", "reasoning_content": "r", "refusal": None},
        {"role": "user", "content": "d"},
    ]
    tokens = client.post("/tokenize", json={"messages": messages, "with_pieces": True}).json()
    written = "".join(tokens["pieces"])
    assert written == "system\nbe brief\nuser\nab\nassistant\n<think>\nr\n</think>\n\nc\nuser\nd\nassistant\n<think>\n"
    assert tokens["count"] == len(tokens["tokens"])
    usage = client.post(URL, json={"messages": messages}).json()["usage"]
    assert usage["prompt_tokens"] == tokens["count"]


def test_thinking_switches_are_one_switch(client: httpx.Client) -> None:
    ways: list[dict[str, Any]] = [
        {"enable_thinking": False},
        {"reasoning_effort": "none"},
        {"reasoning": {"effort": "none"}},
        {"chat_template_kwargs": {"enable_thinking": False}},
    ]
    prompts = {ask(client, "x", max_tokens=1, **way)["usage"]["prompt_tokens"] for way in ways}
    assert len(prompts) == 1
    assert prompts != {ask(client, "x", max_tokens=1)["usage"]["prompt_tokens"]}


def test_tokens_and_back(client: httpx.Client) -> None:
    text = "hello world 漢 <|im_end|>"
    tokens = client.post("/tokenize", json={"content": text}).json()["tokens"]
    assert client.post("/detokenize", json={"tokens": tokens}).json() == {"content": text}
