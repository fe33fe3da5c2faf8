"""Streams tensors from the files into a device's memory: bounded pieces, one read while the one before is copied."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Final

import numpy as np
import numpy.typing as npt

from pyluce.native import ggml_backend as api
from pyluce.native.backend import Backend, BackendBuffer
from pyluce.native.tensors import memory_at
from pyluce.weights.model_file import ModelFile, Progress
from pyluce.weights.tensors import TensorInfo

PIECE_BYTES: Final = 32 << 20
REMOTE_PIECE_BYTES: Final = 8 << 20
"""Of pieces beyond 10 MiB ggml's RPC client asks the server by their hash first, which takes longer than to send them."""


def upload(
    model_file: ModelFile,
    infos: Sequence[TensorInfo],
    tensors: Mapping[str, int],
    backend: Backend,
    progress: Progress | None = None,
) -> None:
    """Copy the values of `infos` into `tensors` (by name), which have memory. At most two pieces are on the host at once.

    `progress` is told the stage `weights` with bytes done and in all. Raises `ModelError` when a file cannot be read.
    """
    piece_bytes = REMOTE_PIECE_BYTES if backend.name.startswith("rpc:") else PIECE_BYTES
    pieces = [(t, at, min(piece_bytes, t.nbytes - at)) for t in infos for at in range(0, t.nbytes, piece_bytes)]
    total, done = sum(size for _, _, size in pieces), 0
    with _staging(backend, piece_bytes) as halves, ThreadPoolExecutor(1) as reader:

        def fetch(index: int) -> npt.NDArray[np.uint8]:
            info, at, size = pieces[index]
            half = halves[index % 2][:size]
            model_file.read_into(info, half, at)
            return half

        coming = reader.submit(fetch, 0) if pieces else None
        for index, (info, at, size) in enumerate(pieces):
            if coming is None:
                break
            half = coming.result()
            coming = reader.submit(fetch, index + 1) if index + 1 < len(pieces) else None
            api.ggml_backend_tensor_set(tensors[info.name], half.ctypes.data, at, size)
            done += size
            if progress:
                progress("weights", done, total)


@contextmanager
def _staging(backend: Backend, size: int) -> Iterator[list[npt.NDArray[np.uint8]]]:
    """Two pieces of host memory, locked where the device has such (it then copies at the bus's full speed)."""
    host_type = api.ggml_backend_dev_host_buffer_type(backend.device)
    if not host_type:
        yield [np.empty(size, np.uint8) for _ in range(2)]
        return
    with BackendBuffer.of_size(host_type, 2 * size) as buffer:
        both = memory_at(buffer.base, 2 * size)
        yield [both[:size], both[size:]]
