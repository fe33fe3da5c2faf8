"""What a graph will need, before any of it exists: ggml's own planning, without the allocation."""

from __future__ import annotations

import ctypes

from pyluce.native import ggml_backend as api
from pyluce.native import log
from pyluce.native.errors import NativeError
from pyluce.native.tensors import Graph


def graph_memory_bytes(graph: Graph, buffer_type: int) -> int:
    """Bytes that a GraphAllocator of this ``ggml_backend_buffer_type_t`` would take for the graph.

    Tensors that lie elsewhere (weights, state) must say so: their ``data`` is not NULL.
    """
    allocator = api.ggml_gallocr_new(buffer_type)
    if not allocator:
        raise NativeError("ggml_gallocr_new returned NULL", log.take())
    size = ctypes.c_size_t(0)
    try:
        api.ggml_gallocr_reserve_n_size(allocator, graph.ptr, None, None, ctypes.byref(size))
    finally:
        api.ggml_gallocr_free(allocator)
    return size.value


def cpu_work_bytes(graph: Graph, n_threads: int) -> int:
    """Bytes of the work buffer that the CPU takes when it first computes the graph, and keeps."""
    return api.ggml_graph_plan(graph.ptr, n_threads, None).work_size
