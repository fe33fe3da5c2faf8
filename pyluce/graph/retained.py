"""The step graphs that a runner keeps and replays, with the memory that they compute in."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from pyluce.graph.experts import LayerGraphs, Shape
from pyluce.graph.inputs import InputWriter
from pyluce.graph.layers import TrunkWeights
from pyluce.graph.options import RunnerOptions
from pyluce.graph.trunk import GraphKey, StepGraph
from pyluce.graph.two_devices import SplitExperts
from pyluce.native.backend import Backend, GraphAllocator
from pyluce.native.luce import Fault, Phase
from pyluce.native.measure import cpu_work_bytes
from pyluce.state import StatePool
from pyluce.weights import HParams

RETAINED_GRAPHS: Final = 32

FAULTS: Final = {
    "nan_leak": Fault.NAN_LEAK,
    "tie_high": Fault.TIE_HIGH,
    "scan_order": Fault.SCAN_ORDER,
    "thread_variant": Fault.THREADS,
}
"""Those that are planted in a graph's ops, by their name among the options."""


class RetainedGraphs:
    """Graphs by key, the one used longest ago forgotten first. `n_built` counts those made; `work_bytes` is the CPU's work buffer."""

    def __init__(
        self,
        options: RunnerOptions,
        hparams: HParams,
        weights: TrunkWeights,
        pool: StatePool,
        backend: Backend,
        inputs: InputWriter,
        experts: SplitExperts | None,
        *,
        collect_picks: bool,
    ) -> None:
        self._options = options
        self._hparams = hparams
        self._weights = weights
        self._pool = pool
        self._backend = backend
        self._inputs = inputs
        self._experts = experts
        self._collect_picks = collect_picks
        self._allocators: dict[int, GraphAllocator] = {}
        self._graphs: OrderedDict[GraphKey, StepGraph] = OrderedDict()
        self.recent: StepGraph | None = None  # the graph of the last step
        self.work_bytes = 0
        self.n_built = 0

    def __len__(self) -> int:
        return len(self._graphs)

    @property
    def n_bytes(self) -> int:
        """Graph memory on the device."""
        return sum(allocator.n_bytes for allocator in self._allocators.values())

    def link_bytes(self) -> dict[tuple[Phase, int], tuple[int, int]]:
        """By phase and rows, the bytes that a step sends to the expert device, and gets from it."""
        return {(key.phase, key.n_rows): graph.link_bytes() for key, graph in self._graphs.items()}

    def get(self, key: GraphKey) -> StepGraph:
        """The graph of that key, ready to compute. Raises NativeError, UnsupportedOpError."""
        if self.recent is not None and self.recent.key == key:
            return self.recent
        graph = self._graphs.get(key) or self._build(key)
        self._graphs.move_to_end(key)
        self.recent = graph
        return graph

    def _build(self, key: GraphKey) -> StepGraph:
        self._backend.wait()
        fault = self._options.debug_fault
        upstream = fault == ("batch_variant" if key.phase is Phase.ROW else "cut_variant")
        matmul_phase = Phase.UPSTREAM if upstream else key.phase
        graph = StepGraph(
            key,
            self._hparams,
            self._weights,
            self._pool,
            FAULTS.get(fault or "", Fault.NONE),
            matmul_phase,
            collect_picks=self._collect_picks,
            experts=self._layer_graphs(Shape(key.phase, key.n_rows, matmul_phase, key.stream)),
        )
        if self._backend.is_cpu:
            self.work_bytes = max(self.work_bytes, cpu_work_bytes(graph.graph, self._options.n_threads))
        else:
            try:
                self._backend.check_supports(graph.graph)
            except BaseException:
                graph.close()
                raise
        self._inputs.reserve(graph)
        self._graphs[key] = graph
        self.n_built += 1
        while len(self._graphs) > RETAINED_GRAPHS:
            self._drop(next(iter(self._graphs)))
        allocator = self._allocators.get(key.stream)
        if allocator is None:
            allocator = self._allocators[key.stream] = GraphAllocator(self._backend)
        epoch = allocator.epoch
        allocator.alloc(graph.graph)
        if allocator.epoch != epoch:
            # the others' tensors point into graph memory that has moved
            for other in [k for k in self._graphs if k.stream == key.stream and k != key]:
                self._drop(other)
        if self._experts is not None:
            graph.join(self._backend, self._experts.side.backend)
        return graph

    def _layer_graphs(self, shape: Shape) -> LayerGraphs | None:
        """What the expert device computes in a step of this shape."""
        if self._experts is None:
            return None
        graphs, moved = self._experts.side.graphs(shape)
        if moved:
            for key in [
                k for k in self._graphs if k.stream == shape.stream and _shape(k) != (shape.phase, shape.n_rows)
            ]:
                self._drop(key)
        return graphs

    def reconnect(self) -> None:
        """Find an expert device that has gone. Raises NativeError while it is not there."""
        if self._experts is not None and self._experts.lost:
            self.clear()
            self._experts.reconnect()

    def clear(self) -> None:
        """Close the graphs."""
        for key in list(self._graphs):
            self._drop(key)

    def _drop(self, key: GraphKey) -> None:
        graph = self._graphs.pop(key)
        if graph is self.recent:
            self.recent = None
        self._inputs.forget(graph)
        graph.close()
        shapes = {_shape(other) for other in self._graphs if other.stream == key.stream}
        if self._experts is not None and _shape(key) not in shapes:
            self._experts.drop(key.phase, key.n_rows, key.stream)

    def close(self) -> None:
        """Close the graphs and free their memory. Idempotent."""
        self.clear()
        while self._allocators:
            self._allocators.popitem()[1].close()


def _shape(key: GraphKey) -> tuple[Phase, int]:
    """What the expert device's graphs depend on."""
    return key.phase, key.n_rows
