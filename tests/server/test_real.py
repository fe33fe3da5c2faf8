"""The server over the real trunk: what comes over HTTP is what the library computes."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from pyluce.luce import Luce
from pyluce.options import LoadOptions
from tests.support.echo_service import running_server
from tests.support.real_model import require_libraries
from tests.support.sse import chunks

OPTIONS = LoadOptions(max_ctx=1024, threads=1, chunk=64, max_concurrency=3)
# far beyond the selection budget of 32 tokens
LONG = "The quick brown fox jumps over the lazy dog. " * 6


@pytest.fixture(scope="module")
def loaded(tiny_model: Path) -> Iterator[tuple[Luce, str]]:
    with Luce.load_with(tiny_model, OPTIONS) as luce, running_server(luce, OPTIONS) as server:
        yield luce, server.url


def test_completions_equal_the_librarys(loaded: tuple[Luce, str]) -> None:
    luce, url = loaded
    for seed in (None, 5):
        sampling: dict[str, Any] = {} if seed is None else {"temperature": 1.0, "top_k": 40, "seed": seed}
        expected = luce.generate(LONG, chat=False, max_tokens=12, **sampling)
        body = {"prompt": LONG, "max_tokens": 12, **sampling}
        whole = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()
        assert whole["choices"][0]["text"] == expected.text
        assert whole["choices"][0]["finish_reason"] == expected.finish_reason
        assert whole["usage"]["prompt_tokens"] == len(expected.prompt_tokens)
        assert whole["usage"]["completion_tokens"] == len(expected.tokens)
        streamed = httpx.post(f"{url}/v1/completions", json={**body, "stream": True}, timeout=60)
        assert "".join(part["choices"][0]["text"] for part in chunks(streamed.content)) == expected.text


def test_chats_equal_the_librarys(loaded: tuple[Luce, str]) -> None:
    luce, url = loaded
    messages = [{"role": "user", "content": LONG}]
    expected = luce.generate(messages=messages, max_tokens=12)
    body: dict[str, Any] = {"messages": messages, "max_tokens": 12}
    whole = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).json()
    message = whole["choices"][0]["message"]
    assert message["content"] == expected.text
    assert message.get("reasoning_content", "") == expected.reasoning
    assert whole["usage"]["prompt_tokens"] == len(expected.prompt_tokens)


def test_choices_at_once_equal_one_alone(loaded: tuple[Luce, str]) -> None:
    _, url = loaded
    prompts = [f"{number} {LONG[: 40 * number]}" for number in range(1, 6)]

    def ask(prompt: str) -> str:
        body = {"prompt": prompt, "max_tokens": 8}
        text: str = httpx.post(f"{url}/v1/completions", json=body, timeout=120).json()["choices"][0]["text"]
        return text

    alone = [ask(prompt) for prompt in prompts]
    found: dict[int, str] = {}
    threads = [
        threading.Thread(target=lambda number=number: found.__setitem__(number, ask(prompts[number])))
        for number in range(len(prompts))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[number] for number in range(len(prompts))] == alone
    three = httpx.post(
        f"{url}/v1/completions", json={"prompt": prompts[0], "max_tokens": 8, "n": 3}, timeout=120
    ).json()
    assert [choice["text"] for choice in three["choices"]] == [alone[0]] * 3


def test_openais_client_and_the_default_model() -> None:
    openai = pytest.importorskip("openai")
    require_libraries()
    options = LoadOptions(max_ctx=2048, threads=1, max_concurrency=2)
    question: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
    parameters = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}},
        "required": ["city"],
        "additionalProperties": False,
    }
    tools = [{"type": "function", "function": {"name": "get_time", "parameters": parameters, "strict": True}}]
    schema = {"type": "json_schema", "json_schema": {"name": "city", "schema": parameters}}
    with Luce.load_with(None, options) as luce, running_server(luce, options) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120)
        create = partial(client.chat.completions.create, model="luce-tiny", messages=question, max_tokens=120)
        whole = create(logprobs=True, top_logprobs=2)
        expected = luce.generate(messages=question, max_tokens=120)
        assert whole.choices[0].message.content == expected.text
        assert whole.choices[0].message.reasoning_content == expected.reasoning
        assert len(whole.choices[0].logprobs.content) == whole.usage.completion_tokens == len(expected.tokens)
        parts = create(stream=True)
        assert "".join(part.choices[0].delta.content or "" for part in parts) == expected.text

        called = create(tools=tools, tool_choice="required", parallel_tool_calls=False).choices[0]
        assert called.finish_reason == "tool_calls"
        assert set(json.loads(called.message.tool_calls[0].function.arguments)) == {"city"}
        for effort in ("none", "low"):
            answer = create(response_format=schema, reasoning_effort=effort).choices[0].message
            assert set(json.loads(answer.content)) == {"city"}
            assert bool(getattr(answer, "reasoning_content", None)) == (effort == "low")
        assert luce.stats().busy_slots == 0


def test_text_and_props_of_the_real_model(loaded: tuple[Luce, str]) -> None:
    luce, url = loaded
    tokens = httpx.post(f"{url}/tokenize", json={"content": LONG}).json()["tokens"]
    assert tokens == luce.tokenize(LONG, add_special=False)
    assert httpx.post(f"{url}/detokenize", json={"tokens": tokens}).json()["content"] == LONG
    shown = httpx.get(f"{url}/props").json()
    assert shown["default_generation_settings"]["n_ctx"] == 1024
    assert shown["runtime"]["slots"] == 3
    assert shown["model_path"] == str(luce.info.path)
    assert "luce_memory_bytes" in httpx.get(f"{url}/metrics").text
