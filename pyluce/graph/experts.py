"""Routed experts on a second device: what it computes, and what the target's graph does instead.

A row graph splits the picks by where their expert is; both devices compute theirs at once, and the picks are merged and summed as
if one had computed them all. A chunk graph leaves them all to the expert device, which sums them up: one row comes back for a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pyluce.graph import blocks
from pyluce.graph.layers import MoeWeights, RoutedWeights
from pyluce.graph.ops import GraphScope
from pyluce.graph.options import default_threads
from pyluce.native import ggml, luce
from pyluce.native.backend import Backend, GraphAllocator
from pyluce.native.errors import NativeError
from pyluce.native.ggml import GGMLType
from pyluce.native.luce import Phase
from pyluce.native.split import Away, SplitGraph
from pyluce.native.tensors import Graph, TensorArena
from pyluce.weights import HParams, ModelFile, Progress
from pyluce.weights.experts import ExpertWeights

LAYER_NODES: Final = 16


@dataclass(frozen=True, slots=True)
class Shape:
    """What the expert device's graphs of a step depend on. Graphs of different streams are computed at the same time."""

    phase: Phase
    n_rows: int
    matmul_phase: Phase
    stream: int = 0


@dataclass(frozen=True, slots=True)
class LayerGraph:
    """A layer on the expert device. x F32 [H, T]; ids I32 [n_used, T], of a row graph -1 for picks of the target.

    result: of a row graph the picks [H, n_used, T], zero where the id is -1; of a chunk graph, with the router's logits [E, T], their
    weighted sum [H, T].
    """

    graph: Graph
    x: int
    ids: int
    logits: int | None
    result: int


class LayerGraphs:
    """The graphs of all layers for one shape."""

    def __init__(self, shape: Shape, h: HParams, weights: dict[str, int]) -> None:
        self.shape = shape
        overhead = ggml.ggml_graph_overhead_custom(LAYER_NODES, False) + LAYER_NODES * ggml.ggml_tensor_overhead()
        self.arena = TensorArena((h.n_layer + 1) * overhead)
        try:
            self.layers = [self._layer(h, weights, layer) for layer in range(h.n_layer)]
        except BaseException:
            self.arena.close()
            raise

    def _layer(self, h: HParams, weights: dict[str, int], layer: int) -> LayerGraph:
        routed = RoutedWeights.of(weights.get, layer)
        if routed is None:
            raise ValueError(f"layer {layer} has no routed experts")
        n, is_chunk = self.shape.n_rows, self.shape.phase is Phase.CHUNK
        graph = Graph(self.arena, LAYER_NODES)
        g = GraphScope(self.arena, graph, self.shape.phase, self.shape.matmul_phase)
        x = self._input(GGMLType.F32, (h.n_embd, n), "x")
        ids = self._input(GGMLType.I32, (h.n_expert_used, n), "ids")
        logits = self._input(GGMLType.F32, (h.n_expert, n), "logits") if is_chunk else None
        result = self._picks(g, h, routed, layer, x, ids)
        if logits is not None:
            result = g.made(luce.ggml_luce_moe_combine(g.ctx, result, logits, ids, None, None), "moe_combine")
        ggml.ggml_set_output(result)
        graph.expand(result)
        return LayerGraph(graph, x, ids, logits, result)

    def _picks(self, g: GraphScope, h: HParams, routed: RoutedWeights, layer: int, x: int, ids: int) -> int:
        """The picks [H, n_used, T]; `layer` is for who measures."""
        hidden = blocks.hidden_of(g, routed, ggml.ggml_reshape_3d(g.ctx, x, h.n_embd, 1, self.shape.n_rows), ids)
        return g.mul_mat_id(routed.down, hidden, ids)

    def _input(self, kind: GGMLType, ne: tuple[int, ...], name: str) -> int:
        tensor = self.arena.new_tensor(kind, ne, name)
        ggml.ggml_set_input(tensor)
        return tensor

    def close(self) -> None:
        """Free the graphs. Idempotent."""
        self.arena.close()


class ExpertSide:
    """The expert device of a runner: its backend, the routed experts, graphs by shape."""

    def __init__(self, name: str, model: ModelFile, progress: Progress | None) -> None:
        """Raises NativeError when the device is not there or has too little memory, ModelError."""
        self._hparams = model.hparams
        self._graphs: dict[Shape, LayerGraphs] = {}
        self._allocators: dict[int, GraphAllocator] = {}
        self.backend = Backend(name, default_threads() if name == "cpu" else 1)
        try:
            self.weights = ExpertWeights(model, self.backend, progress)
        except BaseException:
            self.close()
            raise

    @property
    def graph_bytes(self) -> int:
        """Bytes of graph memory."""
        return sum(allocator.n_bytes for allocator in self._allocators.values())

    def graphs(self, shape: Shape) -> tuple[LayerGraphs, bool]:
        """The graphs of a shape; True: the graph memory has moved, those of other shapes of its stream must not be used any more."""
        found = self._graphs.get(shape)
        if found is not None:
            return found, False
        allocator = self._allocators.get(shape.stream)
        if allocator is None:
            allocator = self._allocators[shape.stream] = GraphAllocator(self.backend)
        found = self._graphs[shape] = LayerGraphs(shape, self._hparams, self.weights.tensors)
        epoch = allocator.epoch
        for layer in found.layers:
            if not self.backend.is_cpu:
                self.backend.check_supports(layer.graph)
            allocator.reserve(layer.graph)
        # a tensor that has a place keeps it, so memory must not move any more
        for layer in found.layers:
            allocator.alloc(layer.graph)
        if self.backend.is_lost:
            raise NativeError(f"the expert device {self.backend.name} has gone")
        return found, allocator.epoch != epoch

    def drop(self, phase: Phase, n_rows: int, stream: int) -> None:
        """Close the graphs of so many rows of a stream."""
        for shape in [s for s in self._graphs if (s.phase, s.n_rows, s.stream) == (phase, n_rows, stream)]:
            self._graphs.pop(shape).close()

    def close(self) -> None:
        """Free everything. Idempotent."""
        while self._graphs:
            self._graphs.popitem()[1].close()
        while self._allocators:
            self._allocators.popitem()[1].close()
        if hasattr(self, "weights"):
            self.weights.close()
        self.backend.close()


class SplitBuilder:
    """Builds the layers of one step graph that leave picks to the expert device, and joins both when they have memory."""

    def __init__(self, arena: TensorArena, layers: list[LayerGraph]) -> None:
        """`arena`: the step graph's."""
        self._layers = layers
        ne = tuple(n for n in _shape(layers[0].result))
        self._returned = arena.new_tensor(GGMLType.F32, ne, "returned")
        ggml.ggml_set_input(self._returned)
        self._parts: list[Away] = []

    def moe(self, g: GraphScope, h: HParams, w: MoeWeights, layer: int, x: int, n_rows: int) -> tuple[int, int]:
        """As `blocks.moe`."""
        there = self._layers[layer]
        logits, shared_gate = g.mul_mat(w.router, x), g.mul_mat(w.shared_gate_in, x)
        g.now(logits, shared_gate)
        ids = g.made(luce.ggml_luce_route(g.ctx, logits, h.n_expert_used), "route")
        if g.phase is Phase.CHUNK or w.routed is None or w.slots is None:
            return self._all_there(g, w, there, x, ids, logits, shared_gate), ids
        both = g.made(luce.ggml_luce_pick_split(g.ctx, ids, w.slots), "pick_split")
        size = h.n_expert_used * 4
        here_ids, there_ids = (
            ggml.ggml_view_2d(g.ctx, both, h.n_expert_used, n_rows, size, half * n_rows * size) for half in range(2)
        )
        g.now(x, here_ids, there_ids)
        send_at = g.graph.n_nodes
        kept = (x, ids, both)
        picks, shared_out = blocks.picks_beside_shared(g, h, w, w.routed, x, here_ids, n_rows, kept)
        if _n_experts(w.routed) < h.n_expert:
            self._leave(g, there, send_at, [(x, there.x), (there_ids, there.ids)])
            picks = g.made(luce.ggml_luce_pick_merge(g.ctx, picks, self._returned, here_ids), "pick_merge")
        node = luce.ggml_luce_moe_combine(g.ctx, picks, logits, ids, shared_out, shared_gate)
        return g.made(node, "moe_combine"), ids

    def _all_there(
        self, g: GraphScope, w: MoeWeights, there: LayerGraph, x: int, ids: int, logits: int, shared_gate: int
    ) -> int:
        g.now(x, ids)
        send_at = g.graph.n_nodes
        first, second = g.mul_mat(w.shared_gate, x), g.mul_mat(w.shared_up, x)
        g.now(first, second)
        shared = ggml.ggml_swiglu_split(g.ctx, first, second)
        g.keep(shared, x, ids, logits)
        shared_out = g.mul_mat(w.shared_down, shared)
        g.now(shared_out)
        sends = [(x, there.x), (ids, there.ids)]
        if there.logits is None:
            self._leave(g, there, send_at, sends)
            node = luce.ggml_luce_moe_combine(g.ctx, self._returned, logits, ids, shared_out, shared_gate)
            return g.made(node, "moe_combine")
        self._leave(g, there, send_at, [*sends, (logits, there.logits)])
        return g.made(luce.ggml_luce_moe_join(g.ctx, self._returned, shared_out, shared_gate), "moe_join")

    def _leave(self, g: GraphScope, there: LayerGraph, send_at: int, sends: list[tuple[int, int]]) -> None:
        self._parts.append(Away(there.graph, send_at, g.graph.n_nodes, sends, there.result, self._returned))

    def join(self, target: Backend, expert: Backend, graph: Graph) -> SplitGraph:
        """Both devices' graphs as one computation."""
        return SplitGraph(target, expert, graph, self._parts)


def _n_experts(routed: RoutedWeights) -> int:
    return _shape(routed.down)[2]


def _shape(tensor: int) -> tuple[int, int, int]:
    ne = ggml.ggml_tensor.from_address(tensor).ne
    return ne[0], ne[1], ne[2]
