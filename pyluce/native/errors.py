"""Exceptions of the native layer. Each says what was expected, what was found and what to do."""

from __future__ import annotations


class NativeError(RuntimeError):
    """A native call failed: NULL from a constructor, a failed status, a library that cannot be used.

    ``log_tail`` holds the last lines of the native log, newest last; they are part of the message too.
    """

    def __init__(self, message: str, log_tail: list[str] | None = None) -> None:
        self.log_tail: list[str] = list(log_tail or [])
        if self.log_tail:
            message += "\nLast lines of the native log:\n" + "\n".join(f"  {line}" for line in self.log_tail)
        super().__init__(message)


class LibraryMismatchError(NativeError):
    """The library was built from another source pin or other patches than this project tree has."""


class UnsupportedOpError(NativeError):
    """The device does not compute this op for these types and shapes, by its own word."""


class DeviceLostError(NativeError):
    """The connection to a device broke: what was on it is gone, and the step that needed it failed."""


class ClosedError(RuntimeError):
    """A native handle was used after ``close()``."""


class WrongThreadError(RuntimeError):
    """A native handle was used from a thread that does not own it."""


class ForkedError(RuntimeError):
    """A native handle was used in a process forked from the one that made it."""
