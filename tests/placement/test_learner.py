"""The learner: deterministic, within its limit, towards what is asked, and quiet when nothing is worth a swap."""

from __future__ import annotations

import numpy as np
import pytest

from pyluce.placement.counts import RouteShape
from pyluce.placement.hot import choose_hot
from pyluce.placement.learner import MIB, HotLearner, LearnerOptions, Swap

SHAPE = RouteShape(2, 8, 2)
SIZES = (MIB, 2 * MIB)
BUDGET = 6 * MIB  # even: two slots in each layer


def picks(*ids: int, rows: int = 1) -> np.ndarray:
    """Every row of both layers picks these two."""
    return np.broadcast_to(np.array(ids, np.int32), (2, rows, 2)).copy()


def learn(learner: HotLearner, ids: tuple[int, int], steps: int, from_s: float) -> list[Swap]:
    """A step a second; every proposal is carried out."""
    made = []
    for step in range(steps):
        learner.add(picks(*ids))
        for swap in learner.propose(from_s + step):
            learner.done(swap)
            made.append(swap)
    return made


def test_from_nothing_to_what_is_asked() -> None:
    learner = HotLearner(SHAPE, SIZES, BUDGET)
    assert learner.hot.layers == ((0, 1), (0, 1))
    learn(learner, (5, 6), 20, 0.0)
    assert [sorted(ids) for ids in learner.hot.layers] == [[5, 6], [5, 6]]
    assert learner.coverage() == 1.0
    assert learner.n_swaps == 4 and learner.swapped_bytes == 6 * MIB


def test_the_same_for_the_same() -> None:
    def run() -> list[Swap]:
        learner = HotLearner(SHAPE, SIZES, BUDGET, LearnerOptions(swap_mib_s=1.5, half_life_rows=64))
        generator = np.random.default_rng(7)
        made = []
        for step in range(200):
            hot = 2 + step // 50
            ids = generator.choice(8, size=(2, 3, 2), p=[0.93 if e == hot else 0.01 for e in range(8)])
            learner.add(ids.astype(np.int32))
            for swap in learner.propose(step * 0.25):
                learner.done(swap)
                made.append(swap)
        return made

    first = run()
    assert first == run() and len(first) > 3


def test_it_follows_a_change() -> None:
    learner = HotLearner(SHAPE, SIZES, BUDGET, LearnerOptions(half_life_rows=16))
    learn(learner, (5, 6), 40, 0.0)
    learn(learner, (2, 3), 80, 100.0)
    assert [sorted(ids) for ids in learner.hot.layers] == [[2, 3], [2, 3]]


def test_never_more_than_the_limit() -> None:
    """1 MiB a second: over any stretch no more than that and what one burst, or one expert, may be."""
    learner = HotLearner(SHAPE, SIZES, BUDGET, LearnerOptions(swap_mib_s=1.0, half_life_rows=4))
    moved: list[tuple[float, int]] = []
    for step in range(400):
        learner.add(picks(step // 10 % 8, (step // 10 + 3) % 8, rows=4))
        now = step * 0.1
        for swap in learner.propose(now):
            learner.done(swap)
            moved.append((now, swap.n_bytes))
    assert sum(n for _, n in moved) > 20 * MIB, "the limit is what holds it back"
    for begin, _ in moved:
        for end, _ in moved:
            if end >= begin:
                inside = sum(n for at, n in moved if begin <= at <= end)
                assert inside <= (end - begin) * MIB + 2 * MIB + 1


def test_nothing_moves_at_a_limit_of_nothing_or_for_little() -> None:
    still = HotLearner(SHAPE, SIZES, BUDGET, LearnerOptions(swap_mib_s=0.0))
    for step in range(50):
        still.add(picks(5, 6))
        assert still.propose(float(step)) == []
    evidence = HotLearner(SHAPE, SIZES, BUDGET)
    evidence.add(picks(5, 6, rows=3))
    assert evidence.propose(100.0) == [], "three picks are no evidence"
    close = HotLearner(SHAPE, SIZES, BUDGET)
    for step in range(100):
        close.add(picks(0, 1, rows=10))
        close.add(picks(5, 6, rows=10))
        assert close.propose(float(step)) == [], "a swap of equals is not worth its bytes"


def test_a_table_chooses_the_first_set() -> None:
    counts = np.array([[0, 0, 9, 8, 0, 0, 0, 0], [0, 7, 0, 0, 0, 0, 0, 1]], np.uint64)
    learner = HotLearner(SHAPE, SIZES, BUDGET, counts=counts)
    assert learner.hot == choose_hot(counts, SIZES, BUDGET)
    before = learner.coverage()
    assert learner.propose(0.0) == [] and 0.9 < before <= 1.0


def test_zero_slots_and_all_slots_propose_nothing() -> None:
    for budget in (0, 100 * MIB):
        learner = HotLearner(SHAPE, SIZES, budget)
        assert learn(learner, (5, 6), 30, 0.0) == []


def test_bad_options_and_a_clock_that_goes_back() -> None:
    with pytest.raises(ValueError, match="swap_mib_s"):
        LearnerOptions(swap_mib_s=-1.0)
    with pytest.raises(ValueError, match="margin"):
        LearnerOptions(margin=0.5)
    learner = HotLearner(SHAPE, SIZES, BUDGET)
    learner.propose(2.0)
    with pytest.raises(ValueError, match="at least 2.0, found 1.0"):
        learner.propose(1.0)


def test_weights_stay_finite() -> None:
    learner = HotLearner(SHAPE, SIZES, BUDGET, LearnerOptions(half_life_rows=8))
    for _ in range(300):
        learner.add(picks(5, 6, rows=64))
    learn(learner, (5, 6), 5, 0.0)
    assert learner.coverage() == 1.0 and [sorted(ids) for ids in learner.hot.layers] == [[5, 6], [5, 6]]
