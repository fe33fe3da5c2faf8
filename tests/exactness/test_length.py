"""Span buckets, context size, slots and turns, bit for bit; then the faults that must show."""

from __future__ import annotations

import pytest

from tests.exactness import checks_length as checks
from tests.exactness.case import Case
from tests.support.compare import BytesDiffer

ROOMS: tuple[dict[str, int], ...] = (
    {"n_ctx": 128},
    {"n_ctx": 4096, "n_slots": 3},
    {"max_rollback": 0},
    {"max_rollback": 16, "n_slots": 2},
)


def test_long_neighbour(case: Case) -> None:
    checks.check_long_neighbour(case)


def test_long_prompt_on_a_grid(case: Case) -> None:
    checks.check_long_cuts(case)


@pytest.mark.parametrize("room", ROOMS, ids=str)
def test_room_does_not_show(case: Case, room: dict[str, int]) -> None:
    checks.check_room(case, **room)


@pytest.mark.parametrize("n", (2, 3, 4, 13))
def test_identical_prompts_give_one_answer(case: Case, n: int) -> None:
    checks.check_identical_prompts(case, n)


def test_second_turn_cut_anywhere(case: Case) -> None:
    checks.check_turns(case)


@pytest.mark.parametrize("fault", ("batch_variant", "scan_order"))
def test_control_long_neighbour(control_case: Case, fault: str) -> None:
    with pytest.raises(BytesDiffer):
        checks.check_long_neighbour(control_case, debug_fault=fault)


def test_control_long_prompt_on_a_grid(control_case: Case) -> None:
    with pytest.raises(BytesDiffer):
        checks.check_long_cuts(control_case, debug_fault="cut_variant")


def test_control_identical_prompts(control_case: Case) -> None:
    with pytest.raises(BytesDiffer):
        checks.check_identical_prompts(control_case, 4, debug_fault="batch_variant")


def test_control_second_turn(control_case: Case) -> None:
    with pytest.raises(BytesDiffer):
        checks.check_turns(control_case, debug_fault="cut_variant")
