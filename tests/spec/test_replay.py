"""The reference system's controller, replayed: 800 decisions of each rule against the rules written down once more, and its bounds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from pyluce.spec.width import AdaptiveSpecWidth, Rule
from tests.support.spec_sim import DISTRIBUTIONS, SLOPES, Total, best_fixed, run

COSTS = (75.0, 100.0, 122.0, 123.0)
N_DECISIONS = 400
PROFILES = {"clean now and then": (96, 4), "mostly rejected": (32, 2)}
"""A draft is right when a number below 128 is below the first; the second: every so many steps build a graph and have no time."""


def numbers(seed: int = 12345) -> Iterator[int]:
    """A linear congruential generator."""
    state = seed
    while True:
        state = (1664525 * state + 1013904223) % 2**32
        yield state >> 16


@dataclass
class Slow:
    """The rules from the description: every figure from the whole history, nothing kept up to date."""

    rule: Rule
    history: list[tuple[int, int, float | None]] = field(default_factory=list)
    asked: int = 0

    def width(self) -> int:
        if self.rule == "plain":
            average, clean = 2.0, False
            for accepted, offered, _ in self.history:
                clean = 0 < offered == accepted
                if offered:
                    average = 0.8 * (average if accepted else average / 4) + 0.2 * accepted
            return min(4, max(1, 1 + round(average) + clean))
        utility = {1: 1 / self.price(1)}
        tokens = 1.0
        for depth, alive in enumerate(self.survival(), 1):
            tokens += alive
            utility[1 + depth] = tokens / self.price(1 + depth)
        best = min(w for w in utility if utility[w] == max(utility.values()))
        if self.rule == "prefix" or best == 4:
            return best
        self.asked += 1
        last = self.history[-1] if self.history else (0, 0, None)
        near = self.asked % 17 != 0 and last[1] > 0 and last[0] == last[1]
        explore = near and utility.get(best + 1, 0.0) >= 0.97 * utility[best]
        return best + 1 if self.asked % 17 == 0 or explore else best

    def survival(self) -> list[float]:
        rates = self.reached() if self.rule == "reached" else None
        prefix = self.prefix()
        out, alive = [], 1.0
        for depth in range(3):
            alive = alive * rates[depth] if rates else prefix[depth]
            if alive < 0.05 and out:
                break
            out.append(alive)
        return out

    def reached(self) -> list[float]:
        rates = []
        for depth in range(3):
            trials, hits = 16.0, 14.4
            for accepted, offered, _ in self.history:
                if depth < min(accepted + 1, offered):
                    if trials >= 128:
                        trials, hits = trials / 2, hits / 2
                    trials, hits = trials + 1, hits + (depth < accepted)
            rates.append(hits / trials)
        return rates

    def prefix(self) -> list[float]:
        alive = [0.75, 0.75**2, 0.75**3]
        for accepted, offered, _ in self.history:
            for depth in range(offered):
                alive[depth] += 0.2 * ((1.0 if depth < accepted else 0.0) - alive[depth])
            if 0 < offered == accepted and offered < 3:
                last = alive[offered - 1]
                alive[offered] = min(last, last * (last / alive[offered - 2] if offered > 1 else last))
        return alive

    def price(self, width: int) -> float:
        shape = {w: 45.0 + 20.0 * (w - 1) for w in range(1, 5)}
        timed = [(1 + offered, cost) for _, offered, cost in self.history if cost is not None]
        mean: dict[int, float] = {}
        live: dict[int, int] = {}
        stale: dict[int, bool] = {}
        for w in range(1, 5):
            seen, last, samples, average = 0, 0, 0, 0.0
            for at, (size, cost) in enumerate(timed, 1):
                if size != w:
                    continue
                if samples and at - last > 64:
                    samples = 0
                last, seen = at, seen + 1
                if seen > 4:
                    cost = min(cost, 1.25 * average) if samples else cost
                    samples = min(16, samples + 1)
                    average += (cost - average) / samples
            mean[w], live[w], stale[w] = average, samples, len(timed) - last > 64
        trusted = [w for w in range(1, 5) if live[w] >= 4]

        def scaled(among: list[int]) -> float:
            if not among:
                return shape[width]
            nearest = sorted(among, key=lambda w: (abs(w - width), w))[0]
            return shape[width] * mean[nearest] / shape[nearest]

        if width not in trusted:
            return scaled(trusted)
        others = [w for w in trusted if w != width]
        return min(mean[width], scaled(others)) if stale[width] and others else mean[width]


@pytest.mark.parametrize("rule", ["plain", "prefix", "reached"])
def test_eight_hundred_decisions(rule: Rule) -> None:
    for chance, skipped in PROFILES.values():
        controller, slow, draw = AdaptiveSpecWidth(4, rule), Slow(rule), numbers()
        widths = []
        for step in range(N_DECISIONS):
            width = controller.next_width()
            assert width == slow.width(), f"decision {step}"
            widths.append(width)
            accepted = 0
            while accepted < width - 1 and next(draw) % 128 < chance:
                accepted += 1
            noise = 1.0 + (next(draw) % 41 - 20) / 200
            cost = None if step % skipped == 1 else COSTS[width - 1] * noise
            controller.observe(accepted, width - 1, cost)
            slow.history.append((accepted, width - 1, cost))
        assert len(set(widths)) > 1, "a controller that never changes its mind shows nothing"


@pytest.mark.parametrize("rule", ["plain", "prefix", "reached"])
def test_proposed_widths_are_kept(rule: Rule) -> None:
    controller = AdaptiveSpecWidth(rule=rule)
    for step in range(200):
        width = controller.next_width(proposed=1 + step % 3)
        assert 1 <= width <= 1 + step % 3
        controller.observe(width - 1, width - 1, 1.0)


def test_a_request_hands_on_at_most_so_many_trials() -> None:
    controller = AdaptiveSpecWidth()
    for _ in range(100):
        controller.observe(0, 7, None)
    before = controller.survival(1)
    controller.carry_acceptance()
    assert controller.survival(1) == pytest.approx(before)
    for _ in range(32):
        controller.observe(1, 1, None)
    assert controller.survival(1)[0] == pytest.approx((32 * before[0] + 32) / 64)


def test_what_it_reaches() -> None:
    """Of the best fixed width's speed, over all rates and slopes; the engine's planner reaches more (`test_width`)."""
    shares = []
    for rates in DISTRIBUTIONS.values():
        for slope in SLOPES:
            total = Total()
            for seed in range(2):
                controller = AdaptiveSpecWidth()
                found = run(controller.next_width, controller.observe, rates, slope, 800, seed)
                total.tokens += found.tokens
                total.seconds += found.seconds
            shares.append(total.rate / best_fixed(rates, slope))
    assert min(shares) >= 0.90, min(shares)
    assert sum(shares) / len(shares) >= 0.96
