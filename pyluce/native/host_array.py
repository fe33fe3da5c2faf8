"""Memory of a device's host buffer type as an array that owns it: freed when nobody holds the array or a view of it any more."""

from __future__ import annotations

import weakref
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from pyluce.native import ggml_backend as api
from pyluce.native import log
from pyluce.native.errors import NativeError
from pyluce.native.thread import ThreadGuard


class _Memory:
    """What an array is made of; numpy holds it for as long as it holds the array.

    No `Owner`: closing one frees its memory, and so does the exit hook, whoever still reads it.
    """

    def __init__(self, pointer: int, n_bytes: int) -> None:
        self.__array_interface__: Final[dict[str, Any]] = {
            "version": 3,
            "shape": (n_bytes,),
            "typestr": "|u1",
            "data": (api.ggml_backend_buffer_get_base(pointer), False),
        }
        weakref.finalize(self, _free, ThreadGuard("host memory"), pointer).atexit = False


def host_array(buffer_type: int, n_bytes: int) -> NDArray[np.uint8]:
    """Memory of a host `buffer_type`, uint8 [n_bytes], not initialised. Raises NativeError when it cannot be had.

    It may be dropped on any thread. In a forked child it must not be read: page-locked memory need not be there.
    """
    pointer = api.ggml_backend_buft_alloc_buffer(buffer_type, n_bytes)
    if not pointer:
        raise NativeError(f"expected {n_bytes} bytes of host memory, found that they cannot be had", log.take())
    array: NDArray[np.uint8] = np.asarray(_Memory(pointer, n_bytes))
    return array


def _free(guard: ThreadGuard, pointer: int) -> None:
    if not guard.forked:
        api.ggml_backend_buffer_free(pointer)
