"""One row graph for all sequences that decode: the next token of each, its drafts, and what the request's own sampler makes of them.

A row's logits depend on the tokens before it alone, so a draft that equals what the sampler chose from the row before it has the
row that decoding would have computed. The sampler sees one row after the other, exactly those that became part of the answer, so
it draws as often, and remembers as much, as without drafts; what was computed beyond them is taken back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Generic, TypeVar

from pyluce.engine.protocols import Row, Runner, SequenceLike
from pyluce.spec.speculator import Candidate, Speculator
from pyluce.spec.stats import SpecStats

S = TypeVar("S", bound=SequenceLike)


@dataclass(frozen=True, slots=True)
class Verified:
    """A candidate's rows, 1 + len(drafts): after its next token and after each draft."""

    drafts: tuple[int, ...]
    rows: list[Row]


class Decoder(Generic[S]):
    """Carries out the decode part of a step; without a speculator every sequence has one row."""

    def __init__(self, speculator: Speculator[S] | None = None, clock: Callable[[], float] = perf_counter) -> None:
        self._speculator = speculator
        self._clock = clock
        self._accepting: int | None = None

    def compute(
        self, runner: Runner[S], candidates: Sequence[Candidate[S]], wants_logits: Sequence[bool]
    ) -> list[Verified]:
        """Draft, and compute all rows in one graph. Raises what the runner raises; the sequences are lost then.

        `wants_logits`: of each candidate; the others need only the largest of a row.
        """
        drafts = self._speculator.drafts(runner, candidates) if self._speculator is not None else [[]] * len(candidates)
        rows = [(c.state, token) for c, mine in zip(candidates, drafts, strict=True) for token in (c.next_token, *mine)]
        begun = self._clock()
        wanted = [wants for wants, mine in zip(wants_logits, drafts, strict=True) for _ in range(1 + len(mine))]
        computed = runner.decode_rows(rows, wanted)
        if self._speculator is not None:
            self._speculator.computed(runner, len(rows), self._clock() - begun)
        found, at = [], 0
        for mine in drafts:
            found.append(Verified(tuple(mine), computed[at : at + 1 + len(mine)]))
            at += 1 + len(mine)
        return found

    def accept(self, candidate: Candidate[S], rows: Verified, choose: Callable[[Row], int | None]) -> None:
        """Let `choose` take tokens, row by row, as long as the drafts are what it takes; then take back the rest of the rows.

        `choose` returns the token, or None when the answer ended with it: its state is gone then.
        """
        accepted = 0
        token: int | None = None
        self._accepting = candidate.number
        for row, draft in zip(rows.rows, (*rows.drafts, None), strict=True):
            token = choose(row)
            if token is None:
                break
            if self._speculator is not None:
                self._speculator.emitted(candidate.number, token)
            if token != draft:
                if accepted < len(rows.drafts):
                    candidate.state.rollback(len(rows.drafts) - accepted)
                break
            accepted += 1
        self._accepting = None
        if self._speculator is not None:
            self._speculator.verified(candidate.number, accepted)
            if token is None:
                self._speculator.end(candidate.number)

    def end(self, number: int) -> None:
        """The sequence is over; what its last rows said about its drafts is still counted."""
        if self._speculator is not None and number != self._accepting:
            self._speculator.end(number)

    def stats(self) -> SpecStats | None:
        """What speculation did, None without it."""
        return self._speculator.stats() if self._speculator is not None else None
