"""The engine's planner with one sequence against the best fixed width, which it does not know: rates, slopes, noise, short requests."""

from __future__ import annotations

import pytest

from pyluce.spec.acceptance import CARRIED_TRIALS, Acceptance, AcceptancePool
from pyluce.spec.cost import RANGES, CostMemory, CostTable, DraftCosts, Seed
from tests.support.spec_sim import DISTRIBUTIONS, SLOPES, OneSequence, Total, best_fixed, run


@pytest.mark.parametrize("slope", SLOPES)
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_long_requests_reach_the_best_fixed_width(name: str, slope: float) -> None:
    """At least 0.95 of its speed, what is lost to learning included."""
    total = Total()
    for seed in range(2):
        controller = OneSequence()
        found = run(controller.next_width, controller.observe, DISTRIBUTIONS[name], slope, 800, seed)
        total.tokens += found.tokens
        total.seconds += found.seconds
    assert total.rate >= 0.95 * best_fixed(DISTRIBUTIONS[name], slope)


@pytest.mark.parametrize("slope", SLOPES)
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_short_requests_profit_from_those_before(name: str, slope: float) -> None:
    """Twenty steps each, costs and the pool of rates kept: 0.98 of the best fixed width, after twenty requests."""
    total = Total()
    for seed in range(3):
        controller = OneSequence()
        for number in range(45):
            rng = 1000 * (seed + 1) + number
            found = run(controller.next_width, controller.observe, DISTRIBUTIONS[name], slope, 20, rng)
            controller.next_request()
            if number >= 20:
                total.tokens += found.tokens
                total.seconds += found.seconds
    assert total.rate >= 0.98 * best_fixed(DISTRIBUTIONS[name], slope)


def test_control_a_controller_that_learns_nothing_is_seen() -> None:
    """The bounds are no gift: a fixed width reaches them for none but its own cases."""
    for width in (1, 4, 8):
        rates = [
            run(lambda w=width: w, lambda *_: None, DISTRIBUTIONS[name], slope, 50, 1).rate
            / best_fixed(DISTRIBUTIONS[name], slope)
            for name in DISTRIBUTIONS
            for slope in SLOPES
        ]
        assert min(rates) < 0.75


def test_acceptance_counts_a_depth_only_when_it_was_reached() -> None:
    pool = AcceptancePool(4)
    acceptance = Acceptance(pool)
    acceptance.observe(accepted=1, offered=4)
    assert acceptance.counts() == [(1, 1), (1, 0), (0, 0), (0, 0)]
    for _ in range(3000):
        acceptance.observe(accepted=0, offered=4)
    assert acceptance.rate(1) < 0.01
    assert acceptance.survival(4) == [acceptance.rate(1)]
    other = Acceptance(pool)
    assert other.rate(1) == pool.rate(1) == pytest.approx(acceptance.rate(1), abs=0.02)
    for _ in range(int(CARRIED_TRIALS)):
        other.observe(accepted=1, offered=1)
    assert other.rate(1) > 0.5, "as many trials of its own count as much as the pool"


def test_costs() -> None:
    table = CostTable(Seed().of_rows)
    assert table.price(4) == Seed().of_rows(4)
    for seconds in (9.0, 2.0, 2.0, 50.0, 2.0, 2.0):  # the first is not counted, the outlier is outvoted and clipped
        table.observe(1, seconds)
    assert table.price(1) == pytest.approx(2.1)
    assert table.price(4) == pytest.approx(2.1 * Seed().of_rows(4))
    table.observe(1, 1000.0)
    assert 2.1 < table.price(1) < 2.25
    assert table.means() == {1: table.price(1)}


def test_costs_lie_on_a_line_through_what_was_measured() -> None:
    table = CostTable(Seed().of_rows)
    for _ in range(40):
        for rows in (1, 3):
            table.observe(rows, 1.0 + 0.05 * (rows - 1))
    assert table.price(2) == pytest.approx(1.05, rel=0.01)
    assert table.price(6) == pytest.approx(1.25, rel=0.05)
    for _ in range(200):
        table.observe(6, 2.0)  # a step up, as where a kernel takes another tile
    assert table.price(6) == pytest.approx(2.0, rel=0.05)


def test_costs_that_change_are_believed_soon() -> None:
    table = CostTable(Seed().of_rows)
    for _ in range(100):
        table.observe(1, 1.0)
    for _ in range(30):
        table.observe(1, 2.0)
    assert table.price(1) > 1.8


def test_draft_steps_of_many_sequences() -> None:
    costs = DraftCosts(Seed(), CostTable(Seed().of_rows))
    for _ in range(120):
        costs.observe(2, 1, 0.4)
        costs.observe(2, 4, 0.4 * 2.5)
    assert costs.price(2, 1) == pytest.approx(0.4, rel=0.1)
    assert costs.price(2, 2) == pytest.approx(0.6, rel=0.1)
    assert costs.price(2, 8) == pytest.approx(1.8, rel=0.1)


def test_costs_by_context_begin_with_the_nearest() -> None:
    memory = CostMemory()
    short = memory.at(10).verify
    for _ in range(12):
        short.observe(1, 3.0)
    assert memory.at(RANGES[0] - 1).verify is short
    long = memory.at(RANGES[1]).verify
    assert long is not short
    assert long.price(1) == pytest.approx(3.0)
    for _ in range(60):
        long.observe(1, 6.0)
    assert 5.0 < long.price(1) <= 6.0
    assert short.price(1) == pytest.approx(3.0)
