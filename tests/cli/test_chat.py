"""`luce chat` and `luce props` against a server of the echo model, which answers with the last message."""

from __future__ import annotations

import io
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from cli.main import main
from pyluce.luce import Luce
from pyluce.options import LoadOptions
from pyluce.server import LuceServer
from tests.support.echo_service import Echo, echo_server
from tests.support.serving import ROOT, environment

Outcome = tuple[int, str, str]
Run = Callable[..., Outcome]
Server = tuple[LuceServer, Luce, Echo]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with echo_server(LoadOptions(max_ctx=2048, max_concurrency=2), api_key="secret") as parts:
        yield parts


@pytest.fixture
def run(server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command against the server; lines of standard input are its messages."""

    def call(
        *arguments: str, lines: tuple[str, ...] = (), key: str | None = "secret", url: str | None = None
    ) -> Outcome:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("".join(f"{line}\n" for line in lines).encode())))
        monkeypatch.setenv("LUCE_URL", url or server[0].url)
        if key is None:
            monkeypatch.delenv("LUCE_API_KEY", raising=False)
        else:
            monkeypatch.setenv("LUCE_API_KEY", key)
        code = main(arguments)
        out, err = capsys.readouterr()
        return code, out, err

    return call


def test_props_are_json(run: Run) -> None:
    code, out, err = run("props")
    assert (code, err) == (0, "")
    props = json.loads(out)
    assert props["server"]["props_schema"] == 2
    assert out.startswith('{\n  "default_generation_settings"')
    assert run("props", key=None)[0] == 0, "props need no key"


def test_no_server_there(run: Run) -> None:
    for command in ("props", "chat"):
        code, out, err = run(command, url="http://127.0.0.1:9", lines=("hi",))
        assert (code, out) == (1, "")
        assert "http://127.0.0.1:9: no server answers there; start one with `luce run`" in err
    code, _, err = run("props", "--url", "nonsense")
    assert code == 1
    assert "nonsense" in err


def test_a_conversation_from_a_pipe(run: Run, server: Server) -> None:
    def prompt_tokens() -> int:
        return server[1].stats().prompt_tokens_total

    begin = prompt_tokens()
    code, out, err = run("chat", "--max-tokens", "50", lines=("why</think>one é 🦙", "", "</think>two"))
    assert (code, out, err) == (0, "one é 🦙\ntwo\n", "")
    both = prompt_tokens() - begin
    code, out, _ = run("chat", lines=("why</think>one é 🦙", "/reset", "</think>two", "/quit", "</think>three"))
    assert (code, out) == (0, "one é 🦙\ntwo\n")
    assert prompt_tokens() - begin - both < both, "after /reset the first turn is not part of the prompt"


def test_commands_and_lines(run: Run) -> None:
    code, out, err = run(
        "chat", "--show-thinking", lines=("hm</think>\\", "a\\", "b", "/system Be brief.", "/system", "/help", "/x")
    )
    assert (code, out) == (0, "hm\n\na\nb\n")
    assert "system message set\nno system message\n" in err
    assert "forget the conversation" in err
    assert "/x: no such command" in err


def test_what_the_server_refuses(run: Run) -> None:
    code, out, err = run("chat", lines=("</think>x",), key="wrong")
    assert (code, out) == (1, "")
    assert "API key" in err
    code, _, err = run("chat", "--max-tokens", "100000", lines=("</think>x",))
    assert code == 1
    assert "100000" in err
    code, _, err = run("chat", lines=("NAN</think>x",))
    assert code == 1
    assert "Traceback" not in err


def test_what_a_model_says_does_not_steer_the_terminal(server: Server) -> None:
    with Terminal(server[0].url) as terminal:
        terminal.say("</think>\x1b]0;title\x07")
        terminal.wait_for(re.escape("\\x1b]0;title\\x07"))
        assert "\x1b]0;title" not in terminal.shown.split("> ")[-1]


def test_ctrl_c_stops_an_answer_and_ctrl_d_ends(server: Server) -> None:
    luce = server[1]
    with Terminal(server[0].url) as terminal:
        terminal.say("</think>LONG SLOW ")
        terminal.wait_for("(LONG SLOW</think>){3}")
        terminal.interrupt_until(r"\(stopped\)")
        deadline = time.monotonic() + 20
        while luce.stats().busy_slots:
            assert time.monotonic() < deadline, "the slot stays busy"
            time.sleep(0.01)
        terminal.say("</think>next one")
        terminal.wait_for(r"next one\r\n> ")
        terminal.interrupt_until(r"\(Ctrl-D ends\)\r\n> $")
        terminal.write("\x04")
        assert terminal.process.wait(30) == 0


class Terminal:
    """`luce chat` on a terminal."""

    def __init__(self, url: str) -> None:
        import pty

        self._controller, terminal = pty.openpty()
        self.shown = ""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "cli.main", "chat", "--url", url, "--api-key", "secret"],
            env=environment(TERM="dumb"), cwd=ROOT, stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=True,
        )  # fmt: skip
        os.close(terminal)

    def write(self, text: str) -> None:
        os.write(self._controller, text.encode())

    def say(self, text: str) -> None:
        self.wait_for("> $")
        self.shown = ""
        self.write(
            f"{text}\n" if "\x1b" not in text else "".join(f"\x16{c}" if ord(c) < 32 else c for c in text) + "\n"
        )

    def interrupt_until(self, pattern: str) -> None:
        """Press Ctrl-C, again after a second: one that comes between a prompt and its read shows at the next key only."""
        deadline = time.monotonic() + 60
        pressed = 0.0
        while not re.search(pattern, self.shown):
            assert time.monotonic() < deadline, f"pressed in vain for {pattern}: {self.shown[-2000:]!r}"
            if time.monotonic() - pressed > 1.0:
                pressed = time.monotonic()
                self.process.send_signal(signal.SIGINT)
            if select.select([self._controller], [], [], 0.1)[0]:
                self.shown += os.read(self._controller, 65536).decode(errors="replace")

    def wait_for(self, pattern: str) -> None:
        deadline = time.monotonic() + 60
        while not re.search(pattern, self.shown):
            assert time.monotonic() < deadline, f"waited in vain for {pattern}: {self.shown[-2000:]!r}"
            if select.select([self._controller], [], [], 0.1)[0]:
                self.shown += os.read(self._controller, 65536).decode(errors="replace")

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: Any) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._controller)
