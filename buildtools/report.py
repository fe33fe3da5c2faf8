"""What the build says while it works: one line that updates on a terminal, plain lines in a pipe."""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path
from typing import TextIO

PIPE_INTERVAL_S = 15.0


class BuildError(Exception):
    """A step of the build failed; the message says what was expected, what was found and what to do."""


class Report:
    """Prints finished steps as lines, and the step at work as one line that is overwritten on a terminal."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self.stream = stream or sys.stdout
        self.live = self.stream.isatty()
        self._last_plain_s = 0.0

    def line(self, text: str) -> None:
        """Print a line that stays."""
        self._clear()
        print(text, file=self.stream, flush=True)
        self._last_plain_s = time.monotonic()

    def progress(self, text: str, *, last: bool = False) -> None:
        """Show where a long step stands. In a pipe, a line at most every 15 seconds, and the last one."""
        if self.live:
            self._clear()
            width = shutil.get_terminal_size().columns - 1
            self.stream.write(text[:width])
            self.stream.flush()
        elif last or time.monotonic() - self._last_plain_s > PIPE_INTERVAL_S:
            self.line(text)

    def _clear(self) -> None:
        if self.live:
            self.stream.write("\r\x1b[2K")
            self.stream.flush()


def log_tail(path: Path, lines: int = 30) -> str:
    """The last lines of a log file, indented."""
    text = path.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join("    " + line for line in text[-lines:])
