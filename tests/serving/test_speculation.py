"""Speculation changes nothing: token ids and logits are those of the same request without it, alone, on the real trunk."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from pyluce.engine import GenerationRequest, SamplingParams
from pyluce.spec import SpecOptions
from tests.serving.exact import Alone, Run, make_request
from tests.serving.test_exact_slots import AnswerDiffers, assert_as_alone

LENGTHS = (20, 61, 129)
"""Around blocks, pages and the budget of 32; answers of 36 tokens go beyond each of them."""

SETTINGS = [
    *((slots, SpecOptions(("mtp",), width)) for slots in (1, 2, 4) for width in (4, 0)),
    *((1, SpecOptions(("mtp",), width)) for width in (2, 8)),
    *((slots, SpecOptions(("mtp", "lookup"), 0)) for slots in (1, 4)),
    *((slots, SpecOptions(("lookup",), 4)) for slots in (1, 2)),
    (4, SpecOptions(("mtp",), 8)),
]


def pool() -> list[GenerationRequest]:
    """Greedy, drawn, and penalised requests."""
    sampling = (
        SamplingParams(),
        SamplingParams(temperature=1.0, seed=5),
        SamplingParams(presence_penalty=1.5, repeat_penalty=1.2),
    )
    return [make_request(n, seed=2, n=36, sampling=s) for n, s in zip(LENGTHS, sampling, strict=True)]


class Rig:
    """Makes the head's drafts right for as many depths as `pattern` says, step after step, and wrong after that.

    The head itself drafts too, so its keys are written as ever.
    """

    def __init__(self, answers: dict[tuple[int, ...], list[int]], pattern: Callable[[], int]) -> None:
        self.answers = answers
        self.pattern = pattern
        self.accepted: list[int] = []
        self.copies = 0

    def __call__(self, runner: Any) -> None:
        draft = runner.draft

        def rigged(requests: Sequence[tuple[Any, int, int]]) -> list[list[int]]:
            made = draft(requests)
            return [
                self._bend(state.tokens, token, mine) for (state, token, _), mine in zip(requests, made, strict=True)
            ]

        runner.draft = rigged

    def _bend(self, tokens: list[int], token: int, drafts: list[int]) -> list[int]:
        known = [*tokens, token]
        prompt = next(p for p in self.answers if tuple(known[: len(p)]) == p)
        answer = self.answers[prompt]
        at = len(known) - len(prompt)
        assert answer[:at] == known[len(prompt) :], "what was fed is not what was answered"
        right = min(self.pattern(), len(drafts))
        self.accepted.append(right)
        return [
            answer[at + i] if i < right else (answer[at + i] + 1) % 288 if i == right else draft
            for i, draft in enumerate(drafts)
        ]


def rig_for(requests: Sequence[GenerationRequest], alone: Alone, pattern: Sequence[int]) -> Rig:
    return Rig({r.prompt: alone(r).tokens for r in requests}, itertools.cycle(pattern).__next__)


@pytest.mark.parametrize(
    ("n_slots", "spec"), SETTINGS, ids=[f"{n}-{'+'.join(s.sources)}-{s.width}" for n, s in SETTINGS]
)
def test_tokens_and_logits_as_without(
    drafting_model: Path, alone_undrafted: Alone, n_slots: int, spec: SpecOptions
) -> None:
    requests = pool()
    outcome = Run(drafting_model, n_slots, seed=n_slots, spec=spec).play(requests, [make_request(30, seed=9, n=30)])
    assert_as_alone(requests, outcome.answers, alone_undrafted)
    assert outcome.stats.speculation is not None
    if "mtp" in spec.sources:
        assert outcome.stats.speculation.drafted > 0


PATTERNS: dict[str, tuple[int, ...]] = {"0": (0,), "1": (1,), "2": (2,), "3": (3,), "0123": (0, 1, 2, 3), "7": (7,)}


@pytest.mark.parametrize(
    ("n_slots", "pattern"), [(1, "0"), (1, "3"), (1, "0123"), (1, "7"), (4, "1"), (4, "2"), (4, "0123")]
)
def test_forced_acceptance(drafting_model: Path, alone_undrafted: Alone, n_slots: int, pattern: str) -> None:
    requests = pool()
    rig = rig_for(requests, alone_undrafted, PATTERNS[pattern])
    run = Run(drafting_model, n_slots, seed=3, spec=SpecOptions(("mtp",), 8 if pattern == "7" else 4), rig=rig)
    outcome = run.play(requests)
    assert_as_alone(requests, outcome.answers, alone_undrafted)
    found = outcome.stats.speculation
    assert found is not None
    assert found.accepted == sum(rig.accepted)
    assert set(rig.accepted) >= set(PATTERNS[pattern])


@pytest.mark.parametrize("fault", ["stale_conv", "stale_ple", "stale_ring", "stale_ngram"])
def test_control_a_part_that_is_not_taken_back(drafting_model: Path, alone_undrafted: Alone, fault: str) -> None:
    requests = pool()
    rig = Rig({}, lambda: 0)
    rig._bend = lambda tokens, token, drafts: drafts  # type: ignore[method-assign]  # the answers go wrong
    run = Run(drafting_model, 1, seed=3, spec=SpecOptions(("mtp",), 4), rig=rig, fault=fault)
    with pytest.raises(AnswerDiffers):
        assert_as_alone(requests, run.play(requests).answers, alone_undrafted)


def test_acceptance_does_not_depend_on_company(luce_tiny: Path) -> None:
    """The trained model: with four slots and prompts of many chunks exactly the drafts of one slot are accepted."""
    requests = [
        GenerationRequest(tuple(range(first, first + n)), max_tokens=24, hash_logits=True)
        for first, n in ((300, 40), (900, 300), (1500, 520), (2100, 129))
    ]
    found = []
    for n_slots in (1, 4):
        outcome = Run(luce_tiny, n_slots, seed=n_slots, spec=SpecOptions(("mtp",), 4), n_vocab=4096).play(requests)
        assert outcome.stats.speculation is not None
        found.append((outcome.stats.speculation.sources, [answer.tokens for answer in outcome.answers]))
    assert found[0] == found[1]
    assert sum(found[0][0]["mtp"].accepted) > 20
