"""One thread owns a native handle. Using it from another thread, or in a forked child, is a Python error."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from pyluce.native.errors import ForkedError, WrongThreadError

P = ParamSpec("P")
R = TypeVar("R")

_generation = 0


def _after_fork_in_child() -> None:
    global _generation
    _generation += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


class ThreadGuard:
    """Remembers the thread and the process that made a handle."""

    __slots__ = ("_generation", "_ident", "_thread", "what")

    def __init__(self, what: str) -> None:
        self.what = what
        self._thread = threading.current_thread()
        self._ident = threading.get_ident()
        self._generation = _generation

    def check(self) -> None:
        """Raise WrongThreadError or ForkedError unless the calling thread owns the handle."""
        if self._generation != _generation:
            raise ForkedError(
                f"{self.what} was made in the parent process; native handles do not survive a fork. "
                "Load the model in the child, or start it with the 'spawn' method"
            )
        if threading.get_ident() != self._ident:
            raise WrongThreadError(
                f"{self.what} belongs to the thread {self._thread.name!r}, it was used from "
                f"{threading.current_thread().name!r}; pass the work to the owning thread through a queue"
            )

    def check_close(self) -> None:
        """Like check, but another thread may close what a finished thread left open."""
        if self.owner_is_alive:
            self.check()

    @property
    def forked(self) -> bool:
        """Whether this process is a fork of the one that made the handle."""
        return self._generation != _generation

    @property
    def owner_is_alive(self) -> bool:
        """Whether the owning thread still runs."""
        return self._thread.is_alive()

    @property
    def is_owner(self) -> bool:
        """Whether the calling thread may use the handle."""
        return not self.forked and threading.get_ident() == self._ident


class HasThreadGuard(Protocol):
    """What ``owned_by_thread`` needs of an object."""

    thread_guard: ThreadGuard


S = TypeVar("S", bound=HasThreadGuard)


def owned_by_thread(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Make a method check first that its caller is the thread that made the object (its ``thread_guard``)."""

    @functools.wraps(method)
    def checked(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        self.thread_guard.check()
        return method(self, *args, **kwargs)

    return checked
