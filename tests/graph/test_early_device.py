"""The gate of a real GPU's stream, and steps launched early behind it: `LUCE_TEST_DEVICE=cuda:0`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from pyluce.graph import TrunkRunner
from pyluce.graph.early import REPEATS
from pyluce.graph.staging import HostMemory
from pyluce.native import ggml_backend as api
from pyluce.native.backend import Backend, BackendBuffer, BackendEvent
from pyluce.native.gate import PATIENCE_MS, StreamGate
from pyluce.native.ggml import GGMLType
from pyluce.native.tensors import TensorArena, tensor_get
from tests.graph.test_early import OPTIONS, walk
from tests.support.device import BACKEND, DEVICE
from tests.support.models import ModelCache, luce_tiny_path, model_cache  # noqa: F401

pytestmark = pytest.mark.skipif(BACKEND != "cuda", reason="a gate is CUDA's")

N = 1024
PATIENCE_S = PATIENCE_MS / 1000.0


@dataclass
class Line:
    """A copy of `memory` to a tensor, behind the gate."""

    backend: Backend
    gate: StreamGate
    event: BackendEvent
    memory: HostMemory
    tensor: int

    def launch(self) -> None:
        assert self.gate.shut()
        self.memory.array[:] = 1
        api.ggml_backend_tensor_set_async(self.backend.ptr, self.tensor, self.memory.address, 0, N)
        self.event.record()

    def arrived(self) -> set[int]:
        return set(tensor_get(self.tensor, np.int8, N).tolist())


@pytest.fixture
def line() -> Iterator[Line]:
    with ExitStack() as stack:
        backend = stack.enter_context(Backend(DEVICE))
        gate = StreamGate.for_backend(backend)
        assert gate is not None, "this driver has no stream waits"
        stack.callback(gate.close)
        event = BackendEvent(backend)
        stack.callback(event.close)
        memory = HostMemory(backend)
        memory.grow(N)
        stack.callback(memory.close)
        arena = stack.enter_context(TensorArena.for_counts(1))
        tensor = arena.new_tensor(GGMLType.I8, (N,))
        BackendBuffer.for_arena(arena, backend.buffer_type).clear(0)
        yield Line(backend, gate, event, memory, tensor)


def test_what_is_behind_waits_and_reads_late(line: Line) -> None:
    for value in (2, 3, 4):
        line.launch()
        assert not line.gate.shut(), "it is shut already"
        assert line.gate.claim()
        time.sleep(2 * PATIENCE_S)  # claimed: it does not open by itself
        assert line.arrived() == {value - 1 if value > 2 else 0}, "other streams go on, and nothing was copied"
        line.memory.array[:] = value
        line.gate.open()
        line.event.wait()
        assert line.arrived() == {value}


def test_it_opens_by_itself(line: Line) -> None:
    line.launch()
    begun = time.perf_counter()
    line.event.wait()
    assert 0.5 * PATIENCE_S < time.perf_counter() - begun < 20 * PATIENCE_S
    assert line.arrived() == {1}
    assert not line.gate.claim()
    line.gate.open()


def test_other_work_of_the_device_does_not_wait(line: Line) -> None:
    line.launch()
    begun = time.perf_counter()
    line.arrived()
    buffer = BackendBuffer.of_size(line.backend.buffer_type, 1 << 20)
    assert line.gate.claim(), "a copy and an allocation waited for the gate"
    assert time.perf_counter() - begun < PATIENCE_S
    line.gate.open()
    line.backend.wait()
    buffer.close()


def test_closing_a_shut_gate_opens_it(line: Line) -> None:
    line.launch()
    assert line.gate.claim()
    line.gate.close()
    line.event.wait()
    assert line.arrived() == {1}


@pytest.mark.parametrize("which", ["tiny", "luce-tiny with its head"])
def test_the_same_bits_with_and_without(model_cache: ModelCache, which: str) -> None:  # noqa: F811
    path = Path(model_cache.tiny("Q8_0")) if which == "tiny" else luce_tiny_path()
    options = replace(OPTIONS, device=DEVICE, repack=True, mtp=which != "tiny", n_ctx=320)
    plain, counts = walk(path, replace(options, early=False))
    assert counts == (0, 0)
    found, (_, used) = walk(path, options)
    assert found == plain and used > 75
    nobody = walk(path, options, lambda runner, i: time.sleep(1.5 * PATIENCE_S) if i % 5 == 0 else None)
    assert nobody[0] == plain, "gates that opened by themselves"


def test_a_runner_closes_with_a_step_behind_the_gate(model_cache: ModelCache) -> None:  # noqa: F811
    with TrunkRunner(model_cache.tiny("Q8_0"), replace(OPTIONS, device=DEVICE, repack=True)) as runner:
        state = runner.new_sequence()
        runner.prefill(state, [9, 8, 7])
        for _ in range(REPEATS + 2):
            runner.decode_rows([(state, 5)], [False])
        begun = time.perf_counter()
    assert time.perf_counter() - begun < 5.0
