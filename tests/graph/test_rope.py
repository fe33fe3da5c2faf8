"""Angles of a few positions are those of the stretch that they lie in."""

from __future__ import annotations

import numpy as np
import pytest

from pyluce.graph.rope import RopeTable

EDGE = RopeTable.BLOCK


@pytest.mark.parametrize(
    "positions",
    [
        [7],
        [9, 8, 7],
        [0, 5, 5, 3, EDGE - 1],
        [EDGE, EDGE + 70, 2 * EDGE - 1, EDGE + 1],
        [EDGE - 1, EDGE, 3, EDGE + 1],
        [3, 2, 1, EDGE],
    ],
)
def test_angles_of_a_few_positions(positions: list[int]) -> None:
    table = RopeTable(8, 1e6)
    whole = np.empty((2 * EDGE, 8), np.float32)
    table.fill(whole, 0)
    out = np.full((len(positions) + 2, 8), np.nan, np.float32)
    table.fill_at(out, positions)
    assert out[: len(positions)].tobytes() == whole[positions].tobytes()
    assert np.isnan(out[len(positions) :]).all(), "rows beyond them are left alone"
