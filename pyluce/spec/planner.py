"""How many drafts each sequence gets in a step, priced for all sequences together.

A row costs what it adds to the step that everybody waits for, so the plan is chosen as a whole: the expected tokens of all
sequences, divided by the time of the step. A sequence's drafts are worth less with every depth, so for a given number of rows
the best plan takes the most probable drafts of all; what is left to try is how many rows, and how many draft steps before them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

PROBE_INTERVAL: Final = 17
MOST_PATIENT: Final = 2
EXPLORE_MARGIN: Final = 0.03


class Prices(Protocol):
    """What a step costs, in any unit: its rows, and the draft steps before them."""

    def of_rows(self, rows: int) -> float:
        """Of verifying so many rows, at least one."""

    def of_drafting(self, depth: int) -> float:
        """Of so many draft steps; none cost nothing."""


@dataclass(frozen=True, slots=True)
class Offer:
    """What one sequence could verify.

    survival: for depths 1, 2, ... how probable it is that the draft and all before it are accepted. drafted: the drafts cost draft
    steps. limit: drafts at most. clean: its last drafts were all accepted.
    """

    survival: Sequence[float]
    limit: int
    drafted: bool = True
    clean: bool = False


@dataclass(frozen=True, slots=True)
class JointPlan:
    """Drafts for each offer, and what is expected of the step: tokens a unit of price."""

    drafts: tuple[int, ...]
    utility: float


def best_plan(offers: Sequence[Offer], prices: Prices, budget: int) -> JointPlan:
    """The plan with the most expected tokens for its price, of equal ones that with the fewest rows.

    `budget`: rows at most, though every offer has one.
    """
    n = len(offers)
    room = max(0, budget - n)
    candidates = sorted(
        (-alive, depth, i)
        for i, offer in enumerate(offers)
        for depth, alive in enumerate(offer.survival[: offer.limit], 1)
    )
    deepest = max((depth for _, depth, i in candidates if offers[i].drafted), default=0)
    of_rows = [prices.of_rows(rows) for rows in range(n, n + min(room, len(candidates)) + 1)]
    of_drafting = [prices.of_drafting(depth) for depth in range(deepest + 1)]
    best = JointPlan((0,) * n, n / of_rows[0])
    for cap in range(deepest + 1):
        taken, expected, depth_used, rows = [0] * n, float(n), 0, n
        for negative, depth, i in candidates:
            if offers[i].drafted:
                if depth > cap:
                    continue
                depth_used = max(depth_used, depth)
            if rows - n == room:
                break
            rows += 1
            taken[i] = depth
            expected -= negative
            utility = expected / (of_rows[rows - n] + of_drafting[depth_used])
            if utility > best.utility:
                best = JointPlan(tuple(taken), utility)
    return best


class Planner:
    """Plans step after step, and now and then tries one draft more than seems best, to learn how that would be.

    Every `PROBE_INTERVAL`th step one sequence gets a draft more, in turn; while the best plan stays the same, only every second,
    then every `MOST_PATIENT`th time. Otherwise a sequence whose last drafts were all accepted does,
    where that costs the plan at most `EXPLORE_MARGIN`.
    """

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._steps = 0
        self._turn = 0
        self._patience = 1
        self._last: tuple[int, ...] = ()

    def plan(self, offers: Sequence[Offer], prices: Prices) -> tuple[int, ...]:
        """How many drafts each offer's sequence verifies."""
        if not offers:
            return ()
        best = best_plan(offers, prices, self._budget)
        drafts = list(best.drafts)
        if len(offers) + sum(drafts) >= self._budget:
            return best.drafts
        self._steps += 1
        if best.drafts != self._last:
            self._last, self._patience = best.drafts, 1
        wider = [i for i, offer in enumerate(offers) if drafts[i] < offer.limit]
        if self._steps >= PROBE_INTERVAL * self._patience:
            self._steps = 0
            self._patience = min(2 * self._patience, MOST_PATIENT)
            if wider:
                self._turn += 1
                drafts[wider[self._turn % len(wider)]] += 1
            return tuple(drafts)
        for i in wider:
            if offers[i].clean and drafts[i] < len(offers[i].survival):
                drafts[i] += 1
                full = len(offers) + sum(drafts) > self._budget
                if full or _utility(offers, drafts, prices) < (1.0 - EXPLORE_MARGIN) * best.utility:
                    drafts[i] -= 1
        return tuple(drafts)


def _utility(offers: Sequence[Offer], drafts: Sequence[int], prices: Prices) -> float:
    expected = sum(1.0 + sum(offer.survival[:count]) for offer, count in zip(offers, drafts, strict=True))
    depth = max((count for offer, count in zip(offers, drafts, strict=True) if offer.drafted), default=0)
    return expected / (prices.of_rows(len(offers) + sum(drafts)) + prices.of_drafting(depth))
