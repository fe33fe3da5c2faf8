"""Runs single nodes of the patched ggml on a device, with numpy arrays in and out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from pyluce.native.backend import Backend, BackendBuffer, GraphAllocator
from pyluce.native.ggml import GGMLType, ggml_set_output
from pyluce.native.ggml_backend import BackendBufferUsage
from pyluce.native.paths import watch_paths
from pyluce.native.quants import dequantize, quantize
from pyluce.native.tensors import Graph, TensorArena, tensor_get, tensor_set, tensor_shape

TYPES: Final = {
    np.dtype(np.float32): GGMLType.F32,
    np.dtype(np.float16): GGMLType.F16,
    np.dtype(np.int32): GGMLType.I32,
    np.dtype(np.int64): GGMLType.I64,
}
MAX_NODES: Final = 64

Array = npt.NDArray[Any]
Build = Callable[[int, dict[str, int]], int | None]


@dataclass(frozen=True, slots=True)
class Weight:
    """A matrix, or experts, of any ggml type: raw rows, numpy shape [..., row_bytes], of `width` values each."""

    type: GGMLType
    raw: npt.NDArray[np.uint8]
    width: int

    @classmethod
    def of(cls, kind: GGMLType, values: npt.NDArray[np.float32]) -> Weight:
        """`values` [..., width] rounded to the type."""
        return cls(kind, quantize(kind, values), values.shape[-1])

    @property
    def values(self) -> npt.NDArray[np.float32]:
        """What the rows hold, [..., width]."""
        return dequantize(self.type, self.raw, self.width)

    @property
    def ne(self) -> tuple[int, ...]:
        """The shape, fastest axis first."""
        return (self.width, *reversed(self.raw.shape[:-1]))


class OpBench:
    """Tensors made from arrays (numpy order, slowest axis first) and one node after the other computed on them.

    `weight_type`: the `ggml_backend_buffer_type_t` where weights lie, if not the device's own. `paths`: the kernels that ran so far.
    """

    def __init__(
        self,
        arrays: Mapping[str, Array | Weight],
        n_threads: int = 1,
        device: str = "cpu",
        weight_type: int | None = None,
    ) -> None:
        self.paths: dict[str, None] = {}
        self.backend = Backend(device, n_threads)
        self.inputs = TensorArena.for_counts(len(arrays) + 1)
        self.weights = TensorArena.for_counts(len(arrays) + 1) if weight_type is not None else self.inputs
        self.tensors = {name: self._new(name, array) for name, array in arrays.items()}
        self.buffer = BackendBuffer.for_arena(self.inputs, self.backend.buffer_type)
        if weight_type is not None:
            BackendBuffer.for_arena(self.weights, weight_type, BackendBufferUsage.WEIGHTS)
        for name, array in arrays.items():
            tensor_set(self.tensors[name], array.raw if isinstance(array, Weight) else array)

    def _new(self, name: str, array: Array | Weight) -> int:
        if isinstance(array, Weight):
            return self.weights.new_tensor(array.type, array.ne, name)
        return self.inputs.new_tensor(TYPES[array.dtype], tuple(reversed(array.shape)), name)

    def run(self, build: Build, dtype: Any = np.float32) -> Array:
        """Compute the node that `build(ctx, tensors)` returns; its values in numpy order, four axes.

        AssertionError when the constructor refuses its operands, UnsupportedOpError when the device does not compute the node.
        """
        with TensorArena.for_counts(MAX_NODES, MAX_NODES) as arena:
            node = build(arena.ptr, self.tensors)
            if not node:
                raise AssertionError("the constructor refused its operands")
            ggml_set_output(node)
            graph = Graph(arena, MAX_NODES)
            graph.expand(node)
            self.backend.check_supports(graph)
            with GraphAllocator(self.backend) as allocator:
                allocator.alloc(graph)
                _, paths = watch_paths(lambda: self.backend.compute(graph))
                self.paths |= dict.fromkeys(paths)
                return tensor_get(node, dtype, tuple(reversed(tensor_shape(node))))

    def set(self, name: str, array: Array) -> None:
        """Other values for a tensor."""
        tensor_set(self.tensors[name], array)

    def read(self, name: str, like: Array) -> Array:
        """What a tensor holds now."""
        return tensor_get(self.tensors[name], like.dtype, like.shape)

    def close(self) -> None:
        """Free everything."""
        self.buffer.close()
        self.inputs.close()
        self.weights.close()
        self.backend.close()

    def __enter__(self) -> OpBench:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
