"""The width controller against the best fixed width, which it does not know: rates, slopes, noise, short requests."""

from __future__ import annotations

import pytest

from pyluce.spec.acceptance import Acceptance
from pyluce.spec.cost import RANGES, CostMemory, CostTable, Seed
from pyluce.spec.width import AdaptiveSpecWidth
from tests.support.spec_sim import DISTRIBUTIONS, SLOPES, Total, best_fixed, run


@pytest.mark.parametrize("slope", SLOPES)
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_long_requests_reach_the_best_fixed_width(name: str, slope: float) -> None:
    """At least 0.95 of its speed, what is lost to learning included."""
    total = Total()
    for seed in range(2):
        controller = AdaptiveSpecWidth()
        found = run(controller.next_width, controller.observe, DISTRIBUTIONS[name], slope, 800, seed)
        total.tokens += found.tokens
        total.seconds += found.seconds
    assert total.rate >= 0.95 * best_fixed(DISTRIBUTIONS[name], slope)


def test_short_requests_profit_from_those_before() -> None:
    """Twenty steps each; costs and acceptance are carried over: 0.97 of the best fixed width in every case, 0.98 over all."""
    shares = {}
    for name in DISTRIBUTIONS:
        for slope in SLOPES:
            controller, total = AdaptiveSpecWidth(), Total()
            for number in range(45):
                found = run(controller.next_width, controller.observe, DISTRIBUTIONS[name], slope, 20, 1000 + number)
                controller.next_request()
                if number >= 20:
                    total.tokens += found.tokens
                    total.seconds += found.seconds
            shares[name, slope] = total.rate / best_fixed(DISTRIBUTIONS[name], slope)
    assert min(shares.values()) >= 0.97, shares
    assert sum(shares.values()) / len(shares) >= 0.98


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


def test_proposed_widths_are_kept() -> None:
    controller = AdaptiveSpecWidth()
    for step in range(200):
        width = controller.next_width(proposed=1 + step % 3)
        assert 1 <= width <= 1 + step % 3
        controller.observe(width - 1, width - 1, 1.0)


def test_acceptance_counts_a_depth_only_when_it_was_reached() -> None:
    acceptance = Acceptance(4)
    before = acceptance.counts()
    acceptance.observe(accepted=1, offered=4)
    after = [(trials - t, hits - h) for (trials, hits), (t, h) in zip(acceptance.counts(), before, strict=True)]
    assert after == [(1, 1), (1, 0), (0, 0), (0, 0)]
    for _ in range(1000):
        acceptance.observe(accepted=0, offered=4)
    assert acceptance.rate(1) < 0.01
    assert acceptance.survival(4) == [acceptance.rate(1)]
    carried = acceptance.carry()
    assert carried.counts()[0][0] == 32
    assert carried.rate(1) == pytest.approx(acceptance.rate(1))


def test_costs() -> None:
    table = CostTable(Seed().of_rows)
    assert table.price(4) == Seed().of_rows(4)
    for seconds in (9.0, 9.0, 9.0, 9.0, 2.0, 2.0, 50.0, 2.0):  # the first four are not counted, the outlier is outvoted
        table.observe(1, seconds)
    assert table.price(1) == 2.0
    assert table.price(4) == pytest.approx(2.0 * Seed().of_rows(4) / Seed().of_rows(1))
    table.observe(1, 1000.0)
    assert 2.0 < table.price(1) < 2.11
    assert table.means() == {1: table.price(1)}


def test_costs_by_context_begin_with_the_nearest() -> None:
    memory = CostMemory()
    short = memory.at(10).verify
    for _ in range(12):
        short.observe(1, 3.0)
    assert memory.at(RANGES[0] - 1).verify is short
    long = memory.at(RANGES[1]).verify
    assert long is not short
    assert long.price(1) == 3.0
    for _ in range(40):
        long.observe(1, 6.0)
    assert 5.0 < long.price(1) <= 6.0
    assert short.price(1) == 3.0
