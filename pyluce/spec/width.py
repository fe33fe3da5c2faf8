"""The reference system's controller: the width of one sequence alone, by its rules and constants. What `Planner` is measured against.

A width counts rows: the next token and its drafts. Three rules:

* plain (no costs known): an average of accepted drafts says how many are worth offering; a step whose drafts were all accepted
  adds one, a step without a hit shortens the average to a quarter.
* by the survival of the prefix: per depth an average of "the draft and all before it were accepted".
* by reached depths: per depth how often a draft was accepted once all before it were.

The latter two take the width with the most expected tokens for its price. Our reading, where the description leaves a choice, is in
the code; the reference's calibration by a drafter's confidence has no counterpart here, as our head gives none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from pyluce.spec.options import MAX_WIDTH

Rule = Literal["plain", "prefix", "reached"]

ACCEPTED_START: Final = 2.0
SURVIVAL_PRIOR: Final = 0.75
ALPHA: Final = 0.2
BACK_OFF: Final = 0.25
COST_WARM_UP: Final = 4
COST_WINDOW: Final = 16
TRUSTED: Final = 4
STALE_AFTER: Final = 64
OUTLIER: Final = 1.25
REACHED_TRIALS: Final = 16.0
REACHED_RATE: Final = 0.90
REACHED_WINDOW: Final = 128.0
PROBE_INTERVAL: Final = 17
SURVIVAL_FLOOR: Final = 0.05
EXPLORE_MARGIN: Final = 0.03


@dataclass(slots=True)
class _Cost:
    seen: int = 0
    samples: int = 0
    mean: float = 0.0
    timed_at: int = 0


class AdaptiveSpecWidth:
    """`next_width` and `observe` take turns. `first_cost` and `row_cost`: the shape of costs by width until they are measured."""

    def __init__(
        self, max_width: int = MAX_WIDTH, rule: Rule = "reached", first_cost: float = 45.0, row_cost: float = 20.0
    ) -> None:
        self._max_width = max_width
        self._rule = rule
        self._shape = {width: first_cost + row_cost * (width - 1) for width in range(1, max_width + 1)}
        self._costs = {width: _Cost() for width in range(1, max_width + 1)}
        self._timed = 0
        self._steps = 0
        self._clean = False
        self._accepted = ACCEPTED_START
        depths = range(max_width - 1)
        self._prefix = [SURVIVAL_PRIOR ** (depth + 1) for depth in depths]
        self._trials = [REACHED_TRIALS for _ in depths]
        self._hits = [REACHED_TRIALS * REACHED_RATE for _ in depths]

    def next_width(self, proposed: int | None = None) -> int:
        """Rows to verify, at most `proposed`, at least 1."""
        most = self._max_width if proposed is None else min(proposed, self._max_width)
        if self._rule == "plain":
            return max(1, min(most, 1 + round(self._accepted) + self._clean))
        utilities = {1: 1.0 / self.price(1)}
        expected = 1.0
        for width, alive in enumerate(self.survival(most - 1), 2):
            expected += alive
            utilities[width] = expected / self.price(width)
        best = max(utilities, key=lambda width: (utilities[width], -width))
        if self._rule == "prefix" or best == most:
            return best
        self._steps += 1
        if self._steps % PROBE_INTERVAL == 0:
            return best + 1
        near = (1.0 - EXPLORE_MARGIN) * utilities[best]
        return best + 1 if self._clean and utilities.get(best + 1, 0.0) >= near else best

    def observe(self, accepted: int, offered: int, cost: float | None) -> None:
        """Of `offered` drafts the first `accepted` were right; `cost` of the step, None when it built a graph."""
        self._clean = 0 < offered == accepted
        if offered:
            kept = BACK_OFF * self._accepted if not accepted else self._accepted
            self._accepted = kept + ALPHA * (accepted - kept)
            self._observe_prefix(accepted, offered)
        for depth in range(min(accepted + 1, offered)):
            if self._trials[depth] >= REACHED_WINDOW:
                self._trials[depth] /= 2
                self._hits[depth] /= 2
            self._trials[depth] += 1
            self._hits[depth] += depth < accepted
        if cost is not None:
            self._observe_cost(1 + offered, cost)

    def survival(self, count: int) -> list[float]:
        """For depths 1 .. count, how probable it is that a draft and all before it are accepted; ends below `SURVIVAL_FLOOR`."""
        out: list[float] = []
        alive = 1.0
        for depth in range(count):
            reached = self._hits[depth] / self._trials[depth]
            alive = alive * reached if self._rule == "reached" else self._prefix[depth]
            if alive < SURVIVAL_FLOOR and out:
                break
            out.append(alive)
        return out

    def price(self, width: int) -> float:
        """Expected cost: the width's own mean, a stale one no more than the shape says; else the shape through the nearest mean."""
        cost = self._costs[width]
        known = [w for w, c in self._costs.items() if c.samples >= TRUSTED]
        if cost.samples >= TRUSTED:
            others = [w for w in known if w != width]
            stale = self._timed - cost.timed_at > STALE_AFTER
            return min(cost.mean, self._scaled(width, others)) if stale and others else cost.mean
        return self._scaled(width, known)

    def carry_acceptance(self, trials: float = 32.0) -> None:
        """Another request begins: rates stay, each depth worth at most so many trials."""
        for depth, count in enumerate(self._trials):
            share = min(1.0, trials / count)
            self._trials[depth] *= share
            self._hits[depth] *= share
        self._clean = False

    def _scaled(self, width: int, known: list[int]) -> float:
        if not known:
            return self._shape[width]
        nearest = min(known, key=lambda other: (abs(other - width), other))
        return self._shape[width] * self._costs[nearest].mean / self._shape[nearest]

    def _observe_prefix(self, accepted: int, offered: int) -> None:
        """Ones up to the last accepted draft, zeros beyond it; after a clean draft one depth more, by the ratio of the last two."""
        for depth in range(offered):
            self._prefix[depth] += ALPHA * ((depth < accepted) - self._prefix[depth])
        if accepted == offered < len(self._prefix):
            ratio = self._prefix[offered - 1] / self._prefix[offered - 2] if offered > 1 else self._prefix[0]
            self._prefix[offered] = min(self._prefix[offered - 1], self._prefix[offered - 1] * ratio)

    def _observe_cost(self, width: int, cost: float) -> None:
        entry = self._costs[width]
        self._timed += 1
        if entry.samples and self._timed - entry.timed_at > STALE_AFTER:
            entry.samples = 0
        entry.timed_at = self._timed
        entry.seen += 1
        if entry.seen <= COST_WARM_UP:
            return
        if entry.samples:
            cost = min(cost, OUTLIER * entry.mean)
        entry.samples = min(entry.samples + 1, COST_WINDOW)
        entry.mean += (cost - entry.mean) / entry.samples
