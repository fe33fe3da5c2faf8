"""The C library's heap."""

from __future__ import annotations

import ctypes
from typing import Final

_M_TRIM_THRESHOLD: Final = -1
_SMALL: Final = 128 << 10
_LARGE: Final = 64 << 20
_PROBE: Final = 96 << 10


def trim_heap() -> None:
    """Give the memory back to the system that the C library keeps though it is free, where it can be told to (glibc).

    `malloc_trim` leaves the end of the heaps of threads alone. Those are cut when a block is freed there and the end is longer than a
    threshold, so that is lowered for one such block of the calling thread.
    """
    library = ctypes.CDLL(None)
    if not all(hasattr(library, name) for name in ("malloc_trim", "mallopt")):
        return
    library.malloc.argtypes, library.malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
    library.free.argtypes, library.free.restype = [ctypes.c_void_p], None
    library.mallopt.argtypes, library.mallopt.restype = [ctypes.c_int, ctypes.c_int], ctypes.c_int
    library.malloc_trim.argtypes, library.malloc_trim.restype = [ctypes.c_size_t], ctypes.c_int
    library.mallopt(_M_TRIM_THRESHOLD, _SMALL)
    library.free(library.malloc(_PROBE))
    library.malloc_trim(0)
    library.mallopt(_M_TRIM_THRESHOLD, _LARGE)
