"""The C library's heap."""

from __future__ import annotations

import ctypes


def trim_heap() -> None:
    """Give free memory back to the system, where the C library can (glibc); elsewhere it does so by itself, or never."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim.argtypes, trim.restype = [ctypes.c_size_t], ctypes.c_int
        trim(0)
