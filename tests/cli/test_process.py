"""The command as a process: a terminal, a pipe that closes, Ctrl-C."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-m", "tests.support.fake_cli", "run", "--prompt", "hi"]


def environment(answer: str, step_s: float = 0.0) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("LUCE_") and name != "NO_COLOR"}
    return {**kept, "LUCE_FAKE_ANSWER": answer, "LUCE_FAKE_STEP_S": str(step_s), "TERM": "xterm-256color"}


def run_on_terminal(answer: str, *arguments: str) -> tuple[int, str]:
    controller, terminal = pty.openpty()
    process = subprocess.Popen(
        [*COMMAND, *arguments],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        env=environment(answer),
        cwd=ROOT,
        close_fds=True,
    )
    os.close(terminal)
    shown = b""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if select.select([controller], [], [], 0.2)[0]:
            try:
                piece = os.read(controller, 65536)
            except OSError:
                break
            if not piece:
                break
            shown += piece
        elif process.poll() is not None:
            break
    os.close(controller)
    return process.wait(10), shown.decode()


def test_on_a_terminal_there_is_a_bar_and_reasoning_is_dim() -> None:
    code, shown = run_on_terminal("why</think>yes \x1b]0;title\x07 😀")
    assert code == 0
    assert "load: weights" in shown
    assert re.search(r"\x1b\[2mw\x1b\[0m", shown), "the reasoning is dim"
    assert "\x1b]0;" not in shown, "what a model writes must not steer the terminal"
    assert "\\x1b]0;title\\x07" in re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown)
    assert "😀" in shown


def test_in_a_pipe_everything_is_plain() -> None:
    done = subprocess.run(COMMAND, env=environment("why</think>yes 😀"), cwd=ROOT, capture_output=True, check=False)
    assert (done.returncode, done.stdout.decode()) == (0, "yes 😀\n")
    assert b"\x1b" not in done.stderr
    assert done.stderr.decode().splitlines()[0] == "load: weights"


def test_text_comes_as_it_is_generated() -> None:
    process = subprocess.Popen(
        [*COMMAND, "--raw", "-q"], env=environment("abcdefghij" * 10, 0.02), cwd=ROOT, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    first = os.read(process.stdout.fileno(), 100)
    assert 0 < len(first) < 100
    assert first + process.stdout.read() == b"abcdefghij" * 10 + b"\n"
    assert process.wait(30) == 0


def test_ctrl_c_ends_cleanly_with_130() -> None:
    process = subprocess.Popen(
        [*COMMAND, "--raw"],
        env=environment("x" * 100_000, 0.005),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert os.read(process.stdout.fileno(), 1) == b"x"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert err.decode().splitlines()[-1] == "interrupted"
    assert b"Traceback" not in err
    assert out.endswith(b"\n")


def test_a_reader_that_goes_away_is_not_a_traceback() -> None:
    process = subprocess.Popen(
        [*COMMAND, "--raw", "-q"],
        env=environment("line\n" * 2000, 0.001),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"line\n"
    process.stdout.close()
    assert process.stderr is not None
    err = process.stderr.read()
    assert process.wait(30) == 1
    assert err == b""
