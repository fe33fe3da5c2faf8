"""For `bench.device_split`: a second device made slow, and when two devices work."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import Any, ClassVar

import numpy as np

from pyluce.graph import TrunkRunner, experts
from pyluce.graph.layers import RoutedWeights
from pyluce.graph.ops import GraphScope
from pyluce.native import ggml, luce
from pyluce.native import ggml_backend as api
from pyluce.native.backend import Backend, BackendBuffer
from pyluce.native.devices import parse_device
from pyluce.native.ggml import GGMLType
from pyluce.native.split import Away, SplitGraph
from pyluce.native.tensors import Graph, TensorArena, tensor_set
from pyluce.weights import HParams

SLOWER_MEMORY = 2.5  # of a Strix Halo (256 GB/s) than of an R9700 (640 GB/s)
LINK_BYTES_S = 7e9  # 4 lanes of PCIe 4, as far as they are reached
SIZES = (1 << 12, 1 << 17, 1 << 20, 1 << 24, 1 << 26)
Dummy = tuple[TensorArena, Graph]


class SlowPair:
    """While it is entered, runners are built with a slow expert device. `link`: seconds of a transfer by bytes, as measured."""

    def __init__(self, device: str, expert: str) -> None:
        self.link = {size: _copy_seconds(device, expert, size) for size in SIZES}

    def copies(self, n_bytes: int) -> int:
        """How often a transfer of this size is made."""
        real = float(np.interp(n_bytes, list(self.link), list(self.link.values())))
        return max(1, round(n_bytes / LINK_BYTES_S / real))

    def __enter__(self) -> SlowPair:
        slow, picks, leave = self, experts.LayerGraphs._picks, experts.SplitBuilder._leave
        self._before = (picks, leave, experts.LAYER_NODES)
        experts.LAYER_NODES = 64  # type: ignore

        def slow_picks(
            graphs: experts.LayerGraphs, g: GraphScope, h: HParams, routed: RoutedWeights, layer: int, x: int, ids: int
        ) -> int:
            for _ in range(int(SLOWER_MEMORY) - 1 + layer % 2):
                again = picks(graphs, g, h, routed, layer, x, ids)
                ggml.ggml_set_output(again)
                g.graph.expand(again)
            return picks(graphs, g, h, routed, layer, x, ids)

        def slow_leave(
            builder: experts.SplitBuilder,
            g: GraphScope,
            there: experts.LayerGraph,
            send_at: int,
            sends: list[tuple[int, int]],
        ) -> None:
            arena = TensorArena.for_counts(1, 1)
            nothing = Graph(arena, 1)
            builder.__dict__.setdefault("_kept", []).append((arena, nothing))
            for _ in range(slow.copies(ggml.ggml_nbytes(there.result)) - 1):
                builder._parts.append(Away(nothing, send_at, send_at, sends, there.result, builder._returned))
            leave(builder, g, there, send_at, sends)

        experts.LayerGraphs._picks = slow_picks  # type: ignore
        experts.SplitBuilder._leave = slow_leave  # type: ignore
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        experts.LayerGraphs._picks, experts.SplitBuilder._leave, experts.LAYER_NODES = self._before  # type: ignore


def _copy_seconds(device: str, expert: str, size: int) -> float:
    """Of one of many copies from one device to the other, one after the other."""
    with Backend(device) as a, Backend(expert) as b, TensorArena.for_counts(1) as x, TensorArena.for_counts(1) as y:
        source, target = x.new_tensor(GGMLType.I8, (size,)), y.new_tensor(GGMLType.I8, (size,))
        BackendBuffer.for_arena(x, a.buffer_type)
        BackendBuffer.for_arena(y, b.buffer_type)
        tensor_set(source, np.zeros(size, np.int8))
        best = float("inf")
        for _ in range(5):
            started = time.perf_counter()
            for _ in range(20):
                api.ggml_backend_tensor_copy_async(a.ptr, b.ptr, source, target)
            api.ggml_backend_synchronize(a.ptr)
            api.ggml_backend_synchronize(b.ptr)
            best = min(best, (time.perf_counter() - started) / 20)
    return best


class _Event(ctypes.Structure):
    """`struct ggml_backend_event`."""

    _fields_: ClassVar = [("device", ctypes.c_void_p), ("context", ctypes.c_void_p)]


class _Events:
    """Events with times in a device's stream: ggml's own have none."""

    def __init__(self, device: str, count: int) -> None:
        backend, index = parse_device(device)
        self._prefix = backend
        wanted = {"cuda": "libcudart.so", "hip": "libamdhip64.so"}[backend]
        with open("/proc/self/maps", encoding="utf-8") as maps:
            path = next(line.split()[-1] for line in maps if wanted in line)
        self._runtime = ctypes.CDLL(path)
        self._check(self._call("SetDevice")(index))
        contexts = [ctypes.c_void_p() for _ in range(count)]
        for context in contexts:
            self._check(self._call("EventCreate")(ctypes.byref(context)))
        self._events = [_Event(None, context.value) for context in contexts]
        self.pointers = (ctypes.c_void_p * count)(*(ctypes.addressof(event) for event in self._events))

    def _call(self, name: str) -> Any:
        return getattr(self._runtime, self._prefix + name)

    @staticmethod
    def _check(status: int) -> None:
        if status:
            raise RuntimeError(f"the GPU's runtime failed with status {status}")

    def milliseconds(self, base: _Events) -> list[float]:
        """When each was reached, after the first of `base`."""
        found = []
        for event in self._events:
            value = ctypes.c_float()
            first, this = (ctypes.c_void_p(e.context) for e in (base._events[0], event))
            self._check(self._call("EventElapsedTime")(ctypes.byref(value), first, this))
            found.append(value.value)
        return found


def timeline(runner: TrunkRunner, work: Callable[[], object]) -> dict[str, Any]:
    """When each device works in the last step of `work`, all streams of it, in milliseconds: lists of (begin, end, stream).

    The devices' clocks start when each meets its first event, some microseconds apart; both are idle then.
    """
    work()
    work()
    splits = _last_splits(runner)
    events = []
    for split in splits:
        n = len(split._graphs) - 1
        events.append((_Events(split._target.name, 3 * n + 2), _Events(split._expert.name, 2 * n + 1)))
        luce.ggml_luce_split_record(split.ptr, events[-1][0].pointers, events[-1][1].pointers)
    try:
        work()
    finally:
        for split in splits:
            luce.ggml_luce_split_record(split.ptr, None, None)
    api.ggml_backend_synchronize(splits[0]._expert.ptr)
    alone, beside, there = [], [], []
    begin = total = 0.0
    for stream, (target, expert) in enumerate(events):
        t, e = target.milliseconds(events[0][0]), expert.milliseconds(events[0][1])
        n = len(e) // 2
        begins = [begin, *(t[3 * i + 3] for i in range(n))]
        ends = [*(t[3 * i + 1] for i in range(n)), t[-1]]
        alone += [(a, b, stream) for a, b in zip(begins, ends, strict=True)]
        begin = t[2]  # the next stream's first layer comes after this one's
        beside += [(t[3 * i + 1], t[3 * i + 2], stream) for i in range(n)]
        there += [(e[2 * i + 1], e[2 * i + 2], stream) for i in range(n)]
        total = max(total, t[-1])
    return {
        "target": alone, "beside": beside, "expert": there, "ms": total,
        "target_busy": sum(b - a for a, b, _ in [*alone, *beside]) / total,
        "expert_busy": sum(b - a for a, b, _ in there) / total,
    }  # fmt: skip


def _last_splits(runner: TrunkRunner) -> list[SplitGraph]:
    """The graphs of the last step, one for each of its streams. ValueError when it was no step on two devices."""
    recent = runner._graphs.recent
    if recent is None or recent._split is None:
        raise ValueError("expected a step on two devices")
    graphs = runner._graphs._graphs
    keys = [replace(recent.key, stream=stream) for stream in range(recent.key.stream + 1)]
    splits = [graphs[key]._split for key in keys if key in graphs]
    return [split for split in splits if split is not None]
