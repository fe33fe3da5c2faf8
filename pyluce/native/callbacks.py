"""Python functions that C calls. Nothing that they raise crosses into C, and they live as long as C may call them.

An exception inside a callback is noted in the native log and the callback returns its default. KeyboardInterrupt and
SystemExit are kept as well and raised by ``raise_pending`` once the native call is over, so that Ctrl-C is not lost.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import os
import traceback
from collections.abc import Callable
from typing import Any

from pyluce.native import ggml, llama, log
from pyluce.native.structs import FATAL_CALLBACK, LOG_CALLBACK

_pending: list[BaseException] = []


def guarded(prototype: Any, function: Callable[..., Any], *, default: Any, what: str) -> Any:
    """A ctypes callback of ``prototype`` that calls ``function``. The caller keeps it for as long as C has it."""

    def call(*args: Any) -> Any:
        try:
            return function(*args)
        except BaseException as error:
            with contextlib.suppress(BaseException):
                _keep(error, what)
            return default

    return prototype(call)


def raise_pending() -> None:
    """Raise a KeyboardInterrupt or SystemExit that a callback caught during the native call that just ended."""
    if _pending:
        error = _pending.pop()
        _pending.clear()
        raise error


def _keep(error: BaseException, what: str) -> None:
    if isinstance(error, KeyboardInterrupt | SystemExit):
        _pending.append(error)
        return
    origin = traceback.extract_tb(error.__traceback__)[-1]
    log.note(f"the {what} callback raised {type(error).__name__}: {error} ({origin.filename}:{origin.lineno})")


def _fatal(message: bytes | None) -> None:
    lines = [*log.tail(), "native code stopped the process: " + (message or b"").decode("utf-8", "replace")]
    os.write(2, ("\n".join(lines) + "\n").encode("utf-8", "replace"))
    faulthandler.dump_traceback(2)


log_callback = guarded(LOG_CALLBACK, log.receive, default=None, what="log")
fatal_callback = guarded(FATAL_CALLBACK, _fatal, default=None, what="fatal error")

_uninstall: list[Callable[[], Any]] = []


def install() -> None:
    """Give the log and fatal-error callbacks to the loaded libraries, until the interpreter exits."""
    llama.llama_log_set(log_callback, None)
    ggml.ggml_set_abort_callback(fatal_callback)
    _uninstall[:] = [lambda: llama.llama_log_set(None, None), lambda: ggml.ggml_set_abort_callback(None)]


@atexit.register
def _give_back() -> None:
    """Runs after ``owner.close_all`` (exit hooks run last registered first, and owner.py imports this module)."""
    while _uninstall:
        _uninstall.pop()()
