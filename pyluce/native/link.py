"""What lies between two devices: peer access where the pair has it, and how long transfers take."""

from __future__ import annotations

import ctypes
import statistics
import time
from dataclasses import dataclass
from typing import Final

import numpy as np

from pyluce.native import ggml_backend as api
from pyluce.native.backend import Backend, BackendBuffer
from pyluce.native.devices import parse_device
from pyluce.native.library import GPU_BACKENDS, load_libraries
from pyluce.native.structs import GGMLType
from pyluce.native.tensors import TensorArena, tensor_set

SMALL_BYTES: Final = 4
LARGE_BYTES: Final = 4 << 20
ROUNDS: Final = 8


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """A transfer of 4 bytes, in seconds; bytes a second of one of 4 MiB. Each is the median of some there and back."""

    latency_s: float
    bytes_s: float


def peer_access(a: str, b: str, on: bool) -> bool:
    """Let two GPUs of one backend reach each other's memory, or end that; False where they cannot: copies then go through the host."""
    (first, i), (second, j) = parse_device(a), parse_device(b)
    if first != second or first not in GPU_BACKENDS:
        return False
    function = load_libraries(first).handles[f"ggml-{first}"].ggml_luce_peer_access
    function.restype, function.argtypes = ctypes.c_bool, [ctypes.c_int, ctypes.c_int, ctypes.c_bool]
    return bool(function(i, j, on))


def measure_link(a: Backend, b: Backend) -> LinkSpeed:
    """How long transfers between two devices take now. Raises NativeError when memory cannot be had."""
    small, large = _seconds(a, b, SMALL_BYTES), _seconds(a, b, LARGE_BYTES)
    return LinkSpeed(small, LARGE_BYTES / max(large - small, 1e-9))


def _seconds(a: Backend, b: Backend, n_bytes: int) -> float:
    with TensorArena.for_counts(1) as there, TensorArena.for_counts(1) as here:
        x, y = here.new_tensor(GGMLType.I8, (n_bytes,)), there.new_tensor(GGMLType.I8, (n_bytes,))
        for arena, backend in ((here, a), (there, b)):
            BackendBuffer.for_arena(arena, backend.buffer_type)
        tensor_set(x, np.zeros(n_bytes, np.int8))
        taken = []
        for _ in range(1 + ROUNDS):
            started = time.perf_counter()
            for source, target, one, other in ((a, b, x, y), (b, a, y, x)):
                api.ggml_backend_tensor_copy_async(source.ptr, target.ptr, one, other)
                api.ggml_backend_synchronize(source.ptr)
                api.ggml_backend_synchronize(target.ptr)
            taken.append((time.perf_counter() - started) / 2)
        return statistics.median(taken[1:])
