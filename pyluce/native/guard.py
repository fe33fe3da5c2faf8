# mypy: disable-error-code="empty-body"
"""Mapped files that become shorter, or cannot be read, while they are in use (ggml-luce-guard.h)."""

from __future__ import annotations

from pyluce.native.declare import Bool, Int, OptPtr, Ptr, Size, function, quick

BASE = "ggml-base"


@function(BASE)
def ggml_luce_guard_add(base: Ptr, size: Size) -> Bool: ...
@function(BASE)
def ggml_luce_guard_remove(base: Ptr) -> None: ...
@quick(BASE)
def ggml_luce_guard_faults(base: OptPtr) -> Int: ...
