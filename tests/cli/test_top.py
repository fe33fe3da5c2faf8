"""`luce top` against real servers: the plain form, the live view, and servers that are not there."""

from __future__ import annotations

import io
import os
import re
import select
import signal
import subprocess
import time
from pathlib import Path

import httpx
import pytest
from rich.console import Console

from cli.client import ServerClient
from cli.main import main
from cli.top import look, plain_lines, watch
from pyluce.luce import Luce
from pyluce.options import LoadOptions
from tests.support.echo_service import echo_server, running_server
from tests.support.serving import command, environment


def test_once(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = LoadOptions(max_ctx=256, threads=1, max_concurrency=2, prefix_cache_mib=16, idle_prefill=False)
    with Luce.load_with(tiny_model, options) as luce, running_server(luce, options) as server:
        body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}
        usage = httpx.post(server.url + "/v1/chat/completions", json=body, timeout=30).json()["usage"]
        assert main(["top", "--once", "--url", server.url]) == 0
        out, err = capsys.readouterr()
        kept = httpx.get(server.url + "/props").json()["memory"]["snapshots"]["count"]
    lines = dict(line.split(": ", 1) for line in out.splitlines())
    assert err == ""
    assert lines["slots"] == "0 of 2 busy; queue 0 of 256"
    assert lines["tokens"] == f"{usage['prompt_tokens']} in, 0 from the cache, {usage['completion_tokens']} out"
    assert re.fullmatch(
        r"cpu: weights \S+ MiB, cache \S+ MiB, snapshots \S+ [KM]iB, workspaces \S+ MiB, free \S+ GiB", lines["memory"]
    )
    assert lines["kept"].startswith(f"{kept} prompts in ")
    assert lines["kept"].endswith(f"of 16.0 MiB, the longest of {usage['prompt_tokens']} tokens")
    assert re.fullmatch(r"\S+ [MG]iB resident, at most \S+ [MG]iB", lines["process"])


def test_the_live_view(tiny_model: Path) -> None:
    options = LoadOptions(max_ctx=256, threads=1, max_concurrency=2, idle_prefill=False)
    with Luce.load_with(tiny_model, options) as luce, running_server(luce, options) as server:
        console = Console(file=io.StringIO(), width=110, height=40, force_terminal=True, legacy_windows=False)
        watch(ServerClient(server.url, None), 0.1, console, looks=2)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    for fact in ("tok/s generated", "weights", "snapshots", "free", "kept ", "resident", "Ctrl-C ends this view"):
        assert fact in text, fact
    assert "stops the server" not in text


def test_a_busy_slot_and_no_report() -> None:
    with echo_server(LoadOptions(max_ctx=512, max_concurrency=1)) as (server, luce, echo):
        body = {"messages": [{"role": "user", "content": "</think>HOLD"}], "stream": True}
        with httpx.stream("POST", server.url + "/v1/chat/completions", json=body, timeout=30):
            assert echo.held.wait(10)
            lines = list(plain_lines(*look(ServerClient(server.url, None))))
            echo.release.set()
    assert any(line.startswith("slots: 1 of 1 busy") for line in lines)
    assert any(re.match(r"slot 0: (prefill|decode), prompt \d+ of \d+", line) for line in lines)
    assert "memory: released, or not known" in lines
    assert not any(line.startswith("kept") for line in lines)


def test_refusals(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--once", "--url", "http://127.0.0.1:9"]) == 1
    assert "no server answers there" in capsys.readouterr().err
    assert main(["top", "--interval", "0"]) == 2
    with echo_server(api_key="secret") as (server, _, _):
        assert main(["top", "--once", "--url", server.url]) == 1
        assert server.url in capsys.readouterr().err
        assert main(["top", "--once", "--url", server.url, "--api-key", "secret"]) == 0


def test_ctrl_c_ends_the_view_and_not_the_server() -> None:
    with echo_server() as (server, _, _):
        process = subprocess.Popen(
            command("top", "--url", server.url, "--interval", "0.2"), env=environment(), stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )  # fmt: skip
        assert process.stdout is not None
        deadline = time.monotonic() + 90  # an interpreter that starts on a busy machine
        shown = b""
        while b"queue" not in shown and time.monotonic() < deadline:
            if select.select([process.stdout], [], [], 0.2)[0]:
                shown += os.read(process.stdout.fileno(), 65536)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
        assert process.returncode == 130, err
        assert b"Traceback" not in err
        assert httpx.get(server.url + "/health").status_code == 200
