"""What the commands print: an answer as it comes, progress while a model loads. Rich on a terminal, plain lines in a pipe."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

PLAIN_INTERVAL_S = 5.0

# what a model writes must not steer the terminal: carriage returns vanish, other control characters are made visible
_VISIBLE_CONTROLS: dict[int, str] = {
    **{code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n"},
    ord("\r"): "",
}


class AnswerPrinter:
    """Writes an answer to standard output as it is generated. On a terminal the reasoning is dim."""

    def __init__(self, show_reasoning: bool, stream: TextIO | None = None) -> None:
        self._stream = stream if stream is not None else sys.stdout
        self._console = Console(file=self._stream, highlight=False) if self._stream.isatty() else None
        self._show_reasoning = show_reasoning
        self._last = "\n"
        self._reasoned = False

    def write(self, content: str, reasoning: str) -> None:
        """Show new text of both channels."""
        if reasoning and self._show_reasoning:
            self._put(reasoning, "dim")
            self._reasoned = True
        if content:
            if self._reasoned:
                self._put("\n" if self._last == "\n" else "\n\n", "")
                self._reasoned = False
            self._put(content, "")

    def end(self) -> None:
        """The answer is over: leave the cursor at the beginning of a line."""
        if self._last != "\n":
            self._put("\n", "")

    def _put(self, text: str, style: str) -> None:
        self._last = text[-1]
        if self._console is not None:
            self._console.out(text.translate(_VISIBLE_CONTROLS), end="", style=style or None, highlight=False)
        else:
            self._stream.write(text)
        self._stream.flush()


class LoadProgress:
    """Shows how far loading is, on standard error. Called from the engine's thread with (stage, done, total)."""

    def __init__(self, quiet: bool, stream: TextIO | None = None) -> None:
        self._stream = stream if stream is not None else sys.stderr
        self._quiet = quiet
        self._bars: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._said: dict[str, float] = {}
        if not quiet and self._stream.isatty():
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.percentage:>3.0f} %"),
                TimeElapsedColumn(),
            )
            self._bars = Progress(*columns, console=Console(file=self._stream), transient=True)

    def __call__(self, stage: str, done: int, total: int, /) -> None:
        if self._quiet:
            return
        if self._bars is not None:
            task = self._tasks.get(stage)
            if task is None:
                task = self._tasks[stage] = self._bars.add_task(f"load: {stage}", total=max(total, 1))
            self._bars.update(task, completed=done, total=max(total, 1))
            return
        now = time.monotonic()
        if stage not in self._said:
            print(f"load: {stage}", file=self._stream, flush=True)
        elif now - self._said[stage] >= PLAIN_INTERVAL_S:
            print(f"load: {stage} {100 * done // max(total, 1)} %", file=self._stream, flush=True)
        else:
            return
        self._said[stage] = now

    def __enter__(self) -> LoadProgress:
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bars is not None:
            self._bars.stop()
