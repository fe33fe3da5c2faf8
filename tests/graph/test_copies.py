"""Copies that stay as they are while they are held, in memory that is used again afterwards."""

from __future__ import annotations

import numpy as np

from pyluce.graph.copies import SMALLEST, Copies, Reused

SIZE = 4 * SMALLEST


def raw(value: int, size: int = SIZE) -> np.ndarray:
    return np.full(size, value, np.uint8)


def test_what_is_held_stays() -> None:
    copies = Copies(most=2)
    held = [copies.of(raw(i)).view(np.float32).reshape(4, -1) for i in range(5)]
    rows = list(held[3])
    for i, array in enumerate(held):
        assert (array.view(np.uint8) == i).all()
    del held, array
    for i in range(6, 12):
        copies.of(raw(i))
    assert (rows[2].view(np.uint8) == 3).all()


def test_a_row_alone_keeps_its_array() -> None:
    copies = Copies(most=1)
    row = copies.of(raw(1)).view(np.float32).reshape(4, -1)[2]
    copies.of(raw(2))
    assert (row.view(np.uint8) == 1).all()


def test_memory_is_used_again() -> None:
    copies = Copies()
    place = copies.of(raw(1)).ctypes.data
    assert all(copies.of(raw(i)).ctypes.data == place for i in range(2, 6))
    held = copies.of(raw(7))
    assert copies.of(raw(8)).ctypes.data != held.ctypes.data


def test_control_memory_given_too_early_is_seen() -> None:
    copies = Copies()
    copies._reused._alone += 1  # a holder is overlooked
    held = copies.of(raw(1))
    copies.of(raw(2))
    assert (held == 2).all()


def test_no_more_than_is_allowed() -> None:
    reused = Reused(most=2, most_bytes=3 * SIZE)
    held = [reused.take(SIZE), reused.take(SIZE)]
    assert all(array is not None and array.nbytes == SIZE for array in held)
    assert reused.take(1) is None, "two are held"
    del held[0]
    assert reused.take(2 * SIZE) is not None and reused.n_bytes == 3 * SIZE
    assert reused.take(2 * SIZE + 1) is None and reused.n_bytes == SIZE, "too large beside the one that is held"
    held.clear()
    reused.clear()
    assert reused.n_bytes == 0


def test_the_smallest_that_is_large_enough() -> None:
    made: list[int] = []

    def make(n_bytes: int) -> np.ndarray:
        made.append(n_bytes)
        return np.empty(n_bytes, np.uint8)

    reused = Reused(make)
    large = reused.take(5 * SMALLEST)
    reused.take(3)
    del large
    for _ in range(3):
        both = reused.take(SMALLEST), reused.take(6 * SMALLEST)
        assert all(array is not None for array in both)
        del both
    assert made == [8 * SMALLEST, SMALLEST]
