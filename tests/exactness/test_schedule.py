"""Cuts, batches, verify rows and threads, bit for bit, for every weight type; then the faults that must show."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.exactness import checks_schedule as checks
from tests.exactness.case import Case
from tests.support.compare import BytesDiffer
from tests.support.device import only_cpu


@pytest.mark.parametrize("length", (20, 70, 300))
def test_one_chunk_equals_every_cut(case: Case, length: int) -> None:
    checks.check_cuts(case, length)


@pytest.mark.parametrize("chunk_tokens", (16, 64))
def test_smaller_chunks_equal_one(case: Case, chunk_tokens: int) -> None:
    checks.check_cuts(case, 70, plans=([], [61]), chunk_tokens=chunk_tokens)


def test_wanted_logits_change_nothing(case: Case) -> None:
    checks.check_wanted_logits(case, 70)


@pytest.mark.parametrize("n", (2, 3, 4, 8))
def test_rows_of_many_sequences_equal_each_alone(case: Case, n: int) -> None:
    checks.check_rows_of_many(case, n)


@pytest.mark.parametrize("k", (2, 3, 4, 5, 6, 7, 8))
def test_rows_of_one_sequence_equal_one_by_one(case: Case, k: int) -> None:
    checks.check_rows_of_one(case, k)


def test_mixed_steps_equal_each_alone(case: Case) -> None:
    checks.check_mixed_steps(case)


@only_cpu
def test_two_threads_equal_one(case: Case) -> None:
    checks.check_threads(case)


@only_cpu
@pytest.mark.parametrize("weight_type", ("Q8_0", "Q4_K", "IQ4_NL"))
def test_weights_as_stored_in_the_file(case_of: Callable[[str], Case], weight_type: str) -> None:
    """Without repacked weights other kernels run; they must be just as independent of the schedule."""
    case = case_of(weight_type)
    checks.check_cuts(case, 70, plans=([61], list(range(1, 70))), repack=False)
    checks.check_rows_of_many(case, 3, repack=False)
    checks.check_rows_of_one(case, 8, repack=False)


def test_control_cuts(control_case: Case) -> None:
    with pytest.raises(BytesDiffer):
        checks.check_cuts(control_case, 70, debug_fault="cut_variant")


@pytest.mark.parametrize("n", (2, 3, 4, 8))
def test_control_rows_of_many_sequences(control_case: Case, n: int) -> None:
    with pytest.raises(BytesDiffer):
        checks.check_rows_of_many(control_case, n, debug_fault="batch_variant")


@pytest.mark.parametrize("k", (2, 8))
def test_control_rows_of_one_sequence(control_case: Case, k: int) -> None:
    with pytest.raises(BytesDiffer):
        checks.check_rows_of_one(control_case, k, debug_fault="batch_variant")


def test_control_mixed_steps(control_case: Case) -> None:
    with pytest.raises(BytesDiffer):
        checks.check_mixed_steps(control_case, debug_fault="batch_variant")


@only_cpu
def test_control_threads(control_case: Case) -> None:
    with pytest.raises(BytesDiffer):
        checks.check_threads(control_case, debug_fault="thread_variant")
