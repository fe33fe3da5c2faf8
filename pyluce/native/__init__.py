"""The ctypes binding of the patched ggml, gguf and llama libraries: typed declarations and checked owners."""

from __future__ import annotations

from pyluce.native.errors import ClosedError, ForkedError, LibraryMismatchError, NativeError, WrongThreadError
from pyluce.native.library import Libraries, load_libraries
from pyluce.native.thread import ThreadGuard, owned_by_thread

__all__ = [
    "ClosedError",
    "ForkedError",
    "Libraries",
    "LibraryMismatchError",
    "NativeError",
    "ThreadGuard",
    "WrongThreadError",
    "load_libraries",
    "owned_by_thread",
]
