"""Chunk cuts depend on positions and the request's own cuts only."""

from __future__ import annotations

import pytest

from pyluce.graph.chunks import chunk_bounds, pad_rows
from pyluce.graph.options import RunnerOptions


def test_cuts_lie_on_the_grid_of_absolute_positions() -> None:
    assert chunk_bounds(0, 70, 32) == [(0, 32), (32, 64), (64, 70)]
    assert chunk_bounds(40, 70, 32) == [(40, 64), (64, 70)]


def test_a_warm_start_cuts_where_the_cold_run_cut() -> None:
    cold = chunk_bounds(0, 1000, 128, cuts=[77, 300])
    assert [c for c in cold if c[0] >= 300] == chunk_bounds(300, 1000, 128)


def test_a_cut_outside_the_range_is_refused() -> None:
    with pytest.raises(ValueError, match="between 1 and 9, found 10"):
        chunk_bounds(0, 10, 16, cuts=[10])


def test_padding_is_whole_units() -> None:
    assert [pad_rows(n) for n in (1, 15, 16, 17)] == [16, 16, 16, 32]


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("n_slots", 0, "n_slots: expected 1 to 64, found 0"),
        ("n_slots", 65, "n_slots: expected 1 to 64, found 65"),
        ("n_ctx", 0, "n_ctx: expected 1 to"),
        ("kv_type", "q8_0", "kv_type: expected one of f16, f32, found 'q8_0'"),
        ("chunk_tokens", 100, "multiple of 16, found 100"),
        ("max_rollback", 65, "max_rollback"),
        ("debug_fault", "other", "debug_fault"),
    ],
)
def test_options_name_what_was_expected_and_found(field: str, value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RunnerOptions(**{field: value})  # type: ignore[arg-type]
