"""The device that the tests of graphs and exactness run on: `LUCE_TEST_DEVICE=cuda:0` (with `LUCE_LIBRARY_DIR`), default cpu.

How far a device may be from float64 is the bound of each test times `SLACK`. The CPU computes F32 ops in F32 with a libm-exact
exp, so only the order of sums shows: a few times 1e-6. A GPU's exp is the fast one (2 units in the last place plus the rounding
of its argument times log2 e: about 1e-6 relative for arguments up to 10) and its sums run in trees; the recurrence of GDN
multiplies such errors over its tokens. So a GPU gets 10 times the CPU's bounds, which is far below what a wrong index or a
missed term does.
"""

from __future__ import annotations

import os

import pytest

from pyluce.native import load_libraries
from pyluce.native.devices import parse_device

DEVICE = os.environ.get("LUCE_TEST_DEVICE", "cpu")
BACKEND = parse_device(DEVICE)[0]
ON_GPU = BACKEND != "cpu"
LOAD_OPTIONS: dict[str, object] = {"device": DEVICE} if ON_GPU else {"threads": 1}
"""What `Luce.load` takes: one thread on the CPU, so that tests beside each other do not wait for each other."""
SLACK = 10.0 if ON_GPU else 1.0
THREADS = (1,) if ON_GPU else (1, 2)
only_cpu = pytest.mark.skipif(ON_GPU, reason="threads and repacked weights are the CPU's")


def load() -> None:
    """Load the libraries of the device, before anything else loads others."""
    load_libraries(BACKEND)
