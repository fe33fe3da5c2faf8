"""Random schedules of prefill, decode, rollback, copy, end and restart: every sequence equals itself replayed alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.exactness.case import Case
from tests.exactness.walk import Walk
from tests.support.compare import BytesDiffer

N_STEPS = 40


def walk(case: Case, seed: int, **options: object) -> Walk:
    with case.open(n_slots=4, **options) as runner:
        done = Walk(runner, case, seed)
        done.run(N_STEPS)
        return done


@pytest.mark.parametrize(("weight_type", "seed"), (("F32", 1), ("F32", 2), ("Q8_0", 3), ("Q4_K", 4), ("IQ4_NL", 5)))
def test_random_schedule(case_of: Callable[[str], Case], weight_type: str, seed: int) -> None:
    walk(case_of(weight_type), seed).check()


@pytest.mark.parametrize(
    "fault", ("batch_variant", "stale_conv", "stale_ple", "stale_ring", "stale_ngram", "shared_page", "nan_leak")
)
def test_control_random_schedule(control_case: Case, fault: str) -> None:
    with pytest.raises(BytesDiffer):
        walk(control_case, 1, debug_fault=fault).check()
