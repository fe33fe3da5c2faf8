"""The documented vectors of the reference system's chunk planner (reference-system.md 5.3), at 10 bytes a row."""

from __future__ import annotations

import pytest

from pyluce.memory.rows import Rows, budget_of, fit_rows, fit_rows_and_allowance, row_cap

UNLIMITED = 1 << 60


def ten(rows: int) -> int:
    return 10 * rows


@pytest.mark.parametrize(
    ("limit", "available", "fixed", "rows"),
    [
        (32768, 100_000, 0, 8960),
        (32768, 100_000, 20_000, 6912),
        (32768, 100_000, 60_000, 2816),
        (32768, 100_000, 90_000, 0),
        (4096, 50_000, 4040, 4096),
        (4096, 50_000, 4041, 3840),
        (32768, 2**40, 0, 32768),
    ],
)
def test_rows(limit: int, available: int, fixed: int, rows: int) -> None:
    assert fit_rows(limit, available, fixed, ten) == rows


@pytest.mark.parametrize(
    ("available", "requested", "expected"),
    [
        (100_000, UNLIMITED, Rows(4096, 29_040)),
        (100_000, 1000, Rows(6656, 1000)),
        (50_000, UNLIMITED, Rows(2304, 1960)),
    ],
)
def test_rows_and_allowance(available: int, requested: int, expected: Rows) -> None:
    assert fit_rows_and_allowance(32768, available, 20_000, ten, requested) == expected


def test_the_allowance_leaves_the_floor_alone_for_every_memory() -> None:
    for available in range(0, 120_000, 997):
        without = fit_rows(4096, available, 20_000, ten)
        found = fit_rows_and_allowance(32768, available, 20_000, ten, UNLIMITED)
        assert found.rows == without
        assert 20_000 + found.allowance + ten(found.rows) <= budget_of(available) or found == Rows(0, 0)
        split = fit_rows_and_allowance(16384, available, 20_000, ten, UNLIMITED, floor_rows=8192)
        assert split.rows == fit_rows(8192, available, 20_000, ten)


def test_below_256_rows_it_halves() -> None:
    found = [fit_rows(32768, available, 0, ten) for available in (2844, 2843, 1422, 12, 11)]
    assert found == [256, 128, 128, 1, 1]
    assert fit_rows(32768, 10, 0, ten) == 0
    assert fit_rows(32768, 170, 0, ten, smallest=16) == 0
    assert fit_rows(32768, 180, 0, ten, smallest=16) == 16
    assert fit_rows(100, 2**40, 0, ten) == 64, "no more rows than the context has"


def test_caps() -> None:
    assert row_cap(1) == 32768
    assert row_cap(2) == row_cap(4) == 4096
    assert row_cap(1, split=True) == 16384
    assert row_cap(1, split=True, hot_experts=True) == 8192
    assert row_cap(4, split=True) == 4096
