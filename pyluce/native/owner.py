"""Owners of native pointers: closed once, children first, by the owning thread; never in ``__del__``.

Every owner has a ``Handle``, which knows the address, how to free it and the handles that must go first. The owner
object refers to its handle, not the other way round, so an owner that is dropped without ``close()`` (or lost in a
cycle) is freed by a weak-reference finalizer in the right order, and what is still open when the interpreter exits is
freed by one exit hook, newest first.
"""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar

from pyluce.native import callbacks, log
from pyluce.native.errors import ClosedError, NativeError
from pyluce.native.thread import ThreadGuard

T = TypeVar("T", bound="Owner")

_roots: dict[Handle, None] = {}


class Handle:
    """A native address, the function that frees it and the handles that are freed before it."""

    __slots__ = ("_children", "_free", "keep", "_parent", "address", "guard")

    def __init__(
        self, guard: ThreadGuard, address: int, free: Callable[[int], Any], parent: Handle | None, keep: Any
    ) -> None:
        self.guard = guard
        self.address: int | None = address
        self._free = free
        self._parent = parent
        self.keep = keep
        self._children: dict[Handle, None] = {}
        (_roots if parent is None else parent._children)[self] = None

    def release(self) -> None:
        """Free the children, newest first, then this, once. In a forked child nothing is freed."""
        if self.address is None:
            return
        for child in reversed(list(self._children)):
            child.release()
        address, self.address = self.address, None
        (_roots if self._parent is None else self._parent._children).pop(self, None)
        try:
            if not self.guard.forked:
                self._free(address)
        finally:
            self.keep = self._parent = None


class Owner:
    """Base of the owners. Subclasses call ``_own`` with what a native constructor returned."""

    _handle: Handle | None = None
    _parent: Owner | None = None

    def __init__(self) -> None:
        self.thread_guard = ThreadGuard(type(self).__name__)

    def _own(
        self,
        constructor: str,
        address: int | None,
        free: Callable[[int], Any],
        *,
        parent: Owner | None = None,
        keep: Any = None,
        failure: str = "",
    ) -> int:
        """Take over ``address``; NULL raises NativeError naming the constructor, with the tail of the native log.

        ``parent``: the owner that must stay open longer; ``keep``: Python objects whose memory C uses until the free;
        ``failure``: what NULL means, for the message. An interrupt inside a callback of the constructor is raised here.
        """
        if not address:
            callbacks.raise_pending()
            reason = f": {failure}" if failure else ""
            raise NativeError(f"{constructor} returned NULL for {type(self).__name__}{reason}", log.take())
        self._parent = parent
        self._handle = Handle(self.thread_guard, address, free, parent._handle if parent is not None else None, keep)
        weakref.finalize(self, self._handle.release).atexit = False
        try:
            callbacks.raise_pending()
        except BaseException:
            self.close()
            raise
        return address

    def _keep_alive(self, kept: Any) -> None:
        """Hold a Python object (a callback) in place of the one held before, until the native object is freed."""
        if self._handle is not None:
            self._handle.keep = kept

    @property
    def ptr(self) -> int:
        """The native address. Raises ClosedError after close(), WrongThreadError, ForkedError."""
        self.thread_guard.check()
        handle = self._handle
        if handle is None or handle.address is None:
            raise ClosedError(f"{type(self).__name__} was used after close()")
        return handle.address

    @property
    def closed(self) -> bool:
        """Whether the native object is gone."""
        return self._handle is None or self._handle.address is None

    def close(self) -> None:
        """Free the native object and what depends on it. Closing twice is fine; another thread's handle is refused."""
        if self._handle is not None and self._handle.address is not None:
            if not self.thread_guard.forked:
                self.thread_guard.check_close()
            self._handle.release()

    def __enter__(self: T) -> T:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def close_all() -> None:
    """Free everything that is still open, newest first; what a running foreign thread may be using is left alone."""
    for handle in reversed(list(_roots)):
        if handle.guard.is_owner or not handle.guard.owner_is_alive:
            handle.release()


atexit.register(close_all)  # runs before the exit hook of callbacks.py, which was registered earlier
