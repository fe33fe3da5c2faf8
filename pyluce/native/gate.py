"""A gate in a GPU's stream (``luce-gate.cu``): what is started behind it waits until the host opens it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, Final

from pyluce.native.backend import Backend
from pyluce.native.devices import parse_device
from pyluce.native.library import load_libraries
from pyluce.native.owner import Owner

PATIENCE_MS: Final = 50
"""After so long a gate that nobody opens opens by itself, so that nothing that waits for the stream waits longer."""


class StreamGate(Owner):
    """Made by ``for_backend``; used by the backend's thread, closed before it."""

    def __init__(self, pointer: int, backend: Backend, functions: dict[str, Callable[..., Any]]) -> None:
        super().__init__()
        self._shut, self._claim, self._open = (functions[name] for name in ("shut", "claim", "open"))
        self._own("ggml_luce_gate_new", pointer, functions["free"], parent=backend)

    @classmethod
    def for_backend(cls, backend: Backend) -> StreamGate | None:
        """A gate, open; None where there is none: on the CPU, on AMD, with a driver that lacks it."""
        kind = parse_device(backend.name)[0]
        if kind == "cpu":
            return None
        library = load_libraries(kind).handles[f"ggml-{kind}"]
        make = _function(library, "new", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int)
        functions = {
            "free": _function(library, "free", None, ctypes.c_void_p),
            "shut": _function(library, "shut", ctypes.c_bool, ctypes.c_void_p),
            "claim": _function(library, "claim", ctypes.c_bool, ctypes.c_void_p),
            "open": _function(library, "open", None, ctypes.c_void_p),
        }
        pointer = make(backend.ptr, PATIENCE_MS)
        return cls(pointer, backend, functions) if pointer else None

    def shut(self) -> bool:
        """What is started from now on waits. False, with nothing changed, when it is shut already or the driver refuses."""
        return bool(self._shut(self.ptr))

    def claim(self) -> bool:
        """It stays shut until ``open``. False: it has opened by itself."""
        return bool(self._claim(self.ptr))

    def open(self) -> None:
        """What waits goes on; nothing happens when it is open."""
        self._open(self.ptr)


def _function(library: ctypes.CDLL, name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
    found = getattr(library, f"ggml_luce_gate_{name}")
    found.restype, found.argtypes = result, list(arguments)
    return found  # type: ignore[no-any-return]
