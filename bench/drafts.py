"""Timing engines that verify drafts, all by the same rule: with forced acceptances, and by their own greedy text."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

CHANCES = (0.4, 0.6, 0.8)
WIDTHS = (2, 3, 4, 5, 8)
AFTER = (512, 16_384)
"""Tokens of the prompts that forced steps follow."""
TINY_WIDTHS = (4, 8)
N_STRATA = 32
WARM_UP = -1
Accept = Callable[[list[int], list[int]], tuple[int, int]]
"""(drafts, the best token of each row) -> how many of the drafts are right, and the token that follows them"""
Record = dict[str, Any]


class Stepper(Protocol):
    """An engine with one sequence that decodes a token and its drafts a step. `tokens` and `steps` count what it made."""

    tokens: int
    steps: int

    def step(self, token: int, accept: Accept) -> int:
        """Decode `token` and drafts after it; the token that follows those that `accept` finds right."""

    def wait(self) -> None:
        """Until the device is done."""


class Forced:
    """The draws of one repetition (0, 1, ...; `WARM_UP`): a draft is right with `chance` where all before it were.

    Of `N_STRATA` numbers in a row one lies in each part of the range, so that few steps already have the acceptance that is meant.
    Engines that verify as many drafts a step get the same draws, step for step.
    """

    def __init__(self, chance: float, n_vocab: int, repetition: int) -> None:
        self._chance, self._n_vocab = chance, n_vocab
        self._random = random.Random(7 + repetition)
        self._numbers = self._stratified()

    def _stratified(self) -> Iterator[float]:
        strata = list(range(N_STRATA))
        while True:
            self._random.shuffle(strata)
            yield from [(i + self._random.random()) / N_STRATA for i in strata]

    def accept(self, drafts: list[int], _best: list[int]) -> tuple[int, int]:
        """An `Accept` that looks at neither; the token that follows is random."""
        right = 0
        while right < len(drafts) and next(self._numbers) < self._chance:
            right += 1
        return right, self._random.randrange(self._n_vocab)


class Acceptance:
    """How often drafts were right, by depth; a depth counts drafts all of whose shallower ones were."""

    def __init__(self) -> None:
        self._reached: list[int] = []
        self._accepted: list[int] = []

    def add(self, n_drafts: int, right: int) -> None:
        """A step that verified so many drafts, of which the first `right` were right."""
        missing = n_drafts - len(self._reached)
        self._reached += [0] * missing
        self._accepted += [0] * missing
        for depth in range(min(right + 1, n_drafts)):
            self._reached[depth] += 1
            self._accepted[depth] += depth < right

    def rates(self) -> list[float]:
        """From depth 1 on, as far as any draft got."""
        return [accepted / reached for accepted, reached in zip(self._accepted, self._reached, strict=True) if reached]


def prompt_tokens(n_vocab: int, length: int) -> list[int]:
    """The random prompt that forced steps follow."""
    draw = random.Random(3)
    return [draw.randrange(1, n_vocab) for _ in range(length)]


def forced_rates(engine: Stepper, n_vocab: int, chance: float, repetitions: int, n_steps: int) -> Record:
    """The median tokens a second of the repetitions, of so many steps each, and tokens a step."""
    rates, token = [], 1
    engine.tokens = engine.steps = 0
    for repetition in range(repetitions):
        draws, before = Forced(chance, n_vocab, repetition), engine.tokens
        engine.wait()
        begun = time.perf_counter()
        for _ in range(n_steps):
            token = engine.step(token, draws.accept)
        engine.wait()
        rates.append((engine.tokens - before) / (time.perf_counter() - begun))
    return {"rate": statistics.median(rates), "rates": rates, "tokens a step": engine.tokens / engine.steps}


def greedy_text(engine: Stepper, first: int, n: int, counts: Acceptance) -> tuple[list[int], float]:
    """`n` greedy tokens from `first` on, which follows the prompt, and the seconds of the steps."""
    text = [first]

    def accept(drafts: list[int], best: list[int]) -> tuple[int, int]:
        right = next((i for i, draft in enumerate(drafts) if draft != best[i]), len(drafts))
        text.extend(best[: right + 1])
        counts.add(len(drafts), right)
        return right, best[right]

    token, begun = first, time.perf_counter()
    while len(text) < n:
        token = engine.step(token, accept)
    engine.wait()
    return text[:n], time.perf_counter() - begun
