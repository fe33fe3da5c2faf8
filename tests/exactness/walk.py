"""A random schedule of everything that a runner and its sequences can do, and what each sequence must have computed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from tests.exactness.case import Case
from tests.support.compare import assert_same_bytes

if TYPE_CHECKING:
    from pyluce.graph import TrunkRunner
    from pyluce.state import SequenceState

MAX_TOKENS = 400
MAX_ROWS = 8


@dataclass
class Walker:
    """A live sequence and its history: runs of prefilled tokens and of decoded ones, and the logits of the latter."""

    state: SequenceState
    turns: list[tuple[str, list[int]]] = field(default_factory=list)
    logits: list[np.ndarray] = field(default_factory=list)
    since_prefill: int = 0

    def add(self, kind: str, tokens: list[int]) -> None:
        if not self.turns or self.turns[-1][0] != kind or kind == "prefill":
            self.turns.append((kind, []))
        self.turns[-1][1].extend(tokens)

    def forget(self, n: int) -> None:
        """The last n decoded rows never happened."""
        del self.turns[-1][1][len(self.turns[-1][1]) - n :]
        del self.logits[len(self.logits) - n :]
        self.since_prefill -= n
        if not self.turns[-1][1]:
            self.turns.pop()


class Walk:
    """Drives a runner with `n_slots` slots through `n_steps` random steps; `check` replays every sequence alone."""

    def __init__(self, runner: TrunkRunner, case: Case, seed: int):
        self._runner, self._case = runner, case
        self._rng = np.random.default_rng(seed)
        self._walkers: list[Walker] = []
        self.ended: list[Walker] = []

    def _tokens(self, n: int) -> list[int]:
        """Random ids, end-of-text now and then."""
        ids = self._rng.integers(0, self._case.vocab, n)
        return [int(i) for i in np.where(self._rng.random(n) < 0.05, 0, ids)]

    def _pick(self) -> Walker:
        return self._walkers[int(self._rng.integers(len(self._walkers)))]

    def run(self, n_steps: int) -> None:
        steps = (self.decode, self.decode, self.decode, self.rollback, self.prefill, self.start, self.copy, self.end)
        self.start()
        for _ in range(n_steps):
            steps[int(self._rng.integers(len(steps)))]()

    def start(self) -> None:
        if self._runner.n_free_slots:
            self._runner.poison_free_state()
            self._walkers.append(Walker(self._runner.new_sequence()))
            self._prefill(self._walkers[-1])

    def prefill(self) -> None:
        walker = self._pick()
        if walker.state.length < MAX_TOKENS:
            self._prefill(walker)

    def _prefill(self, walker: Walker) -> None:
        """A prompt in one to three pieces, with rows of other sequences between them."""
        tokens = self._tokens(int(self._rng.integers(1, 90)))
        cuts = sorted({0, len(tokens), *(int(c) for c in self._rng.integers(0, len(tokens), 2))})
        walker.add("prefill", tokens)
        walker.since_prefill = 0
        for first, last in zip(cuts, cuts[1:], strict=False):
            self._runner.prefill(walker.state, tokens[first:last], want="none")
            self._decode([other for other in self._walkers if other is not walker])

    def decode(self) -> None:
        self._decode(self._walkers)

    def _decode(self, walkers: list[Walker]) -> None:
        """One row graph with 0 to 4 rows of each of these sequences."""
        rows: list[tuple[Walker, int]] = []
        for i in self._rng.permutation(len(walkers)):
            walker = walkers[int(i)]
            n = min(int(self._rng.integers(0, 5)), MAX_ROWS - len(rows))
            if walker.turns and walker.state.length + n <= MAX_TOKENS:
                rows += [(walker, token) for token in self._tokens(n)]
        if not rows:
            return
        logits = np.array(self._runner.decode([(walker.state, token) for walker, token in rows]))
        for (walker, token), row in zip(rows, logits, strict=True):
            walker.add("decode", [token])
            walker.logits.append(row)
            walker.since_prefill += 1

    def rollback(self) -> None:
        walker = self._pick()
        reach = min(walker.since_prefill, walker.state.length - walker.state.oldest_length)
        if reach > 0:
            n = int(self._rng.integers(1, reach + 1))
            walker.state.rollback(n)
            walker.forget(n)

    def copy(self) -> None:
        if self._runner.n_free_slots:
            source = self._pick()
            turns = [(kind, list(tokens)) for kind, tokens in source.turns]
            copied = Walker(source.state.copy(), turns, list(source.logits), source.since_prefill)
            self._walkers.append(copied)

    def end(self) -> None:
        if len(self._walkers) > 1:
            walker = self._pick()
            self._walkers.remove(walker)
            walker.state.free()
            self.ended.append(walker)

    def check(self) -> None:
        """Replay every sequence alone in a fresh runner: prompts in one chunk, rows one by one."""
        for number, walker in enumerate([*self.ended, *self._walkers]):
            if walker.logits:
                expected = replay(self._case, walker.turns)
                assert_same_bytes(np.stack(walker.logits), expected, f"sequence {number}, {len(expected)} rows")


def replay(case: Case, turns: list[tuple[str, list[int]]]) -> np.ndarray:
    """Logits of all decoded rows of these turns, computed alone."""
    rows: list[np.ndarray] = []
    with case.open() as runner:
        state = runner.new_sequence()
        for kind, tokens in turns:
            if kind == "prefill":
                runner.prefill(state, tokens, want="none")
            else:
                rows += [np.array(runner.decode([(state, token)]))[0] for token in tokens]
    return np.stack(rows)
