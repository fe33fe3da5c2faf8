"""The joint plan is the best there is for its prices, keeps to its limits, and never serves many worse than each for itself."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from pyluce.spec.cost import StepCosts
from pyluce.spec.planner import PROBE_INTERVAL, Offer, Planner, best_plan
from tests.support.spec_sim import DISTRIBUTIONS, run_many


class Line:
    """Prices of a line, with draft steps."""

    def __init__(self, slope: float, draft: float) -> None:
        self.slope = slope
        self.draft = draft

    def of_rows(self, rows: int) -> float:
        return 1.0 + self.slope * (rows - 1)

    def of_drafting(self, depth: int) -> float:
        return self.draft * depth


def offer(rng: random.Random) -> Offer:
    rates = [rng.random() for _ in range(rng.randrange(0, 4))]
    survival = list(itertools.accumulate(rates, lambda a, b: a * b))
    return Offer(survival, rng.randrange(0, 5), drafted=rng.random() < 0.7)


@pytest.mark.parametrize("seed", range(60))
def test_against_every_plan_there_is(seed: int) -> None:
    rng = random.Random(seed)
    offers = [offer(rng) for _ in range(rng.randrange(1, 4))]
    prices = Line(rng.choice([0.01, 0.1, 0.3, 1.0]), rng.choice([0.0, 0.02, 0.2]))
    budget = rng.randrange(len(offers), 10)
    best = 0.0
    for counts in itertools.product(*(range(min(len(o.survival), o.limit) + 1) for o in offers)):
        rows = len(offers) + sum(counts)
        if rows <= budget:
            depth = max((c for c, o in zip(counts, offers, strict=True) if o.drafted), default=0)
            expected = sum(1 + sum(o.survival[:c]) for c, o in zip(counts, offers, strict=True))
            best = max(best, expected / (prices.of_rows(rows) + prices.of_drafting(depth)))
    plan = best_plan(offers, prices, budget)
    assert plan.utility == pytest.approx(best)
    assert len(offers) + sum(plan.drafts) <= budget
    assert all(count <= min(o.limit, len(o.survival)) for count, o in zip(plan.drafts, offers, strict=True))


def test_more_sequences_than_the_budget_has_rows() -> None:
    offers = [Offer((0.9, 0.8), 7)] * 40
    assert Planner(32).plan(offers, Line(0.0, 0.0)) == (0,) * 40


def test_a_hopeless_source_is_tried_now_and_then() -> None:
    planner = Planner(8)
    offers = [Offer((0.01,), 7)]
    plans = [planner.plan(offers, Line(1.0, 0.1))[0] for _ in range(20 * PROBE_INTERVAL)]
    assert set(plans) == {0, 1}
    assert 5 <= sum(plans) <= 20


def test_limits_are_kept_when_exploring() -> None:
    planner = Planner(8)
    for _ in range(100):
        assert planner.plan([Offer((0.99, 0.98), 2, clean=True)], Line(0.01, 0.0))[0] <= 2


@pytest.mark.parametrize("slope", [0.03, 0.2])
@pytest.mark.parametrize("n", [1, 2, 4, 8, 16])
def test_joint_and_independent(n: int, slope: float) -> None:
    """Each for itself prices its rows as if it were alone; what is shared is the time of the step. Alone they are the same but for noise."""
    rng = np.random.default_rng(n)
    names = list(DISTRIBUTIONS)
    rates = [DISTRIBUTIONS[names[int(rng.integers(len(names)))]] for _ in range(n)]
    joint = independent = 0.0
    for seed in range(2):
        joint += run_many(rates, slope, 300, seed, planner=Planner(32), costs=StepCosts.new(warm_up=1))
        independent += run_many(rates, slope, 300, seed)
    assert joint >= (1.0 if n > 1 else 0.99) * independent, f"{joint / independent:.3f}"
