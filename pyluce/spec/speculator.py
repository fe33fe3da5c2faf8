"""Drafts for the sequences that decode, step after step: which source, how many, and what is learned from the outcome."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Generic, Protocol, TypeVar

from pyluce.spec.cost import CostMemory, Seed, StepCosts
from pyluce.spec.options import MAX_DRAFTS, ROW_BUDGET, SpecOptions
from pyluce.spec.planner import Offer, Planner, best_plan
from pyluce.spec.sources import HEAD, SequenceSources, new_pools, source_of
from pyluce.spec.stats import SourceStats, SpecStats

S = TypeVar("S")
S_in = TypeVar("S_in", contravariant=True)


class DraftRunner(Protocol[S_in]):
    """What speculation needs of a runner."""

    @property
    def graphs_built(self) -> int:
        """Rises when a step has to build a graph."""

    def draft(self, requests: Sequence[tuple[S_in, int, int]]) -> list[list[int]]:
        """For each (state, its next token, how many): tokens that may follow that one."""


@dataclass(slots=True)
class Candidate(Generic[S]):
    """A sequence that decodes in this step. `next_token`, the last that was chosen, is not in `state` yet.

    length: tokens in the state; room: drafts that could be verified at most.
    """

    number: int
    state: S
    next_token: int
    prompt: Sequence[int]
    length: int
    room: int


@dataclass(slots=True)
class _Count:
    drafted: int = 0
    reached: list[int] = field(default_factory=lambda: [0] * MAX_DRAFTS)
    accepted: list[int] = field(default_factory=lambda: [0] * MAX_DRAFTS)

    def add(self, first: int, offered: int, accepted: int) -> None:
        """So many drafts from depth `first` (from 0) on, which was reached, and how many of them were right."""
        for depth in range(first, first + min(accepted + 1, offered)):
            self.reached[depth] += 1
            self.accepted[depth] += depth < first + accepted


class Speculator(Generic[S]):
    """One for an engine. A step: `drafts`, compute, `computed` with the step's time, then for every candidate `emitted` for each
    token that was chosen, and `verified`. A sequence is known from its first step until `end`.
    """

    def __init__(
        self,
        options: SpecOptions,
        clock: Callable[[], float] = time.perf_counter,
        seed: Seed = Seed(),  # noqa: B008  (frozen)
        head_tokens: int | None = None,
    ) -> None:
        """`seed`: what costs are taken to be until they are measured; `head_tokens`: of a sequence, up to which the head can draft."""
        self._options = options
        self._clock = clock
        self._head_tokens = head_tokens
        self._sequences: dict[int, SequenceSources] = {}
        self._pools = new_pools(options.sources)
        self._memory = CostMemory(seed)
        self._costs: StepCosts = self._memory.at(0)
        self._planner = Planner(ROW_BUDGET)
        self._counts = {source: _Count() for source in options.sources}
        self._widths: Counter[int] = Counter()
        self._built = 0
        self._draft_s = 0.0

    def _begin(self, candidate: Candidate[S]) -> None:
        """A sequence decodes for the first time. What others' drafts showed counts for it, too."""
        known = (*candidate.prompt, candidate.next_token)
        self._sequences[candidate.number] = SequenceSources.begin(self._pools, known)
        self._planner.wake()

    def end(self, number: int) -> None:
        """A sequence ended; nothing happens when it had not begun."""
        self._sequences.pop(number, None)

    def emitted(self, number: int, token: int) -> None:
        """A token was chosen for the sequence."""
        sequence = self._sequences.get(number)
        if sequence is not None and sequence.lookup is not None:
            sequence.lookup.extend((token,))

    def drafts(self, runner: DraftRunner[S], candidates: Sequence[Candidate[S]]) -> list[list[int]]:
        """For each candidate the tokens to verify after its next one, none where that is best."""
        for c in candidates:
            if c.number not in self._sequences:
                self._begin(c)
        self._built, self._draft_s = runner.graphs_built, 0.0
        self._costs = self._memory.at(max((c.length for c in candidates), default=0))
        sequences = [self._sequences[c.number] for c in candidates]
        if self._options.sources == (HEAD,) and not self._options.width and self._planner.rests(len(candidates)):
            for sequence in sequences:
                sequence.nothing()
            return [[] for _ in candidates]
        limits = [max(0, min(c.room, self._options.max_drafts)) for c in candidates]
        charge = self._planner.utility * self._costs.of_drafting(1, 1) / max(1, len(candidates))
        offers = [
            sequence.offer(limit, self._head_limit(c, limit), charge)
            for c, sequence, limit in zip(candidates, sequences, limits, strict=True)
        ]
        counts = self._plan(offers)
        wanted = [
            (c.state, c.next_token, count)
            for c, sequence, count in zip(candidates, sequences, counts, strict=True)
            if count and sequence.kind == HEAD
        ]
        by_head = iter(self._draft(runner, wanted))
        for sequence, count in zip(sequences, counts, strict=True):
            if count and sequence.kind == HEAD:
                sequence.take(next(by_head))
            elif count and sequence.match is not None:
                sequence.take(sequence.match.tokens[:count])
        if wanted and len(self._pools) > 1:
            self._chain(sequences, limits, [count for _, _, count in wanted])
        return [[token for part in sequence.parts for token in part.tokens] for sequence in sequences]

    def _head_limit(self, candidate: Candidate[S], limit: int) -> int:
        """Drafts of the head at most."""
        return limit if self._head_tokens is None else min(limit, self._head_tokens - candidate.length)

    def _chain(self, sequences: Sequence[SequenceSources], limits: Sequence[int], by_head: Sequence[int]) -> None:
        """Where the text has been at the head's drafts before, it goes on from there: those drafts cost rows alone."""
        offers = [sequence.offer_more(limit) for sequence, limit in zip(sequences, limits, strict=True)]
        if not any(offer.limit for offer in offers):
            return
        already = [sequence.offered for sequence in sequences]
        if self._options.width:
            counts: Sequence[int] = [offer.limit for offer in offers]
        else:
            paid = self._costs.of_drafting(max(by_head), len(by_head))
            expected = sum(sequence.expected() for sequence in sequences)
            counts = best_plan(offers, self._costs, ROW_BUDGET, already, paid, expected).drafts
        for sequence, count in zip(sequences, counts, strict=True):
            if count and sequence.match is not None:
                sequence.take(sequence.match.tokens[:count])

    def computed(self, runner: DraftRunner[S], rows: int, seconds: float) -> None:
        """The row graph of the step had so many rows and took so long."""
        if runner.graphs_built == self._built:
            self._costs.verify.observe(rows, seconds)
        elif self._costs.verify.measured:
            self._planner.took(self._draft_s + seconds)

    def verified(self, number: int, accepted: int) -> None:
        """So many of the sequence's drafts were what its sampler chose."""
        sequence = self._sequences.get(number)
        if sequence is None:
            return
        self._widths[1 + sequence.offered] += 1
        depth = 0
        for part in sequence.parts:
            count, offered = self._counts[source_of(part.kind)], len(part.tokens)
            count.drafted += offered
            if accepted >= depth:
                count.add(depth, offered, min(accepted - depth, offered))
            depth += offered
        sequence.verified(accepted)

    def stats(self) -> SpecStats:
        """What happened so far."""
        ranges = self._memory.ranges
        costs = ranges[min(ranges)]
        return SpecStats(
            width=self._options.width,
            sources=MappingProxyType(
                {s: SourceStats(c.drafted, tuple(c.reached), tuple(c.accepted)) for s, c in self._counts.items()}
            ),
            widths=MappingProxyType(dict(sorted(self._widths.items()))),
            step_seconds=MappingProxyType(costs.verify.means()),
            draft_seconds=MappingProxyType(costs.draft.table.means()),
        )

    def _plan(self, offers: Sequence[Offer]) -> Sequence[int]:
        """Drafts for each."""
        if self._options.width == 0:
            return self._planner.plan(offers, self._costs)
        share = max(0, ROW_BUDGET - len(offers)) // max(1, len(offers))
        return [min(offer.limit, share) for offer in offers]

    def _draft(self, runner: DraftRunner[S], wanted: Sequence[tuple[S, int, int]]) -> list[list[int]]:
        if not wanted:
            return []
        begun = self._clock()
        drafts = runner.draft(wanted)
        self._draft_s = self._clock() - begun
        if runner.graphs_built == self._built:
            self._costs.draft.observe(max(count for _, _, count in wanted), len(wanted), self._draft_s)
        return drafts
