"""`luce run` without a prompt: what it prints, what it refuses, how it ends."""

from __future__ import annotations

import re
import socket
import subprocess
import threading
import time
from typing import Any

import httpx
import pytest

from tests.support.requests_in_background import asking
from tests.support.serving import ROOT, command, environment, serving, serving_on_terminal

CHAT = "/v1/chat/completions"


def chat(text: str, **options: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **options}


def wait_busy(url: str, slots: int = 1) -> None:
    deadline = time.monotonic() + 30
    while httpx.get(url + "/health").json()["busy_slots"] < slots:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def refused(*arguments: str, **variables: str) -> str:
    """The error message of a command line that cannot be used."""
    done = subprocess.run(
        command("run", *arguments), env=environment(**variables), cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    return f"{done.returncode}: {done.stderr}"


def test_it_serves_with_its_settings_and_ends_with_0() -> None:
    arguments = ["--max-concurrency", "3", "--max-queue", "5", "--max-ctx", "600", "--model-name", "llama", "--max-body-mib", "1",
                 "--cors-origin", "http://a.example", "--default-max-tokens", "7", "--temperature", "0.5"]  # fmt: skip
    with serving(*arguments, LUCE_API_KEY="secret") as server:
        assert httpx.get(server.url + "/health").status_code == 200
        assert "<title>luce</title>" in httpx.get(server.url).text
        assert httpx.post(server.url + CHAT, json=chat("x")).status_code == 401
        headers = {"Authorization": "Bearer secret", "Origin": "http://a.example"}
        answer = httpx.post(server.url + CHAT, json=chat("</think>hello, this is long", temperature=0), headers=headers)
        assert answer.headers["access-control-allow-origin"] == "http://a.example"
        assert answer.json()["model"] == "llama"
        assert answer.json()["usage"]["completion_tokens"] == 7
        props = httpx.get(server.url + "/props").json()
        assert props["runtime"]["slots"] == 3
        assert props["runtime"]["max_queue"] == 5
        assert props["default_generation_settings"]["n_ctx"] == 600
        assert props["default_generation_settings"]["temperature"] == 0.5
        large = httpx.post(server.url + CHAT, json=chat("x" * 2**20), headers=headers)
        assert large.status_code == 413
        server.interrupt()
        assert server.end() == 0
    lines = server.shown.splitlines()
    assert lines[0] == "load: weights"
    assert re.fullmatch(r"\d\d:\d\d:\d\d POST /v1/chat/completions 200 \d+\.\d\d s", lines[-3]), lines
    assert re.fullmatch(r"\d\d:\d\d:\d\d POST /v1/chat/completions 413 \d+\.\d\d s", lines[-2]), lines
    assert " stopped: 0 of 3 slots busy, 0 waiting, 1 answered" in lines[-1]
    assert "GET" not in server.shown, "who asks for numbers is no news"


def test_quiet_says_where_it_serves_and_nothing_else() -> None:
    with serving("-q") as server:
        assert httpx.post(server.url + CHAT, json=chat("</think>x")).status_code == 200
        server.process.terminate()
        assert server.end() == 0
    assert server.shown == ""


def test_running_answers_may_end_after_ctrl_c() -> None:
    with serving("--shutdown-grace", "30") as server, asking(server.url, "</think>SLOW" + "y" * 100) as answers:
        wait_busy(server.url)
        server.interrupt()
        assert server.end() == 0
    assert answers[0].json()["choices"][0]["message"]["content"] == "SLOW" + "y" * 100
    assert "Traceback" not in server.shown


@pytest.mark.parametrize("twice", [True, False])
def test_answers_that_take_too_long_are_ended_with_an_error(twice: bool) -> None:
    with serving("--shutdown-grace", "60" if twice else "0.5") as server:
        frames: list[str] = []
        body = chat("</think>LONG SLOW ", stream=True)

        def stream() -> None:
            with httpx.stream("POST", server.url + CHAT, json=body, timeout=60) as answer:
                frames.extend(answer.iter_lines())

        streaming = threading.Thread(target=stream)
        with asking(server.url, "</think>LONG SLOW ") as answers:
            streaming.start()
            wait_busy(server.url, 2)
            server.interrupt()
            if twice:
                time.sleep(0.3)
                assert server.process.poll() is None
                server.interrupt()
            assert server.end() == (130 if twice else 0)
        streaming.join(30)
    assert answers[0].status_code == 503
    assert answers[0].json()["error"]["message"] == "the server was stopped"
    assert "the server was stopped" in [line for line in frames if line][-1]
    assert "Traceback" not in server.shown


def test_a_port_in_use_is_refused_before_the_model_is_loaded() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        message = refused("--port", str(port))
    assert message.startswith("1: ")
    assert f"cannot listen on 127.0.0.1 port {port}" in message
    assert "--port" in message
    assert "load:" not in message


def test_flags_of_the_other_use_are_refused_by_name() -> None:
    message = refused("--json", "--raw", "-n", "5", "--no-thinking")
    assert message.startswith("2: ")
    assert "--max-tokens, --raw, --no-thinking, --json: expected with --prompt" in message
    message = refused("--prompt", "x", "--port", "1", "--api-key", "k")
    assert message.startswith("2: ")
    assert "--port, --api-key: expected without a prompt only" in message
    assert "--max-body-mib" in refused("--max-body-mib", "0")
    assert "--api-key" in refused("--api-key", "é")
    assert "--park-reset: expected a GPU as device, found cpu" in refused("--park-reset", "on")


def test_variables_of_the_server_do_not_disturb_a_prompt() -> None:
    done = subprocess.run(
        command("run", "--prompt", "</think>hi", "-q"), env=environment(LUCE_PORT="1", LUCE_API_KEY="k"), cwd=ROOT,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "hi\n")


def test_a_terminal_shows_a_live_panel() -> None:
    with serving_on_terminal("--max-concurrency", "2") as server:
        assert "luce" in server.shown
        server.read_until(r"0 +free")
        with asking(server.url, "</think>SLOW" + "y" * 150):
            server.read_until(r"0 +decode +request 1 .* tok/s")
        server.read_until(r"requests 1 stop")
        with asking(server.url, "</think>LONG SLOW "):
            wait_busy(server.url)
            server.interrupt()
            server.read_until("stopping: 1 requests are still running; Ctrl-C again ends them now")
            server.interrupt()
            assert server.end() == 130
    assert "Traceback" not in server.shown
    assert server.shown.rstrip().endswith("\x1b[?25h"), "the cursor is back"
