"""pyluce: run Qwen3.8-Flash-Next (`qwen4exp`) models with ggml as the device and Python as the engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyluce.luce import Completion, Luce

__all__ = ["Completion", "Luce", "__version__"]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # loaded at first use, so that build tools can import pyluce.native.stamp without numpy and jinja2
    if name in ("Completion", "Luce"):
        from pyluce import luce

        return getattr(luce, name)
    raise AttributeError(f"module 'pyluce' has no attribute {name!r}")
