"""Drafts for the sequences that decode, step after step: which source, how many, and what is learned from the outcome."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, Generic, Protocol, TypeVar

from pyluce.spec.acceptance import Acceptance
from pyluce.spec.cost import CostMemory, Seed
from pyluce.spec.lookup import PromptLookup
from pyluce.spec.options import MAX_DRAFTS, ROW_BUDGET, SpecOptions
from pyluce.spec.planner import Offer, Planner
from pyluce.spec.stats import SourceStats, SpecStats

S = TypeVar("S")
S_in = TypeVar("S_in", contravariant=True)

LOOKUP_PRIOR: Final = 0.75
JOINT_WARM_UP: Final = 1  # steps of many sequences have many sizes, each of which comes seldom


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
class _Sequence:
    """What is known of one sequence. `source` and `offered`: of its drafts in this step."""

    acceptance: dict[str, Acceptance]
    lookup: PromptLookup | None
    source: str = ""
    offered: int = 0
    clean: bool = False


@dataclass(slots=True)
class _Count:
    drafted: int = 0
    reached: list[int] = field(default_factory=lambda: [0] * MAX_DRAFTS)
    accepted: list[int] = field(default_factory=lambda: [0] * MAX_DRAFTS)


class Speculator(Generic[S]):
    """One for an engine. A step: `drafts`, compute, `computed` with the step's time, then for every candidate `emitted` for each
    token that was chosen, and `verified`. A sequence is known from its first step until `end`.
    """

    def __init__(
        self,
        options: SpecOptions,
        clock: Callable[[], float] = time.perf_counter,
        seed: Seed = Seed(),  # noqa: B008  (frozen)
    ) -> None:
        """`seed`: what costs are taken to be until they are measured."""
        self._options = options
        self._clock = clock
        self._sequences: dict[int, _Sequence] = {}
        self._carried = {
            source: Acceptance(MAX_DRAFTS, **({"prior_rate": LOOKUP_PRIOR} if source == "lookup" else {}))
            for source in options.sources
        }
        self._costs = CostMemory(seed, warm_up=JOINT_WARM_UP)
        self._planner = Planner(ROW_BUDGET)
        self._counts = {source: _Count() for source in options.sources}
        self._widths: Counter[int] = Counter()
        self._built = 0
        self._length = 0

    def _begin(self, candidate: Candidate[S]) -> None:
        """A sequence decodes for the first time. Acceptance is carried over from earlier ones."""
        known = (*candidate.prompt, candidate.next_token)
        lookup = PromptLookup(known) if "lookup" in self._options.sources else None
        self._sequences[candidate.number] = _Sequence({s: a.carry() for s, a in self._carried.items()}, lookup)

    def end(self, number: int) -> None:
        """A sequence ended; nothing happens when it had not begun."""
        ended = self._sequences.pop(number, None)
        if ended is not None:
            self._carried = ended.acceptance

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
        self._length = max((c.length for c in candidates), default=0)
        found = [self._look_up(c) for c in candidates]
        offers = [self._offer(c, looked_up) for c, looked_up in zip(candidates, found, strict=True)]
        counts = self._plan(offers)
        wanted = [
            (c.state, c.next_token, count)
            for c, count in zip(candidates, counts, strict=True)
            if count and self._sequences[c.number].source == "mtp"
        ]
        by_head = iter(self._draft(runner, wanted))
        out = []
        for c, count, looked_up in zip(candidates, counts, found, strict=True):
            sequence = self._sequences[c.number]
            tokens = (next(by_head) if sequence.source == "mtp" else looked_up[:count]) if count else []
            sequence.offered = len(tokens)
            out.append(tokens)
        self._built = runner.graphs_built
        return out

    def computed(self, runner: DraftRunner[S], rows: int, seconds: float) -> None:
        """The row graph of the step had so many rows and took so long."""
        if runner.graphs_built == self._built:
            self._costs.at(self._length).verify.observe(rows, seconds)

    def verified(self, number: int, accepted: int) -> None:
        """So many of the sequence's drafts were what its sampler chose."""
        sequence = self._sequences.get(number)
        if sequence is None:
            return
        offered = sequence.offered
        self._widths[1 + offered] += 1
        sequence.clean = 0 < offered == accepted
        if not offered:
            return
        sequence.acceptance[sequence.source].observe(accepted, offered)
        count = self._counts[sequence.source]
        count.drafted += offered
        for depth in range(min(accepted + 1, offered)):
            count.reached[depth] += 1
            count.accepted[depth] += depth < accepted

    def stats(self) -> SpecStats:
        """What happened so far."""
        ranges = self._costs.ranges
        costs = ranges[min(ranges)] if ranges else None
        return SpecStats(
            width=self._options.width,
            sources=MappingProxyType(
                {s: SourceStats(c.drafted, tuple(c.reached), tuple(c.accepted)) for s, c in self._counts.items()}
            ),
            widths=MappingProxyType(dict(sorted(self._widths.items()))),
            step_seconds=MappingProxyType(costs.verify.means() if costs else {}),
            draft_seconds=MappingProxyType(costs.draft.means() if costs else {}),
        )

    def _look_up(self, candidate: Candidate[S]) -> list[int]:
        lookup = self._sequences[candidate.number].lookup
        return lookup.draft(min(candidate.room, MAX_DRAFTS)) if lookup is not None else []

    def _offer(self, candidate: Candidate[S], looked_up: list[int]) -> Offer:
        """What the better of the sequence's sources has to offer: that which expects more accepted drafts."""
        sequence = self._sequences[candidate.number]
        limit = min(candidate.room, self._options.max_drafts)
        offers: dict[str, Offer] = {}
        for source, acceptance in sequence.acceptance.items():
            most = min(limit, len(looked_up)) if source == "lookup" else limit
            if most > 0:
                survival = acceptance.survival(most)
                offers[source] = Offer(survival, most, drafted=source == "mtp", clean=sequence.clean)
        sequence.source = max(offers, key=lambda s: sum(offers[s].survival), default="")
        return offers.get(sequence.source, Offer((), 0))

    def _plan(self, offers: Sequence[Offer]) -> Sequence[int]:
        if self._options.width == 0:
            return self._planner.plan(offers, self._costs.at(self._length))
        share = max(0, ROW_BUDGET - len(offers)) // max(1, len(offers))
        return [min(offer.limit, share) for offer in offers]

    def _draft(self, runner: DraftRunner[S], wanted: Sequence[tuple[S, int, int]]) -> list[list[int]]:
        if not wanted:
            return []
        built, begun = runner.graphs_built, self._clock()
        drafts = runner.draft(wanted)
        if runner.graphs_built == built:
            depth = max(count for _, _, count in wanted)
            self._costs.at(self._length).draft.observe(depth, self._clock() - begun)
        return drafts
