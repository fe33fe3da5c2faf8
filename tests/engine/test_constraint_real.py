"""Constraints and thinking budgets over the real trunk, vocabulary and sampler chain, alone and beside other requests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyluce.engine import ConstraintCompiler, ConstraintFactory, GenerationRequest, SamplingParams
from pyluce.engine.protocols import Logits
from pyluce.luce import Completion, Luce
from pyluce.native.vocabulary import Vocabulary
from pyluce.text import ReasoningMarkers, Tokenizer
from tests.engine.constrained import SCHEMA, keeps_to_schema

OPTIONS: dict[str, Any] = {"threads": 1, "max_ctx": 512, "chunk": 64, "max_concurrency": 4}
# far beyond the selection budget of 32 tokens
TEXT = "The quick brown fox jumps over the lazy dog. " * 4
SAMPLED = SamplingParams(temperature=1.5, top_p=0.95, top_k=40, min_p=0.01, repeat_penalty=1.1, seed=11)


@pytest.fixture(scope="module")
def luce(tiny_model: Path) -> Iterator[Luce]:
    with Luce.load(tiny_model, **OPTIONS) as luce:
        yield luce


@pytest.fixture(scope="module")
def factory(tiny_model: Path) -> ConstraintFactory:
    """Compiled with a second vocabulary that is gone when the constraint is used, on another thread."""
    with Vocabulary(tiny_model) as vocabulary:
        return ConstraintCompiler(Tokenizer(vocabulary)).json_schema(SCHEMA)


def run(luce: Luce, request: GenerationRequest) -> Completion:
    return Completion.collect(request, luce.run(request))


@pytest.mark.parametrize("sampling", [SamplingParams(), SAMPLED], ids=["greedy", "sampled"])
def test_a_random_model_writes_the_schema(luce: Luce, factory: ConstraintFactory, sampling: SamplingParams) -> None:
    for start in range(4):
        request = luce.request(TEXT[start:], chat=False, constraint=factory, sampling=sampling)
        done = run(luce, request)
        assert keeps_to_schema(done.text), done.text
        assert done.finish_reason == "stop"
    free = run(luce, luce.request(TEXT, chat=False, max_tokens=80, sampling=sampling))
    assert not keeps_to_schema(free.text)


def test_answers_beside_others_equal_those_alone(luce: Luce, factory: ConstraintFactory) -> None:
    base = luce.request(TEXT, chat=False, hash_logits=True, max_tokens=150)
    end = tuple(luce.request("Hi", max_tokens=1).thinking_end)
    reasons = {"reasoning": ReasoningMarkers(), "starts_in_reasoning": True, "thinking_end": end, "thinking_budget": 9}
    requests = [
        replace(base, constraint=factory),
        replace(base, constraint=factory, sampling=SAMPLED),
        replace(base, **reasons),
        replace(base, **reasons, constraint=factory, sampling=SAMPLED),
        replace(base, prompt=base.prompt[:50], constraint=factory),
        base,
    ]
    alone = [run(luce, request) for request in requests]
    with ThreadPoolExecutor(len(requests)) as pool:
        together = list(pool.map(lambda request: run(luce, request), requests))
    for solo, beside in zip(alone, together, strict=True):
        assert (beside.tokens, beside.logits_sha256, beside.text) == (solo.tokens, solo.logits_sha256, solo.text)
    assert alone[2].tokens[9 : 9 + len(end)] == end
    for done in (alone[0], alone[1], alone[3]):
        assert keeps_to_schema(done.text), (done.text, done.finish_reason)
    assert alone[3].reasoning


class Exactly:
    """A constraint that allows one list of tokens, so that the sampler chooses them."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._left = list(tokens)

    @property
    def is_complete(self) -> bool:
        return not self._left

    def begin(self, head: bytes, line_breaks: bool) -> None:
        pass

    def mask(self, logits: Logits) -> None:
        kept = logits[self._left[0]]
        logits.fill(-np.inf)
        logits[self._left[0]] = kept

    def mask_ends(self, logits: Logits) -> None:
        pass

    def accept(self, token: int) -> None:
        assert token == self._left.pop(0)

    def close(self) -> None:
        pass


def test_given_tokens_are_fed_like_chosen_ones(luce: Luce) -> None:
    base = luce.request(TEXT, chat=False, hash_logits=True, max_tokens=40)
    end = luce.request("Hi", max_tokens=1).thinking_end
    given = replace(base, reasoning=ReasoningMarkers(), starts_in_reasoning=True, thinking_end=end, thinking_budget=5)
    forced = run(luce, given)
    assert forced.tokens[5 : 5 + len(end)] == end
    chosen = run(luce, replace(base, constraint=lambda: Exactly(forced.tokens)))
    assert (chosen.tokens, chosen.logits_sha256) == (forced.tokens, forced.logits_sha256)
    free = run(luce, replace(base, max_tokens=len(forced.tokens)))
    assert free.logits_sha256 != forced.logits_sha256
