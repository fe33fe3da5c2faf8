"""The greedy rule against a literal reading of its description and a case worked out by hand; tables of a hot set."""

from __future__ import annotations

import ast
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyluce.placement.counts import RouteCounter, RouteShape, coverage
from pyluce.placement.hot import HotSet, choose_hot, even_hot


def counts_of(*rows: list[int]) -> np.ndarray:
    return np.array(rows, np.uint64)


def literal_rule(rows: list[list[int]], sizes: list[int], budget: int) -> tuple[tuple[int, ...], ...]:
    """Step by step over all layers, as the rule is written."""
    ranked = [sorted(range(len(row)), key=lambda e, row=row: (-row[e], e)) for row in rows]
    taken: list[list[int]] = [[] for _ in rows]
    left = budget
    while True:
        best = None
        for layer, row in enumerate(rows):
            if len(taken[layer]) == len(row) or sizes[layer] > left:
                continue
            count = row[ranked[layer][len(taken[layer])]]
            key = (Fraction(count, sizes[layer]), count, -layer)
            if best is None or key > best[0]:
                best = (key, layer)
        if best is None:
            return tuple(map(tuple, taken))
        layer = best[1]
        taken[layer].append(ranked[layer][len(taken[layer])])
        left -= sizes[layer]


def test_by_hand() -> None:
    """Layer 0: 9/3 = 3, then 6/3 = 2; layer 1: 4/2 = 2 (fewer picks than 6), then 2/2; layer 2: 5/5, does not fit at the end."""
    rows = counts_of([6, 9, 0], [2, 4, 2], [5, 1, 0])
    assert choose_hot(rows, [3, 2, 5], 3).layers == ((1,), (), ())
    assert choose_hot(rows, [3, 2, 5], 6).layers == ((1, 0), (), ())
    assert choose_hot(rows, [3, 2, 5], 8).layers == ((1, 0), (1,), ())
    # 14 bytes: both of layer 0, 4 and the lower of two 2s of layer 1 (2/2 ties with 5/5, which has more picks but needs 5 of 6 bytes first)
    assert choose_hot(rows, [3, 2, 5], 14).layers == ((1, 0), (1,), (0,))
    assert choose_hot(rows, [3, 2, 5], 12).layers == ((1, 0), (1, 0, 2), ())


def test_ties_go_to_the_lower_layer_and_id_and_zeros_fill_the_rest() -> None:
    rows = counts_of([1, 1], [1, 1])
    assert choose_hot(rows, [4, 4], 4).layers == ((0,), ())
    assert choose_hot(rows, [4, 4], 12).layers == ((0, 1), (0,))
    assert choose_hot(counts_of([0, 0], [0, 3]), [4, 4], 8).layers == ((0,), (1,))
    assert choose_hot(rows, [4, 4], 0) == HotSet.empty(2)


@given(
    st.integers(1, 4).flatmap(
        lambda layers: st.integers(1, 6).flatmap(
            lambda experts: st.tuples(
                st.lists(
                    st.lists(st.integers(0, 9), min_size=experts, max_size=experts), min_size=layers, max_size=layers
                ),
                st.lists(st.integers(1, 7), min_size=layers, max_size=layers),
                st.integers(0, 120),
            )
        )
    )
)
def test_the_rule_is_the_one_that_is_written(case: tuple[list[list[int]], list[int], int]) -> None:
    rows, sizes, budget = case
    found = choose_hot(counts_of(*rows), sizes, budget)
    assert found.layers == literal_rule(rows, sizes, budget)
    assert found.n_bytes(sizes) <= budget
    found.check(RouteShape(len(rows), len(rows[0]), 1))


def test_the_published_size_of_the_default_budget() -> None:
    """71.7 GiB of experts, all of one size, and 8 GiB: about 2,742 of 24,576, the design documents say."""
    size = round(71.7 * 2**30) // (48 * 512)
    found = choose_hot(np.ones((48, 512), np.uint64), [size] * 48, 8192 << 20)
    assert found.n_hot == 2742


def test_large_counts_are_compared_exactly() -> None:
    """As float64 these two quotients are equal, and the first layer would win the tie."""
    big = 2**60
    assert choose_hot(counts_of([big], [big + 1]), [1, 1], 1).layers == ((), (0,))


def test_tables() -> None:
    hot = HotSet(((3, 1), ()))
    assert hot.target_table(0, 4).tolist() == [-1, 1, -1, 0]
    assert hot.expert_table(0, 4).tolist() == [0, -1, 2, -1]
    assert hot.target_table(1, 4).tolist() == [-1] * 4 and hot.expert_table(1, 4).tolist() == [0, 1, 2, 3]
    for layer in range(2):
        here, there = hot.target_table(layer, 4), hot.expert_table(layer, 4)
        assert ((here >= 0) ^ (there >= 0)).all(), "each expert is computed in exactly one place"
    assert hot.replaced(0, 1, 2).layers == ((3, 2), ())
    with pytest.raises(ValueError, match="a slot below 2"):
        hot.replaced(0, 2, 0)
    with pytest.raises(ValueError, match="not hot, found 1"):
        hot.replaced(0, 0, 1)


def test_bad_hot_sets_are_refused() -> None:
    shape = RouteShape(2, 4, 2)
    HotSet(((3, 1), ())).check(shape)
    for layers, message in (
        (((1,),), "expected 2 layers"),
        (((4,), ()), "layer 0: expected ids from 0 to 3, found 4"),
        (((), (1, 1)), "layer 1: expected different ids"),
    ):
        with pytest.raises(ValueError, match=message):
            HotSet(layers).check(shape)
    with pytest.raises(ValueError, match="expected 1 layers"):
        choose_hot(counts_of([1]), [1, 1], 1)


def test_even_slots() -> None:
    assert even_hot(RouteShape(3, 4, 1), [2, 2, 3], 15).layers == ((0, 1), (0, 1), (0, 1))
    assert even_hot(RouteShape(3, 2, 1), [1, 1, 1], 100).layers == ((0, 1),) * 3
    assert even_hot(RouteShape(2, 4, 1), [3, 2], 8).layers == ((0, 1), (0,))


def test_counting_and_coverage() -> None:
    counter = RouteCounter(RouteShape(2, 4, 2))
    counter.add(np.array([[[0, 1], [0, 2]], [[3, 3], [3, 1]]], np.int32))
    counter.add(np.array([[[0, 1]], [[3, 0]]], np.int32))
    assert counter.counts.tolist() == [[3, 2, 1, 0], [1, 1, 0, 4]]
    assert counter.n_rows == 3
    assert coverage(counter.counts, 1).tolist() == [3 / 6, 4 / 6]
    assert HotSet(((0,), (3, 0))).coverage(counter.counts) == 8 / 12
    for picks in (np.zeros((2, 1, 3), np.int32), np.full((2, 1, 2), 4, np.int32), np.full((2, 1, 2), -1, np.int32)):
        with pytest.raises(ValueError, match="expected"):
            counter.add(picks)


def test_the_room_uses_no_native_code() -> None:
    folder = Path(__file__).resolve().parents[2] / "pyluce" / "placement"
    for file in folder.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                assert not name.startswith("pyluce") or name.startswith("pyluce.placement"), (file.name, name)
                assert name != "ctypes", file.name
