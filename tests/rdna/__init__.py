"""An interpreter of AMD code objects (RDNA3.5 and RDNA4, wave32), for tests on machines without such a GPU.

``CodeObject.load`` reads what the HIP compiler wrote, ``Memory`` holds the buffers, ``run`` executes one dispatch:

    kernel = CodeObject.load("kernels.gfx1151.co").find("rms_norm")
    memory = Memory()
    x = memory.alloc(np.arange(256, dtype=np.float32), "x")
    stats = run(kernel, memory, grid=(1, 1, 1), block=(256, 1, 1), args=[x, 256])
    memory.read(x, np.float32, 256)

Encodings and meanings come from the tables in PyPI's tinygrad. What is exact, what is within the accuracy that AMD
documents, and what stops a run is said in ``arithmetic`` and ``dispatch``.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "CodeObject": "codeobject",
    "Kernel": "codeobject",
    "Memory": "memory",
    "OutOfBounds": "errors",
    "RaceError": "errors",
    "RdnaError": "errors",
    "Stats": "stats",
    "UnknownInstruction": "errors",
    "run": "dispatch",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    """Loaded when used: the tests are collected without the packages that reading code objects needs."""
    if name not in _HOMES:
        raise AttributeError(name)
    return getattr(importlib.import_module(f"tests.rdna.{_HOMES[name]}"), name)
