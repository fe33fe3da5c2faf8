"""Simulated speculation: drafts that are right by chance, steps that cost what a line says, with noise. Deterministic by seed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from pyluce.spec.acceptance import Acceptance, AcceptancePool
from pyluce.spec.cost import CostMemory, Seed, StepCosts
from pyluce.spec.planner import Offer, Planner
from pyluce.spec.width import AdaptiveSpecWidth

DISTRIBUTIONS: dict[str, tuple[float, ...]] = {
    "never": (0.02,) * 7,
    "seldom": (0.3,) * 7,
    "even": (0.5,) * 7,
    "often": (0.7,) * 7,
    "mostly": (0.85,) * 7,
    "nearly always": (0.97,) * 7,
    "falling": (0.9, 0.8, 0.65, 0.5, 0.35, 0.2, 0.1),
}
"""Rates by depth: how often a draft is right when all before it were."""

SLOPES = (0.03, 0.2, 0.44)
"""What a row more costs, as a share of a step of one row: memory-bound, in between, the reference system's."""


def step_cost(rows: int, slope: float) -> float:
    return 1.0 + slope * (rows - 1)


def accepted_of(rates: Sequence[float], offered: int, rng: np.random.Generator) -> int:
    draws = rng.random(len(rates))  # as many for every width, so that controllers see the same luck
    count = 0
    while count < offered and draws[count] < rates[count]:
        count += 1
    return count


@dataclass
class Total:
    tokens: int = 0
    seconds: float = 0.0

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def expected_rate(rates: Sequence[float], width: int, slope: float) -> float:
    """Tokens a second of a fixed width, exactly."""
    alive = np.cumprod(rates[: width - 1])
    return float((1.0 + alive.sum()) / step_cost(width, slope))


def best_fixed(rates: Sequence[float], slope: float, max_width: int = 8) -> float:
    return max(expected_rate(rates, width, slope) for width in range(1, max_width + 1))


def run(
    next_width: Callable[[], int],
    observe: Callable[[int, int, float | None], None],
    rates: Sequence[float],
    slope: float,
    steps: int,
    seed: int,
    noise: float = 0.1,
) -> Total:
    """Tokens (by expectation, so that luck does not decide) and seconds of so many steps.

    One measured time in twenty is three times too long, one step in thirty builds a graph and has none.
    """
    rng = np.random.default_rng(seed)
    total = Total()
    for _ in range(steps):
        width = next_width()
        accepted = accepted_of(rates, width - 1, rng)
        cost = step_cost(width, slope)
        measured = cost * (1.0 + noise * rng.standard_normal()) * (3.0 if rng.random() < 0.05 else 1.0)
        observe(accepted, width - 1, None if rng.random() < 1 / 30 else max(measured, 0.1 * cost))
        total.tokens += 1 + float(np.cumprod(rates[: width - 1]).sum())  # type: ignore[assignment]
        total.seconds += cost
    return total


class OneSequence:
    """The engine's planner with one sequence whose drafts cost nothing."""

    def __init__(self, max_width: int = 8) -> None:
        self._pool = AcceptancePool(max_width - 1)
        self._planner = Planner(max_width)
        self._costs = CostMemory()
        self._limit = max_width - 1
        self.next_request()

    def next_request(self) -> None:
        """Another request begins: costs and the pool stay."""
        self.acceptance = Acceptance(self._pool)
        self._clean = False

    def next_width(self) -> int:
        offer = Offer(self.acceptance.survival(self._limit), self._limit, drafted=False, clean=self._clean)
        return 1 + self._planner.plan([offer], self._costs.at(0))[0]

    def observe(self, accepted: int, offered: int, seconds: float | None) -> None:
        self.acceptance.observe(accepted, offered)
        self._clean = 0 < offered == accepted
        if seconds is not None:
            self._costs.at(0).verify.observe(1 + offered, seconds)


def run_many(rates: Sequence[Sequence[float]], slope: float, steps: int, seed: int, joint: bool) -> float:
    """Tokens a unit of time of sequences that share their steps: planned jointly, or each by a controller of its own."""
    rng = np.random.default_rng(seed)
    controllers = [AdaptiveSpecWidth() for _ in rates]
    pool, planner, costs = AcceptancePool(7), Planner(32), StepCosts.new(Seed())
    acceptance = [Acceptance(pool) for _ in rates]
    clean = [False] * len(rates)
    tokens = seconds = 0.0
    for _ in range(steps):
        if joint:
            offers = [Offer(a.survival(7), 7, drafted=False, clean=c) for a, c in zip(acceptance, clean, strict=True)]
            drafts = list(planner.plan(offers, costs))
        else:
            left, drafts = 32 - len(rates), []
            for controller in controllers:  # who comes first takes of the rows that there are
                drafts.append(min(left, controller.next_width() - 1))
                left -= drafts[-1]
        cost = step_cost(len(rates) + sum(drafts), slope)
        measured = cost * (1.0 + 0.05 * rng.standard_normal())
        for i, count in enumerate(drafts):
            accepted = accepted_of(rates[i], count, rng)
            tokens += 1 + float(np.cumprod(rates[i][:count]).sum())
            acceptance[i].observe(accepted, count)
            clean[i] = 0 < count == accepted
            controllers[i].observe(accepted, count, measured)
        costs.verify.observe(len(rates) + sum(drafts), measured)
        seconds += cost
    return tokens / seconds
