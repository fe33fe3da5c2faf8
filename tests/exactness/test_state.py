"""Rollback, slot reuse and copies, bit for bit, for every weight type; then the faults that must show."""

from __future__ import annotations

import pytest

from tests.exactness import checks_state as checks
from tests.exactness.case import Case
from tests.support.compare import BytesDiffer

STALE_PARTS = ("stale_conv", "stale_ple", "stale_ring")
ROLLBACK_CONTROLS = [
    # convolution inputs are addressed by position, so a rollback of one needs no more of them than a decoded row does
    (n, fault)
    for n in (1, 2, 3, 7)
    for fault in (*STALE_PARTS, "stale_ngram")
    if n > 1 or fault in ("stale_ring", "stale_ngram")
]


@pytest.mark.parametrize("n", (1, 2, 3, 7))
@pytest.mark.parametrize("verify", (False, True), ids=("decoded", "verified"))
def test_rollback(case: Case, n: int, verify: bool) -> None:
    checks.check_rollback(case, n, verify=verify)


def test_partly_accepted_drafts(case: Case) -> None:
    checks.check_partial_accepts(case)


def test_slot_reused_after_poison(case: Case) -> None:
    checks.check_poisoned_slot(case)


def test_slot_reused_after_clear(case: Case) -> None:
    checks.check_cleared_slot(case)


@pytest.mark.parametrize("length", (33, 61, 62, 70))
def test_copies_diverge(case: Case, length: int) -> None:
    checks.check_copy(case, length)


@pytest.mark.parametrize(("n", "fault"), ROLLBACK_CONTROLS)
def test_control_rollback(control_case: Case, n: int, fault: str) -> None:
    with pytest.raises(BytesDiffer):
        checks.check_rollback(control_case, n, debug_fault=fault)


@pytest.mark.parametrize("fault", STALE_PARTS)
def test_control_partly_accepted_drafts(control_case: Case, fault: str) -> None:
    with pytest.raises(BytesDiffer):
        checks.check_partial_accepts(control_case, debug_fault=fault)


def test_control_slot_reused_after_poison(control_case: Case) -> None:
    with pytest.raises(BytesDiffer):
        checks.check_poisoned_slot(control_case, debug_fault="nan_leak")


def test_control_slot_reused_after_clear(control_case: Case) -> None:
    with pytest.raises(BytesDiffer):
        checks.check_cleared_slot(control_case, debug_fault="nan_leak")


@pytest.mark.parametrize("fault", ("stale_conv", "stale_ring", "shared_page"))
def test_control_copies_diverge(control_case: Case, fault: str) -> None:
    with pytest.raises(BytesDiffer):
        checks.check_copy(control_case, 61, debug_fault=fault)
