"""Runs one node of the patched ggml on the device under test with numpy arrays in and out."""

from __future__ import annotations

from collections.abc import Mapping

from pyluce.selftest import bench
from pyluce.selftest.bench import Array, Weight
from tests.support.device import DEVICE, load


class OpBench(bench.OpBench):
    """`pyluce.selftest.bench.OpBench` on the device under test."""

    def __init__(self, arrays: Mapping[str, Array | Weight], n_threads: int = 1) -> None:
        load()
        super().__init__(arrays, n_threads, DEVICE)
