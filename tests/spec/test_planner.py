"""The joint plan is the best there is for its prices, keeps to its limits, and never serves many worse than each for itself."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from pyluce.spec.planner import (
    FIRST_SAVINGS,
    FIRST_STEPS,
    PROBE_INTERVAL,
    PROBE_SHARE,
    Offer,
    Planner,
    best_plan,
    round_size,
)
from tests.support.spec_sim import DISTRIBUTIONS, SLOPES, run_many


class Line:
    """Prices of a line, with draft steps."""

    def __init__(self, slope: float, draft: float) -> None:
        self.slope = slope
        self.draft = draft

    def of_rows(self, rows: int) -> float:
        return 1.0 + self.slope * (rows - 1)

    def of_drafting(self, depth: int, n_seqs: int) -> float:
        return self.draft * depth * (1.0 + 0.3 * (n_seqs - 1))


def offer(rng: random.Random) -> Offer:
    rates = [rng.random() for _ in range(rng.randrange(0, 4))]
    survival = list(itertools.accumulate(rates, lambda a, b: a * b))
    return Offer(survival, rng.randrange(0, 5), drafted=rng.random() < 0.7)


def worth(offers: list[Offer], counts: tuple[int, ...], prices: Line, already: list[int], paid: float) -> float:
    """Tokens for the price, from the definition."""
    drafting = [c for c, o in zip(counts, offers, strict=True) if o.drafted and c]
    drafted = prices.of_drafting(max(drafting), len(drafting)) if drafting else 0.0
    rows = len(offers) + sum(counts) + sum(already)
    expected = len(offers) + sum(sum(o.survival[:c]) for c, o in zip(counts, offers, strict=True))
    return expected / (prices.of_rows(rows) + drafted + paid)


@pytest.mark.parametrize("chained", [False, True])
@pytest.mark.parametrize("seed", range(40))
def test_against_every_plan_there_is(seed: int, chained: bool) -> None:
    """The best of all, where a draft step costs the same beside others; `chained`: beyond drafts that there are already."""
    rng = random.Random(seed)
    offers = [offer(rng) for _ in range(rng.randrange(1, 4))]
    prices = Line(rng.choice([0.01, 0.1, 0.3, 1.0]), rng.choice([0.0, 0.02, 0.2]))
    prices.of_drafting = lambda depth, n_seqs: prices.draft * depth  # type: ignore[method-assign]
    already = [rng.randrange(3) for _ in offers] if chained else [0] * len(offers)
    paid = 0.3 if chained else 0.0
    budget = len(offers) + sum(already) + rng.randrange(8)
    best = 0.0
    for counts in itertools.product(*(range(min(len(o.survival), o.limit) + 1) for o in offers)):
        rows = len(offers) + sum(already) + sum(counts)
        if rows <= budget and (round_size(rows) or not sum(counts)):
            best = max(best, worth(offers, counts, prices, already, paid))
    plan = best_plan(offers, prices, budget, already, paid)
    assert plan.utility == pytest.approx(best)
    assert len(offers) + sum(already) + sum(plan.drafts) <= budget
    assert all(count <= min(o.limit, len(o.survival)) for count, o in zip(plan.drafts, offers, strict=True))


def test_more_sequences_than_the_budget_has_rows() -> None:
    offers = [Offer((0.9, 0.8), 7)] * 40
    assert Planner(32).plan(offers, Line(0.0, 0.0)) == (0,) * 40


@pytest.mark.parametrize("n", [1, 4, 16])
def test_a_hopeless_source_is_tried_seldom(n: int) -> None:
    """Probes are seldom, the more so the more sequences, and cost no more than their share; without the bound they would."""
    planner, prices, n_steps = Planner(32), Line(0.6, 0.2), 3000
    offers = [Offer((0.05,), 7)] * n
    spent, probes = 0.0, 0
    for _ in range(n_steps):
        extra = sum(planner.plan(offers, prices))
        probes += extra
        if extra:
            full = prices.of_rows(n + extra) + prices.of_drafting(1, extra)
            spent += full / prices.of_rows(n) - (n + 0.05 * extra) / n
    assert 3 <= probes <= FIRST_SAVINGS / 0.05 + n_steps / (PROBE_INTERVAL * n) + 4
    assert spent <= FIRST_SAVINGS + PROBE_SHARE * n_steps
    assert FIRST_SAVINGS + PROBE_SHARE * n_steps < 0.02 * n_steps
    assert n_steps / PROBE_INTERVAL * ((0.8 - 0.05) / 1.0) > 0.02 * n_steps, "a probe every time would cost more"


def test_a_graph_that_a_probe_needed_is_owed() -> None:
    planner, offers, prices = Planner(8), [Offer((0.3,), 7)], Line(0.6, 0.2)
    probes = []
    for step in range(FIRST_STEPS + 200):
        drafts = planner.plan(offers, prices)[0]
        if drafts:
            probes.append(step)
            planner.took(100.0)
    assert len(probes) <= 2


def test_limits_are_kept_when_exploring() -> None:
    planner = Planner(8)
    for _ in range(100):
        assert planner.plan([Offer((0.99, 0.98), 2, clean=True)], Line(0.01, 0.0))[0] <= 2


def test_a_plan_that_is_nearly_as_good_is_kept() -> None:
    planner, prices = Planner(8), Line(0.2, 0.0)
    first = planner.plan([Offer((0.7, 0.5, 0.34), 3)], prices)
    assert planner.plan([Offer((0.7, 0.5, 0.3405), 3)], prices) == first
    assert planner.plan([Offer((0.95, 0.9, 0.85), 3)], prices) == (3,)


@pytest.mark.parametrize("slope", SLOPES)
@pytest.mark.parametrize("n", [1, 2, 4, 8, 16])
def test_joint_and_independent(n: int, slope: float) -> None:
    """Each for itself, by the reference system's rules, prices its rows as if it were alone; what is shared is the time of the step."""
    names = list(DISTRIBUTIONS)
    joint = independent = 0.0
    for seed in range(3):
        rng = np.random.default_rng(100 * n + seed)
        rates = [DISTRIBUTIONS[names[int(rng.integers(len(names)))]] for _ in range(n)]
        joint += run_many(rates, slope, 300, seed, joint=True)
        independent += run_many(rates, slope, 300, seed, joint=False)
    assert joint >= independent, f"{joint / independent:.3f}"
