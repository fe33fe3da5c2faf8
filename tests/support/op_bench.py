"""Runs one node of the patched ggml on the CPU backend with numpy arrays in and out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from pyluce.native import load_libraries
from pyluce.native.backend import Backend, BackendBuffer, GraphAllocator
from pyluce.native.ggml import GGMLType, ggml_set_output
from pyluce.native.tensors import Graph, TensorArena, tensor_get, tensor_set, tensor_shape

TYPES = {np.dtype(np.float32): GGMLType.F32, np.dtype(np.float16): GGMLType.F16, np.dtype(np.int32): GGMLType.I32}

Array = npt.NDArray[Any]


class OpBench:
    """Tensors made from arrays (numpy order, slowest axis first) and one node computed on them."""

    def __init__(self, arrays: Mapping[str, Array], n_threads: int = 1) -> None:
        load_libraries()
        self.backend = Backend("cpu", n_threads)
        self.inputs = TensorArena.for_counts(len(arrays) + 1)
        self.tensors = {
            name: self.inputs.new_tensor(TYPES[array.dtype], tuple(reversed(array.shape)), name)
            for name, array in arrays.items()
        }
        self.buffer = BackendBuffer.for_arena(self.inputs, self.backend.buffer_type)
        for name, array in arrays.items():
            tensor_set(self.tensors[name], array)

    def run(self, build: Callable[[int, dict[str, int]], int | None], dtype: Any = np.float32) -> Array:
        """Compute the node that `build(ctx, tensors)` returns; its values in numpy order."""
        with TensorArena.for_counts(64, 64) as arena:
            node = build(arena.ptr, self.tensors)
            assert node, "the constructor refused its operands"
            ggml_set_output(node)
            graph = Graph(arena, 64)
            graph.expand(node)
            with GraphAllocator(self.backend) as allocator:
                allocator.alloc(graph)
                self.backend.compute(graph)
                return tensor_get(node, dtype, tuple(reversed(tensor_shape(node))))

    def read(self, name: str, like: Array) -> Array:
        """What a tensor holds now."""
        return tensor_get(self.tensors[name], like.dtype, like.shape)

    def close(self) -> None:
        """Free everything."""
        self.buffer.close()
        self.inputs.close()
        self.backend.close()

    def __enter__(self) -> OpBench:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
