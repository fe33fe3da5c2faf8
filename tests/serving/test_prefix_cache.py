"""Warm equals cold: a request that starts from kept state gives the tokens and logits of one that starts from nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyluce import Luce
from pyluce.engine import GenerationRequest
from pyluce.luce import Completion
from tests.support.device import LOAD_OPTIONS
from tests.support.models import model_cache  # noqa: F401
from tests.support.real_model import tiny_model  # noqa: F401

VOCAB = 288
OPTIONS: dict[str, Any] = {**LOAD_OPTIONS, "max_ctx": 512, "chunk": 64}


def prompt(n: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(int(t) for t in np.random.default_rng(seed).integers(3, VOCAB, n))


def run(luce: Luce, tokens: tuple[int, ...], cuts: tuple[int, ...] = (), n: int = 12) -> Completion:
    request = GenerationRequest(prompt=tokens, max_tokens=n, hash_logits=True, ignore_end=True, cuts=cuts)
    return Completion.collect(request, luce.run(request))


@pytest.fixture(scope="module")
def cold(tiny_model: Path) -> Iterator[Luce]:  # noqa: F811
    with Luce.load(tiny_model, max_concurrency=1, prefix_cache_mib=0, **OPTIONS) as luce:
        yield luce


@pytest.fixture
def warm(tiny_model: Path) -> Iterator[Luce]:  # noqa: F811
    with Luce.load(tiny_model, max_concurrency=2, prefix_cache_mib=64, **OPTIONS) as luce:
        yield luce


def same(a: Completion, b: Completion) -> bool:
    return a.tokens == b.tokens and a.step_sha256 == b.step_sha256


@pytest.mark.parametrize("shared", [1, 5, 31, 63, 64, 65, 90, 99])
def test_a_shared_prefix_is_not_computed_again_and_changes_nothing(cold: Luce, warm: Luce, shared: int) -> None:
    first = prompt(100)
    second = first[:shared] + prompt(60, seed=shared)
    run(warm, first, cuts=(shared,))
    answer = run(warm, second, cuts=(shared,))
    assert answer.timings.cached_tokens == shared
    assert same(answer, run(cold, second, cuts=(shared,)))
    assert run(cold, second).timings.cached_tokens == 0


def test_a_prompt_that_is_kept_whole_needs_no_step(cold: Luce, warm: Luce) -> None:
    tokens = prompt(150)
    once, twice = run(warm, tokens), run(warm, tokens)
    assert twice.timings.cached_tokens == 150 and same(once, twice) and same(once, run(cold, tokens))


def test_a_conversation_computes_its_new_turns_only(cold: Luce, warm: Luce) -> None:
    conversation = prompt(40)
    cuts: tuple[int, ...] = ()
    for turn in range(4):
        cuts = (*cuts, len(conversation) - 4)
        answer = run(warm, conversation, cuts=cuts)
        assert same(answer, run(cold, conversation, cuts=cuts))
        if turn:
            assert answer.timings.cached_tokens == cuts[-2]
        conversation = (*conversation, *answer.tokens, *prompt(25, seed=100 + turn))


def test_a_prefix_is_used_only_where_the_request_itself_ends_a_chunk(warm: Luce) -> None:
    run(warm, prompt(100), cuts=(30,))
    assert run(warm, prompt(100)[:90]).timings.cached_tokens == 0, "30 is the other request's cut"
    assert run(warm, prompt(100)[:90], cuts=(30,)).timings.cached_tokens == 30


def test_a_tampered_state_is_noticed(cold: Luce, warm: Luce) -> None:
    tokens = prompt(100)
    run(warm, tokens, cuts=(50,))

    def tamper() -> None:
        store = warm._engine._core.resources.runner.store  # type: ignore[attr-defined]
        for entry in store._cache._entries.values():
            entry.snapshot.recurrent = np.zeros_like(entry.snapshot.recurrent)

    try:
        warm._engine.call(tamper)
    except AttributeError:
        pytest.fail("the test no longer reaches the store")
    second = tokens[:50] + prompt(30, seed=5)
    assert not same(run(warm, second, cuts=(50,)), run(cold, second, cuts=(50,)))


def test_control_the_logits_of_a_whole_prompt(cold: Luce, warm: Luce) -> None:
    tokens = prompt(100)
    run(warm, tokens)

    def tamper() -> None:
        store = warm._engine._core.resources.runner.store  # type: ignore[attr-defined]
        kept = [entry for entry in store._cache._entries.values() if entry.snapshot.logits is not None]
        assert kept
        for entry in kept:
            entry.snapshot.logits = entry.snapshot.logits[::-1].copy()

    warm._engine.call(tamper)
    answer = run(warm, tokens)
    assert answer.timings.cached_tokens == 100 and not same(answer, run(cold, tokens))


def test_the_budget_holds_over_many_prompts(tiny_model: Path) -> None:  # noqa: F811
    with Luce.load(tiny_model, max_concurrency=1, prefix_cache_mib=4, **OPTIONS) as luce:
        for seed in range(12):
            run(luce, prompt(120, seed=seed), n=1)
            report: Any = luce.memory_report()["prefix_cache"]
            assert 0 < report["n_bytes"] <= report["budget_bytes"] == 4 << 20
        assert report["evictions"] > 0
