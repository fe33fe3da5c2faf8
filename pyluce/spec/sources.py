"""The drafts of one sequence: from the model's head, from its own text, or the text's after the head's; and how often each was right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from pyluce.spec.acceptance import Acceptance, AcceptancePool
from pyluce.spec.lookup import Match, PromptLookup
from pyluce.spec.options import MAX_DRAFTS
from pyluce.spec.planner import Offer

HEAD: Final = "mtp"
SHORT_MATCH: Final = "lookup"
LONG_MATCH: Final = "lookup, long match"
PRIOR_RATES: Final = {HEAD: 0.90, SHORT_MATCH: 0.60, LONG_MATCH: 0.85}
NOTHING: Final = Offer((), 0)


def source_of(kind: str) -> str:
    """The source, "mtp" or "lookup", of a kind of drafts."""
    return kind.partition(",")[0]


def new_pools(sources: Sequence[str]) -> dict[str, AcceptancePool]:
    """A pool for each kind of drafts that the sources give."""
    kinds = [kind for kind in PRIOR_RATES if source_of(kind) in sources]
    return {kind: AcceptancePool(MAX_DRAFTS, PRIOR_RATES[kind]) for kind in kinds}


@dataclass(frozen=True, slots=True)
class Part:
    """So many drafts of a kind, one behind the other."""

    kind: str
    tokens: Sequence[int]


@dataclass(slots=True)
class SequenceSources:
    """What is known of one sequence; `kind` and `parts`: of its drafts in this step."""

    acceptance: dict[str, Acceptance]
    lookup: PromptLookup | None
    kind: str = ""
    match: Match | None = None
    parts: list[Part] = field(default_factory=list)
    clean: bool = False

    @classmethod
    def begin(cls, pools: Mapping[str, AcceptancePool], known: Sequence[int]) -> SequenceSources:
        """A sequence whose tokens so far are `known`."""
        lookup = PromptLookup(known) if SHORT_MATCH in pools else None
        return cls({kind: Acceptance(pool) for kind, pool in pools.items()}, lookup)

    @property
    def offered(self) -> int:
        """Drafts of this step."""
        return sum(len(part.tokens) for part in self.parts)

    def offer(self, limit: int, head_limit: int, draft_charge: float) -> Offer:
        """What the better of the sources has to offer, at most `limit` drafts: that which expects more accepted drafts.

        `head_limit`: drafts of the head at most.
        `draft_charge`: accepted drafts that a step of the head has to bring to be worth its time.
        """
        self.nothing()
        if limit <= 0:
            return NOTHING
        best, chosen = 0.0, NOTHING
        if HEAD in self.acceptance and head_limit > 0:
            survival = self.acceptance[HEAD].survival(head_limit)
            self.kind, best = HEAD, sum(alive - draft_charge for alive in survival if alive > draft_charge)
            chosen = Offer(survival, head_limit, drafted=True, clean=self.clean)
        self.match = self.lookup.draft(limit) if self.lookup is not None else None
        if self.match is not None:
            kind = LONG_MATCH if self.match.long else SHORT_MATCH
            survival = self.acceptance[kind].survival(limit)
            if sum(survival) > best or not self.kind:
                self.kind = kind
                chosen = Offer(survival, limit, drafted=False, clean=self.clean)
        return chosen

    def nothing(self) -> None:
        """No drafts in this step."""
        self.kind, self.match, self.parts = "", None, []

    def take(self, tokens: Sequence[int]) -> None:
        """These drafts, of the kind that was offered, are verified."""
        if tokens:
            self.parts.append(Part(self.kind, tokens))

    def offer_more(self, limit: int) -> Offer:
        """What the text has to offer after the head's drafts, at most `limit` drafts in all."""
        self.match = None
        if self.lookup is None or self.kind != HEAD or not self.parts:
            return NOTHING
        drafts = self.parts[0].tokens
        self.match = self.lookup.draft(limit - len(drafts), drafts)
        if self.match is None:
            return NOTHING
        self.kind = LONG_MATCH if self.match.long else SHORT_MATCH
        reached = self.acceptance[HEAD].survival(len(drafts))
        alive = reached[-1] if len(reached) == len(drafts) else 0.0
        return Offer(
            self.acceptance[self.kind].survival(len(self.match.tokens), alive), len(self.match.tokens), drafted=False
        )

    def expected(self) -> float:
        """Accepted drafts that are expected of this step's."""
        return sum(sum(self.acceptance[part.kind].survival(len(part.tokens))) for part in self.parts[:1])

    def verified(self, accepted: int) -> None:
        """So many of the drafts were right."""
        offered = self.offered
        self.clean = 0 < offered == accepted
        for part in self.parts:
            if accepted < 0:
                break
            self.acceptance[part.kind].observe(min(accepted, len(part.tokens)), len(part.tokens))
            accepted -= len(part.tokens)
