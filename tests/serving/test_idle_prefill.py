"""While nobody waits the next turn is prepared: it starts from kept state, equals a cold run, and never delays anybody."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from pyluce import Luce
from pyluce.engine import GenerationRequest, IdlePrompt
from pyluce.engine.stats import EngineStats
from pyluce.luce import Completion
from pyluce.options import LoadOptions
from pyluce.server.app import create_app
from pyluce.server.settings import ServerSettings
from pyluce.service import LuceService
from tests.support.models import model_cache  # noqa: F401
from tests.support.real_model import tiny_model  # noqa: F401

PROMPT = tuple(range(5, 205))
OPTIONS: dict[str, Any] = {"max_ctx": 1024, "threads": 1, "chunk": 32}


def wait(stats: Callable[[], EngineStats], ready: Callable[[EngineStats], bool], seconds: float = 60.0) -> EngineStats:
    deadline = time.monotonic() + seconds
    while not ready(found := stats()):
        assert time.monotonic() < deadline, f"waited in vain: {found}"
        time.sleep(0.005)
    return found


def run(luce: Luce, tokens: tuple[int, ...], cuts: tuple[int, ...] = ()) -> Completion:
    request = GenerationRequest(prompt=tokens, max_tokens=8, hash_logits=True, ignore_end=True, cuts=cuts)
    return Completion.collect(request, luce.run(request))


def test_a_prompt_prepared_while_idle_is_not_computed_again(tiny_model: Path) -> None:  # noqa: F811
    longer = (*PROMPT, *range(50, 90))
    with Luce.load(tiny_model, max_concurrency=1, prefix_cache_mib=0, **OPTIONS) as luce:
        expected = run(luce, longer, cuts=(200,))
    with Luce.load(tiny_model, max_concurrency=1, prefix_cache_mib=64, **OPTIONS) as luce:
        luce.warm(IdlePrompt(PROMPT))
        wait(luce.stats, lambda s: s.idle_tokens_total == 200 and s.activity.value == "idle")
        answer = run(luce, longer, cuts=(200,))
        assert answer.timings.cached_tokens == 200
        assert answer.step_sha256 == expected.step_sha256
        assert luce.stats().invariant_violations == 0


def test_work_that_arrives_goes_first(tiny_model: Path) -> None:  # noqa: F811
    with Luce.load(tiny_model, max_concurrency=1, prefix_cache_mib=64, **OPTIONS) as luce:
        for start in range(8):
            luce.warm(IdlePrompt(tuple(range(start + 5, start + 265))))
        wait(luce.stats, lambda s: s.idle_tokens_total >= 32)
        before = luce.stats().idle_tokens_total
        run(luce, (7, 8, 9))
        assert luce.stats().idle_tokens_total - before <= 3 * 32, (
            "at most the chunk in the works, and what follows the answer"
        )
        wait(luce.stats, lambda s: s.activity.value == "idle")
        assert luce.stats().invariant_violations == 0 and luce.stats().busy_slots == 0


def test_switched_off_nothing_is_prepared(tiny_model: Path) -> None:  # noqa: F811
    with Luce.load(tiny_model, max_concurrency=1, prefix_cache_mib=64, idle_prefill=False, **OPTIONS) as luce:
        luce.warm(IdlePrompt(PROMPT))
        run(luce, (7, 8, 9))
        assert luce.stats().idle_tokens_total == 0


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.anyio
async def test_the_next_turn_of_a_conversation_starts_behind_the_reply(thinking: bool) -> None:
    first = [{"role": "user", "content": "What is the capital of France?"}]

    async def turns(prefix_cache_mib: int) -> list[dict[str, Any]]:
        options = LoadOptions(max_ctx=1024, threads=1, max_concurrency=1, prefix_cache_mib=prefix_cache_mib)
        replies: list[dict[str, Any]] = []
        with Luce.load_with(None, options) as luce, LuceService(luce, options) as service:
            transport = httpx.ASGITransport(app=create_app(service, ServerSettings()))
            async with httpx.AsyncClient(transport=transport, base_url="http://luce") as client:
                messages: list[dict[str, Any]] = list(first)
                for question in ("And of Italy?", "What is a river?", None):
                    body = {"messages": messages, "max_tokens": 64, "enable_thinking": thinking}
                    before = luce.stats().idle_tokens_total
                    reply = (await client.post("/v1/chat/completions", json=body)).json()
                    replies.append(reply)
                    if question is None:
                        break
                    if prefix_cache_mib:
                        wait(luce.stats, lambda s, n=before: s.idle_tokens_total > n and s.activity.value == "idle")
                    said = reply["choices"][0]["message"]
                    messages = [*messages, said, {"role": "user", "content": question}]
        return replies

    cold, warm = await turns(0), await turns(64)
    assert [r["choices"][0]["message"] for r in cold] == [r["choices"][0]["message"] for r in warm]
    for before, after in zip(warm, warm[1:], strict=False):
        cached = after["usage"]["prompt_tokens_details"]["cached_tokens"]
        spoken = before["usage"]["prompt_tokens"] + before["usage"]["completion_tokens"]
        assert cached >= spoken - 4, f"the reply itself was prepared: {cached} of {spoken}"
        assert after["usage"]["timings"]["prefilled_tokens"] == after["usage"]["prompt_tokens"] - cached
