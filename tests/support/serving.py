"""`luce run` as a process that serves the echo model."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 60.0
_CONTROLS = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


def environment(**more: str) -> dict[str, str]:
    """This environment without settings of luce, and with the echo model."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("LUCE_") and name != "NO_COLOR"}
    return {**kept, "LUCE_FAKE_ECHO": "1", "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "40", **more}


def command(*arguments: str) -> list[str]:
    """The luce command over the fake model."""
    return [sys.executable, "-m", "tests.support.fake_cli", *arguments]


class ServingProcess:
    """A running server and what it has shown."""

    def __init__(self, process: subprocess.Popen[bytes], url: str, shown: str = "", terminal: int = -1) -> None:
        self.process = process
        self.url = url
        self.shown = shown
        self._terminal = terminal

    def interrupt(self) -> None:
        """Ctrl-C."""
        self.process.send_signal(signal.SIGINT)

    def end(self) -> int:
        """Wait for its end and return the exit code."""
        if self._terminal >= 0:
            self.read_until(None)
            return self.process.wait(WAIT_S)
        _, errors = self.process.communicate(timeout=WAIT_S)
        self.shown += errors.decode()
        return self.process.returncode

    def read_until(self, pattern: str | None) -> str:
        """Read the terminal until `pattern` was shown, or until the process ends."""
        deadline = time.monotonic() + WAIT_S
        while pattern is None or not re.search(pattern, plain(self.shown)):
            assert time.monotonic() < deadline, f"waited in vain for {pattern}:\n{plain(self.shown)[-2000:]}"
            if select.select([self._terminal], [], [], 0.1)[0]:
                try:
                    piece = os.read(self._terminal, 65536)
                except OSError:
                    piece = b""
                if not piece:
                    assert pattern is None, f"ended before {pattern}:\n{plain(self.shown)[-2000:]}"
                    break
                self.shown += piece.decode(errors="replace")
            elif self.process.poll() is not None and pattern is None:
                break
        return plain(self.shown)


def plain(text: str) -> str:
    """Without escape sequences."""
    return _CONTROLS.sub("", text)


@contextmanager
def serving(*arguments: str, **variables: str) -> Iterator[ServingProcess]:
    """`luce run ARGUMENTS` on a free port, with pipes."""
    process = subprocess.Popen(
        command("run", "--port", "0", *arguments),
        env=environment(**variables), cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        ready = process.stdout.readline().decode()
        assert ready.startswith("ready: "), process.communicate()[1].decode()
        yield ServingProcess(process, ready.removeprefix("ready: ").strip())
    finally:
        _end(process)


@contextmanager
def serving_on_terminal(*arguments: str) -> Iterator[ServingProcess]:
    """The same on a terminal of 100 columns and 40 lines."""
    controller, terminal = pty.openpty()
    process = subprocess.Popen(
        command("run", "--port", "0", *arguments),
        env=environment(), cwd=ROOT, stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=True,
    )  # fmt: skip
    os.close(terminal)
    server = ServingProcess(process, "", terminal=controller)
    try:
        found = re.search(r"http://[\d.]+:\d+", server.read_until(r"http://[\d.]+:\d+ "))
        assert found
        server.url = found[0]
        yield server
    finally:
        _end(process)
        os.close(controller)


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.kill()
        process.wait()
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()
