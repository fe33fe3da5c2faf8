"""How many rows a prompt's chunk may have, and what is left for kept states: the reference system's rules, as pure functions.

Its documented test vectors are in tests/memory/test_rows.py. All sizes are bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

ROW_STEP: Final = 256
FLOOR_ROWS: Final = 4096
FLOOR_ROWS_SPLIT: Final = 8192
CAP_ONE_SLOT: Final = 32768
CAP_SPLIT: Final = 16384
CAP_SPLIT_HOT: Final = 8192
CAP_SLOTS: Final = 4096

Measure = Callable[[int], int]
"""Bytes that a chunk graph of so many rows needs; more rows never need less."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of a chunk (0: not even the smallest fits), and bytes for kept states."""

    rows: int
    allowance: int


def budget_of(available: int) -> int:
    """What may be used of the memory that is available: a tenth stays free."""
    return available - available // 10


def row_cap(n_slots: int, *, split: bool = False, hot_experts: bool = False) -> int:
    """The most rows, whatever the memory: one chunk must not keep the other slots waiting, nor a link between devices."""
    caps = [CAP_ONE_SLOT]
    if n_slots > 1:
        caps.append(CAP_SLOTS)
    if split:
        caps.append(CAP_SPLIT_HOT if hot_experts else CAP_SPLIT)
    return min(caps)


def fit_rows(limit: int, available: int, fixed: int, measure: Measure, smallest: int = 1) -> int:
    """The largest multiple of 256 up to `limit` whose graph fits beside `fixed`; else 256, 128 ... `smallest`; else 0."""
    budget = budget_of(available)

    def fits(rows: int) -> bool:
        return fixed + measure(rows) <= budget

    low, high = 0, limit // ROW_STEP
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle * ROW_STEP):
            low = middle
        else:
            high = middle - 1
    if low:
        return low * ROW_STEP
    rows = ROW_STEP
    while rows >= smallest:
        if rows <= limit and fits(rows):
            return rows
        rows //= 2
    return 0


def fit_rows_and_allowance(
    limit: int,
    available: int,
    fixed: int,
    measure: Measure,
    requested: int,
    floor_rows: int = FLOOR_ROWS,
    smallest: int = 1,
) -> Rows:
    """Rows and the bytes for kept states, of `requested` ones.

    A floor of rows comes before the states, the states before more rows than that.
    """
    floor = fit_rows(min(limit, floor_rows), available, fixed, measure, smallest)
    if floor == 0:
        return Rows(0, 0)
    allowance = max(0, min(requested, budget_of(available) - fixed - measure(floor)))
    return Rows(fit_rows(limit, available, fixed + allowance, measure, smallest), allowance)
