"""What a serving `luce run` shows: a live panel on a terminal, plain lines in a pipe. Both say what the status page says."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from rich.console import Console
from rich.live import Live
from rich.logging import RichHandler

from cli.panel import StatusPanel
from pyluce.server import LuceServer
from pyluce.server.context import AppContext
from pyluce.server.routes.server_state import status

PLAIN_INTERVAL_S = 10.0
REFRESH_PER_S = 4.0
_LOGGERS = ("pyluce", "uvicorn.error")


@contextmanager
def watching(server: LuceServer, context: AppContext, *, quiet: bool, stream: TextIO | None = None) -> Iterator[None]:
    """While the block runs: the server's URL on standard output, then what it does, on the terminal or on standard error."""
    stream = stream if stream is not None else sys.stdout
    if stream.isatty() and not quiet:
        with _panel(server, context, stream):
            yield
        return
    print(f"ready: {server.url}", file=stream, flush=True)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    ended = threading.Event()
    teller = threading.Thread(target=_tell, args=(context, ended), name="luce-status", daemon=True)
    with _logging_to(handler, logging.WARNING if quiet else logging.INFO):
        if not quiet:
            teller.start()
        try:
            yield
        finally:
            ended.set()
            if not quiet:
                teller.join()
                log.info("stopped: %s", plain_line(status(context)))


log = logging.getLogger("pyluce.status")


def plain_line(shown: dict[str, Any]) -> str:
    """One line of the status."""
    busy = sum(slot["state"] != "free" for slot in shown["slots"])
    rates = shown["rates"]
    answered = sum(shown["totals"]["requests"].values())
    return (
        f"{busy} of {len(shown['slots'])} slots busy, {shown['queue']['length']} waiting, {answered} answered, "
        f"{rates['generated_tokens_per_second']:.1f} tok/s generated, {rates['prompt_tokens_per_second']:.1f} prompt"
    )


def _tell(context: AppContext, ended: threading.Event) -> None:
    """A line now and then, while something happens."""
    before = None
    while not ended.wait(PLAIN_INTERVAL_S):
        shown = status(context)
        work = (shown["totals"], shown["queue"]["length"])
        if work != before and before is not None:
            log.info("%s", plain_line(shown))
        before = work


@contextmanager
def _panel(server: LuceServer, context: AppContext, stream: TextIO) -> Iterator[None]:
    console = Console(file=stream)
    panel = StatusPanel(server.url)
    history: deque[float] = deque(maxlen=240)
    last = 0.0

    def draw() -> Any:
        nonlocal last
        shown = status(context)
        if time.monotonic() - last >= 0.5:
            last = time.monotonic()
            history.append(shown["rates"]["generated_tokens_per_second"])
        return panel.render(shown, history, console.size, stopping=server.should_exit)

    handler = RichHandler(console=console, show_path=False, markup=False)
    with (
        _logging_to(handler, logging.WARNING),
        Live(console=console, get_renderable=draw, refresh_per_second=REFRESH_PER_S, vertical_overflow="crop"),
    ):
        yield


@contextmanager
def _logging_to(handler: logging.Handler, level: int) -> Iterator[None]:
    """The server's own log goes to `handler`, and nothing of it elsewhere."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    before = [(logger.level, logger.propagate) for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(level if logger.name == "pyluce" else logging.ERROR)
        logger.propagate = False
    try:
        yield
    finally:
        for logger, (old_level, propagate) in zip(loggers, before, strict=True):
            logger.removeHandler(handler)
            logger.setLevel(old_level)
            logger.propagate = propagate
