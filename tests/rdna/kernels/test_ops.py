"""Every op kind on the interpreter: the host's own launches of the real code objects, against float64, and rows that do not
see each other. The bounds are the self-test's for a GPU."""

from __future__ import annotations

import pytest

from pyluce.selftest.bench import OpBench
from tests.rdna.kernels.device import FakeDevice
from tests.rdna.kernels.sizes import KINDS, SMALL, WIDE, case_of

S = SMALL.s


@pytest.mark.parametrize(("kind", "number"), KINDS)
def test_an_op_is_what_float64_gives(executed: FakeDevice, device: str, kind: str, number: int) -> None:
    case = case_of(kind, SMALL, number)
    found = case.compute(lambda arrays: OpBench(arrays, device=device))
    executed.check()
    assert case.error(found) <= case.bound_on(gpu=True)


def test_attention_by_matrix_instructions(executed: FakeDevice, device: str) -> None:
    case = case_of("qsa_attn", WIDE, 1)
    found = case.compute(lambda arrays: OpBench(arrays, device=device))
    executed.check()
    assert sum(launch.stats.wmma for launch in executed.launches) > 0
    assert case.error(found) <= case.bound_on(gpu=True)
