# mypy: disable-error-code="empty-body"
"""Which kernels the ops of this thread really take (ggml-luce-path.h), for the self-test."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from pyluce.native.declare import Str, function

T = TypeVar("T")
BASE = "ggml-base"


@function(BASE)
def ggml_luce_paths_start() -> None: ...
@function(BASE)
def ggml_luce_paths_stop() -> Str: ...
@function(BASE)
def ggml_luce_path(what: Str) -> None: ...


def watch_paths(work: Callable[[], T]) -> tuple[T, tuple[str, ...]]:
    """What `work` returns, and the distinct kernels that this thread ran or launched meanwhile, in order.

    A CPU with several threads: those of the calling one. Not to be nested.
    """
    ggml_luce_paths_start()
    try:
        result = work()
    finally:
        text = ggml_luce_paths_stop().decode()
    return result, tuple(text.split(", ")) if text else ()
