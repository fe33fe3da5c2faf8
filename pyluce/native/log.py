"""The native log: captured in a ring, forwarded to Python's logging, its tail attached to NativeError.

Lines go to the logger ``pyluce.native`` (silent unless the program configures logging); the ring keeps the last lines
of level INFO and above. The C callback that calls ``receive`` is in ``callbacks.py``.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque

from pyluce.native.structs import GGMLLogLevel

RING_LINES = 400
TAIL_LINES = 20

logger = logging.getLogger("pyluce.native")
logger.addHandler(logging.NullHandler())

_LEVELS: dict[int, int] = {
    GGMLLogLevel.DEBUG: logging.DEBUG,
    GGMLLogLevel.INFO: logging.INFO,
    GGMLLogLevel.WARN: logging.WARNING,
    GGMLLogLevel.ERROR: logging.ERROR,
}


class LogRing:
    """The last complete lines of the log, assembled from the pieces that C passes. Safe from any thread."""

    def __init__(self, max_lines: int = RING_LINES) -> None:
        self._lines: deque[str] = deque(maxlen=max_lines)
        self._open = ""
        self._level: int = GGMLLogLevel.INFO
        self._untaken = 0
        self._lock = threading.RLock()

    def add(self, level: int, text: str) -> list[tuple[int, str]]:
        """Take one piece of text; return the (level, line) pairs that it completed."""
        with self._lock:
            if level != GGMLLogLevel.CONT:
                self._level = level
            pieces = (self._open + text).split("\n")
            self._open = pieces.pop()
            done = [(self._level, line.rstrip()) for line in pieces if line.strip()]
            kept = [line for line_level, line in done if line_level != GGMLLogLevel.DEBUG]
            self._lines.extend(kept)
            self._untaken += len(kept)
            return done

    def tail(self, n_lines: int = TAIL_LINES) -> list[str]:
        """The last lines, newest last, an unfinished line included."""
        with self._lock:
            lines = [*self._lines, self._open] if self._open.strip() else list(self._lines)
            return lines[-n_lines:] if n_lines > 0 else []

    def take(self, n_lines: int = TAIL_LINES) -> list[str]:
        """Like tail, without the lines that an earlier take saw: a line explains one failure."""
        with self._lock:
            lines = self.tail(min(n_lines, self._untaken + bool(self._open.strip())))
            self._untaken = 0
            return lines

    def new_lock(self) -> None:
        """In a forked child: the thread that held the lock, if any, is not there to release it."""
        self._lock = threading.RLock()

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._lines.clear()
            self._open = ""
            self._untaken = 0


ring = LogRing()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=ring.new_lock)


def tail(n_lines: int = TAIL_LINES) -> list[str]:
    """The last lines of the native log, newest last."""
    return ring.tail(n_lines)


def take(n_lines: int = TAIL_LINES) -> list[str]:
    """The last lines that no earlier failure took, newest last: for a NativeError."""
    return ring.take(n_lines)


def receive(level: int, text: bytes | None, user_data: int | None) -> None:
    """What the log callback does with a piece of text from C."""
    for line_level, line in ring.add(level, (text or b"").decode("utf-8", "replace")):
        logger.log(_LEVELS.get(line_level, logging.INFO), "%s", line)


def note(line: str) -> None:
    """Add an error line of our own, where the native log is read."""
    for text in ring.add(GGMLLogLevel.ERROR, line + "\n"):
        logger.error("%s", text[1])
