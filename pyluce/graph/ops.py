"""The op vocabulary of the blocks: thin functions that add a node and check that it was made.

A `GraphScope` is one graph under construction: its phase, the phase that its matrix products choose their kernels by
(another one only where a test plants that fault), and the fault that a test planted in the ops.
"""

from __future__ import annotations

from pyluce.native import ggml, log, luce
from pyluce.native.errors import NativeError
from pyluce.native.luce import Fault, Phase
from pyluce.native.structs import GGML_MAX_SRC
from pyluce.native.tensors import Graph, TensorArena, tensor_struct


class GraphScope:
    """Adds nodes to one graph. Shapes are fastest axis first; T is the number of rows."""

    def __init__(
        self, arena: TensorArena, graph: Graph, phase: Phase, matmul_phase: Phase, fault: Fault = Fault.NONE
    ) -> None:
        self.ctx = arena.ptr
        self.graph = graph
        self.phase = phase
        self.matmul_phase = matmul_phase
        self.fault = fault

    def made(self, node: int | None, what: str) -> int:
        """The node, or NativeError with the shape rule that it broke."""
        if not node:
            raise NativeError(f"the op {what} refused its operands", log.tail())
        return node

    def now(self, *nodes: int | None) -> None:
        """Put these nodes next in the graph, in this order: a device computes neighbours that wait for nothing of each
        other in one launch."""
        for node in nodes:
            if node is not None:
                self.graph.expand(node)

    def keep(self, node: int, *tensors: int | None) -> None:
        """Keep the memory of `tensors` until `node` is computed: a device may read them in the launch that writes it."""
        sources = tensor_struct(node).src
        free = [i for i in range(GGML_MAX_SRC) if not sources[i]]
        for tensor in tensors:
            if tensor is not None:
                sources[free.pop()] = tensor

    def mul_mat(self, weight: int, x: int) -> int:
        """[n_out, T] = weight [n_in, n_out] times x [n_in, T], by this phase's kernels."""
        if not ggml.ggml_is_contiguous(x):
            raise ValueError("a matrix product needs contiguous rows: the repacked kernels read four rows as one block")
        node = ggml.ggml_mul_mat(self.ctx, weight, x)
        luce.ggml_luce_set_phase(node, self.matmul_phase)
        return node

    def mul_mat_id(self, experts: int, x: int, ids: int) -> int:
        """[n_out, n_used, T]: for each id its expert of experts [n_in, n_out, E] times x [n_in, 1 or n_used, T]."""
        node = ggml.ggml_mul_mat_id(self.ctx, experts, x, ids)
        luce.ggml_luce_set_phase(node, self.matmul_phase)
        return node

    def half(self, x: int, width: int, n_rows: int, index: int) -> int:
        """Rows 0..T-1 (index 0) or T..2T-1 (index 1) of x [width, 2*T], as a view."""
        return ggml.ggml_view_2d(self.ctx, x, width, n_rows, width * 4, index * n_rows * width * 4)
