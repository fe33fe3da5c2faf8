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
MOST_PATIENT: Final = 8
AFTER_A_HIT: Final = 4
PROBE_SHARE: Final = 0.005
SAVED_STEPS: Final = 200
FIRST_SAVINGS: Final = 1.0
MOST_OWED: Final = 1.0
FIRST_STEPS: Final = 64
FIRST_INTERVAL: Final = 4
EXPLORE_MARGIN: Final = 0.03
SWITCH_MARGIN: Final = 0.002
EVERY_SIZE: Final = 8
REST: Final = 8


class Prices(Protocol):
    """What a step costs, in any unit: its rows, and the draft steps before them."""

    def of_rows(self, rows: int) -> float:
        """Of verifying so many rows, at least one."""

    def of_drafting(self, depth: int, n_seqs: int) -> float:
        """Of so many draft steps of so many sequences; none cost nothing."""


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


def round_size(rows: int) -> bool:
    """Rows that a step with drafts may have: beyond `EVERY_SIZE` not every number, since each needs a graph of its own."""
    return rows <= EVERY_SIZE or rows % (2 if rows <= 2 * EVERY_SIZE else 4) == 0


def best_plan(
    offers: Sequence[Offer],
    prices: Prices,
    budget: int,
    already: Sequence[int] = (),
    paid: float = 0.0,
    expected: float = 0.0,
) -> JointPlan:
    """The plan with the most expected tokens for its price, of equal ones that with the fewest rows.

    `budget`: rows at most, though every offer has one. `already`: drafts that each has, beyond which the offers go (their survival
    begins there); `paid`: what those cost; `expected`: accepted drafts expected of them.
    """
    n = len(offers) + sum(already)
    room = max(0, budget - n)
    candidates = sorted(
        (-alive, depth, i)
        for i, offer in enumerate(offers)
        for depth, alive in enumerate(offer.survival[: offer.limit], 1)
    )
    deepest = max((depth for _, depth, i in candidates if offers[i].drafted), default=0)
    of_rows = [prices.of_rows(rows) + paid for rows in range(n, n + min(room, len(candidates)) + 1)]
    begin = len(offers) + expected
    best = JointPlan((0,) * len(offers), begin / of_rows[0])
    of_drafting: dict[tuple[int, int], float] = {}
    for cap in range(deepest + 1):
        taken, tokens, depth_used, n_drafting, rows, drafting = [0] * len(offers), begin, 0, 0, 0, 0.0
        for negative, depth, i in candidates:
            if offers[i].drafted:
                if depth > cap:
                    continue
                n_drafting += depth == 1
                if depth > depth_used or depth == 1:
                    depth_used = max(depth_used, depth)
                    drafts = (depth_used, n_drafting)
                    if drafts not in of_drafting:
                        of_drafting[drafts] = prices.of_drafting(*drafts)
                    drafting = of_drafting[drafts]
            if rows == room:
                break
            rows += 1
            taken[i] = depth
            tokens -= negative
            utility = tokens / (of_rows[rows] + drafting)
            if utility > best.utility and round_size(n + rows):
                best = JointPlan(tuple(taken), utility)
    return best


class Planner:
    """Plans step after step, and now and then tries one draft more than seems best, to learn how that would be.

    What is tried costs: the time that it is expected to take beyond what its tokens are worth. A step may spend `PROBE_SHARE` of its
    time on it, savings of `SAVED_STEPS` steps included; what a probe took longer than expected (a graph that was
    built for it) is owed. Within that, every `PROBE_INTERVAL` steps for each sequence one of them gets a draft more, in turn; while the
    depth of the best plan stays the same every second, fourth, up to `MOST_PATIENT`th time, but soon again after a draft that was
    accepted; and a sequence whose last drafts were all accepted gets one where that costs at most `EXPLORE_MARGIN` of the step.
    """

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._steps = 0
        self._turn = 0
        self._patience = 1
        self._depth = -1
        self._last: tuple[int, ...] = ()
        self._saved = FIRST_SAVINGS  # steps
        self._n_plans = 0
        self.utility = 0.0  # of the last plan without its probe: expected tokens a unit of price
        self._nothing = 0  # plans in a row without a draft
        self._rested = 0
        self._probed: int | None = None  # whose draft of the last plan was a probe
        self._expected = (0.0, 0.0)  # prices of the last plan, if it was a probe, and of the best one

    def rests(self, n_seqs: int) -> bool:
        """After `REST` plans in a row without a draft only every `REST`th step of as many sequences is planned: planning takes time, too."""
        if self._nothing < REST or n_seqs != len(self._last):
            return False
        self._rested = (self._rested + 1) % REST
        if not self._rested:
            return False
        self._steps += 1
        self._saved = min(self._saved + PROBE_SHARE, PROBE_SHARE * SAVED_STEPS)
        return True

    def wake(self) -> None:
        """There is a new sequence."""
        self._nothing = 0

    def plan(self, offers: Sequence[Offer], prices: Prices) -> tuple[int, ...]:
        """How many drafts each offer's sequence verifies."""
        drafts = self._plan(offers, prices)
        self._nothing = 0 if any(drafts) else self._nothing + 1
        return drafts

    def _plan(self, offers: Sequence[Offer], prices: Prices) -> tuple[int, ...]:
        hit = self._probed is not None and self._probed < len(offers) and offers[self._probed].clean
        self._probed = None
        if not offers:
            return ()
        best = self._steady(offers, prices, best_plan(offers, prices, self._budget))
        self._last, self.utility = best.drafts, best.utility
        depth = max(best.drafts)
        if depth != self._depth:
            self._depth, self._patience = depth, 1
        drafts = list(best.drafts)
        if len(offers) + sum(drafts) >= self._budget:
            return best.drafts
        self._steps += 1
        self._saved = min(self._saved + PROBE_SHARE, PROBE_SHARE * SAVED_STEPS)
        self._n_plans += 1
        interval = PROBE_INTERVAL * self._patience * len(offers)
        if self._n_plans < FIRST_STEPS:
            interval = FIRST_INTERVAL
        if hit:
            self._steps = max(self._steps, interval - AFTER_A_HIT)
        wider = [i for i, offer in enumerate(offers) if drafts[i] < min(offer.limit, len(offer.survival))]
        if not wider:
            return best.drafts
        if self._steps >= interval:
            self._turn += 1
            if self._probe(offers, prices, best, drafts, wider[self._turn % len(wider)], self._saved):
                self._steps = 0
                self._patience = min(2 * self._patience, MOST_PATIENT)
            return tuple(drafts)
        for i in wider:
            if offers[i].clean:
                self._probe(offers, prices, best, drafts, i, min(EXPLORE_MARGIN, self._saved))
        return tuple(drafts)

    def took(self, price: float) -> None:
        """The step that was planned had to build graphs and took so long."""
        expected, best = self._expected
        if self._probed is not None and price > expected:
            self._saved = max(self._saved - (price - expected) / best, -MOST_OWED)

    def _steady(self, offers: Sequence[Offer], prices: Prices, best: JointPlan) -> JointPlan:
        """The last plan, as long as it is nearly as good: another one needs other graphs."""
        last = self._last
        if last == best.drafts or len(last) != len(offers):
            return best
        if any(count > min(o.limit, len(o.survival)) for count, o in zip(last, offers, strict=True)):
            return best
        tokens, price = _worth(offers, last, prices)
        utility = tokens / price
        return JointPlan(last, utility) if utility >= (1.0 - SWITCH_MARGIN) * best.utility else best

    def _probe(
        self, offers: Sequence[Offer], prices: Prices, best: JointPlan, drafts: list[int], i: int, limit: float
    ) -> bool:
        """Give sequence i a draft more, if that costs at most `limit` of a step and there is room."""
        if len(offers) + sum(drafts) >= self._budget:
            return False
        _, price = _worth(offers, best.drafts, prices)
        before, drafts[i] = drafts[i], drafts[i] + 1
        tokens, probed = _worth(offers, drafts, prices)
        cost = (probed - tokens / best.utility) / price
        if cost > limit:
            drafts[i] = before
            return False
        self._saved -= max(0.0, cost)
        self._probed = i
        self._expected = (probed, price)
        return True


def _worth(offers: Sequence[Offer], drafts: Sequence[int], prices: Prices) -> tuple[float, float]:
    """Expected tokens, and the price."""
    expected, depth, n_drafting = float(len(offers)), 0, 0
    for offer, count in zip(offers, drafts, strict=True):
        expected += sum(offer.survival[:count])
        if offer.drafted and count:
            n_drafting += 1
            depth = max(depth, count)
    rows = len(offers) + sum(drafts)
    return expected, prices.of_rows(rows) + (prices.of_drafting(depth, n_drafting) if depth else 0.0)
