"""Clients that go away, full queues, a working or a dead engine, the end of the server."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from pyluce.engine.stats import Activity, EngineStats
from pyluce.luce import Luce
from pyluce.options import LoadOptions
from pyluce.server import LuceServer, ServerSettings, create_app
from pyluce.server.health import judge
from pyluce.server.serve import bind
from tests.support.echo_service import Echo, echo_server

CHAT = "/v1/chat/completions"
WAIT_S = 10.0
ROOT = Path(__file__).resolve().parents[2]


def chat(text: str, **options: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **options}


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain: {what}"
        time.sleep(0.005)


def free(luce: Luce) -> bool:
    stats = luce.stats()
    return stats.busy_slots == 0 and stats.queue_length == 0


@contextlib.contextmanager
def raw_request(server: LuceServer, path: str, body: bytes) -> Iterator[socket.socket]:
    """A connection whose answer is not awaited; closed at the end."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=WAIT_S) as connection:
        head = (
            f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        connection.sendall(head.encode() + body)
        yield connection


@pytest.fixture
def one_slot() -> Iterator[tuple[LuceServer, Luce, Echo]]:
    with echo_server(LoadOptions(max_ctx=512, max_concurrency=1, max_queue=2), heartbeat_limit_s=0.5) as parts:
        yield parts


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_its_slot(one_slot: tuple[LuceServer, Luce, Echo], stream: bool) -> None:
    server, luce, _ = one_slot
    body = httpx.Request("POST", server.url, json=chat("</think>LONG SLOW ", stream=stream)).content
    for path in (CHAT, "/v1/completions"):
        if path != CHAT:
            body = httpx.Request("POST", server.url, json={"prompt": "x", "stream": stream}).content
        with raw_request(server, path, body):
            if path == CHAT:
                wait_for(lambda: luce.stats().generated_tokens_total > 2, "tokens")
                assert not free(luce)
        wait_for(lambda: free(luce), "a free slot")
    assert httpx.post(server.url + CHAT, json=chat("</think>hello"), timeout=WAIT_S).status_code == 200


def test_a_queued_client_that_goes_away_leaves_the_queue(one_slot: tuple[LuceServer, Luce, Echo]) -> None:
    server, luce, echo = one_slot
    held = httpx.Request("POST", server.url, json=chat("HOLD</think>x")).content
    with raw_request(server, CHAT, held):
        assert echo.held.wait(WAIT_S)
        with raw_request(server, CHAT, held):
            wait_for(lambda: luce.stats().queue_length == 1, "the queue")
        time.sleep(1.0)  # the engine stands still: only the server's loop notices that the client has gone
        echo.release.set()
        wait_for(lambda: free(luce), "a free slot")
    requests = {outcome.value: count for outcome, count in luce.stats().requests.items()}
    assert requests["cancelled"] == 1
    assert requests["stop"] == 1


def test_a_full_queue_is_429(one_slot: tuple[LuceServer, Luce, Echo]) -> None:
    server, luce, echo = one_slot
    held = httpx.Request("POST", server.url, json=chat("HOLD</think>x")).content
    with contextlib.ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(raw_request(server, CHAT, held))
        wait_for(lambda: luce.stats().queue_length == 2, "a full queue")
        refused = httpx.post(server.url + CHAT, json=chat("x"), timeout=WAIT_S)
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert httpx.post(server.url + CHAT, json=chat("x", stream=True), timeout=WAIT_S).status_code == 429
        anthropic = httpx.post(server.url + "/v1/messages", json=chat("x", max_tokens=5), timeout=WAIT_S)
        assert anthropic.json()["error"]["type"] == "rate_limit_error"
        assert luce.stats().refused == 3
        echo.release.set()
    wait_for(lambda: free(luce), "a free slot")


def test_choices_that_do_not_all_fit_leave_nothing_behind(one_slot: tuple[LuceServer, Luce, Echo]) -> None:
    server, luce, _ = one_slot
    refused = httpx.post(server.url + CHAT, json=chat("</think>LONG", n=4), timeout=WAIT_S)
    assert refused.status_code == 429
    wait_for(lambda: free(luce), "free slots")


def test_health_while_the_engine_works_and_when_it_hangs(one_slot: tuple[LuceServer, Luce, Echo]) -> None:
    server, luce, echo = one_slot
    body = httpx.Request("POST", server.url, json=chat("HOLD</think>x")).content
    with httpx.Client(base_url=server.url) as client, raw_request(server, CHAT, body):
        assert client.get("/health").json()["status"] in ("ok", "busy")
        assert echo.held.wait(WAIT_S)
        begin = time.perf_counter()
        answer = client.get("/health")
        if time.perf_counter() - begin < 0.3:  # else this machine was too busy to look in time
            assert answer.status_code == 200
            assert answer.json()["status"] == "busy"
            assert answer.json()["ready"] is True
        for path in ("/props", "/metrics", "/status/json", "/v1/models"):
            assert client.get(path).status_code == 200
        assert client.post("/tokenize", json={"content": "hello"}).status_code == 200
        count = client.post("/v1/messages/count_tokens", json={"messages": [{"role": "user", "content": "x"}]})
        assert count.status_code == 200
        wait_for(lambda: client.get("/health").status_code == 503, "a stalled engine")
        stalled = client.get("/health").json()
        assert stalled["status"] == "stalled"
        assert (stalled["live"], stalled["ready"]) == (True, False)
        assert client.get("/health/live").status_code == 200
        echo.release.set()
        wait_for(lambda: client.get("/health").status_code == 200, "a healthy engine")
        wait_for(lambda: client.get("/health").json()["status"] == "ok", "an idle engine")
        luce.close()
        assert client.get("/health").json()["status"] == "failed"
        gone = client.post(CHAT, json=chat("x"))
        assert gone.status_code == 503
        assert gone.json()["error"]["type"] == "server_error"


def test_health_is_quick_during_a_long_step(one_slot: tuple[LuceServer, Luce, Echo]) -> None:
    server, _, echo = one_slot
    body = httpx.Request("POST", server.url, json=chat("HOLD</think>x")).content
    with httpx.Client(base_url=server.url) as client, raw_request(server, CHAT, body):
        assert echo.held.wait(WAIT_S)
        client.get("/health")
        times = []
        for _ in range(50):
            begin = time.perf_counter()
            client.get("/health")
            times.append(time.perf_counter() - begin)
        echo.release.set()
    assert sorted(times)[len(times) // 2] < 0.05, times


def test_judged_health() -> None:
    stats = EngineStats(started_at=0.0, heartbeat=100.0, activity=Activity.IDLE)
    assert judge(stats, 5.0, now=101.0).status == "ok"
    assert judge(stats, 5.0, now=106.0).status == "stalled"
    busy = EngineStats(started_at=0.0, heartbeat=100.0, activity=Activity.PREFILL)
    assert judge(busy, 5.0, now=104.0) == judge(busy, 5.0, now=104.0)
    assert judge(busy, 5.0, now=104.0).status == "busy"
    closed = EngineStats(started_at=0.0, heartbeat=100.0, activity=Activity.CLOSED)
    assert (judge(closed, 5.0, now=100.0).status, judge(closed, 5.0, now=100.0).ready) == ("failed", False)


def test_silent_streams_get_comments() -> None:
    with echo_server(LoadOptions(max_ctx=512), keep_alive_s=0.05) as (server, _, echo):
        seen: list[bytes] = []
        with httpx.stream("POST", server.url + CHAT, json=chat("HOLD</think>x", stream=True), timeout=WAIT_S) as answer:
            for data in answer.iter_raw():
                seen.append(data)
                if b"".join(seen).count(b": keep-alive\n\n") >= 2:
                    echo.release.set()
        assert b"".join(seen).endswith(b"data: [DONE]\n\n")


def test_stopping_lets_answers_end_and_ends_status_streams() -> None:
    with echo_server(LoadOptions(max_ctx=512), shutdown_grace_s=10) as (server, luce, echo):
        answers: list[httpx.Response] = []
        ask = threading.Thread(
            target=lambda: answers.append(httpx.post(server.url + CHAT, json=chat("HOLD</think>hello"), timeout=WAIT_S))
        )
        watched: list[bytes] = []
        watching = threading.Event()

        def follow() -> None:
            with httpx.stream("GET", server.url + "/status/events", timeout=WAIT_S) as events:
                for data in events.iter_bytes():
                    watched.append(data)
                    watching.set()

        watch = threading.Thread(target=follow)
        ask.start()
        watch.start()
        assert echo.held.wait(WAIT_S) and watching.wait(WAIT_S)
        server.stop()
        time.sleep(0.3)
        echo.release.set()
        ask.join(WAIT_S)
        watch.join(WAIT_S)
        assert answers[0].json()["choices"][0]["message"]["content"] == "hello"
        assert b"event: status" in b"".join(watched)
        assert free(luce)


def test_stopping_cancels_what_takes_too_long() -> None:
    with echo_server(LoadOptions(max_ctx=512), shutdown_grace_s=1) as (server, luce, _):
        body = httpx.Request("POST", server.url, json=chat("</think>LONG SLOW ", stream=True)).content
        with raw_request(server, CHAT, body):
            wait_for(lambda: luce.stats().generated_tokens_total > 2, "tokens")
            server.stop()
            wait_for(lambda: free(luce), "free slots")


def test_a_port_in_use_is_an_error_at_once() -> None:
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"port {port}"):
            LuceServer(create_app(None, ServerSettings()), ServerSettings(port=port))  # type: ignore[arg-type]


def test_status_events_show_the_work(one_slot: tuple[LuceServer, Luce, Echo]) -> None:
    server, _, echo = one_slot
    body = httpx.Request("POST", server.url, json=chat("HOLD</think>x")).content
    with raw_request(server, CHAT, body):
        assert echo.held.wait(WAIT_S)
        with httpx.stream("GET", server.url + "/status/events", timeout=WAIT_S) as answer:
            first = next(answer.iter_lines())
        assert first == "event: status"
        shown = httpx.get(server.url + "/status/json").json()
        assert shown["slots"][0]["state"] in ("prefill", "decode")
        echo.release.set()


def test_cancels_at_any_time_leave_nothing_behind() -> None:
    bodies = [chat("</think>hello SLOW", stream=True), chat("a</think>b SLOW"), chat("</think>x", n=3, stream=True)]
    with echo_server(LoadOptions(max_ctx=512, max_concurrency=2, max_queue=64, chunk=16)) as (server, luce, _):
        alone = httpx.post(server.url + CHAT, json=chat("</think>hello world"), timeout=WAIT_S).json()["choices"]
        for cycle in range(40):
            raw = httpx.Request("POST", server.url, json=bodies[cycle % len(bodies)]).content
            with raw_request(server, CHAT, raw):
                time.sleep(0.001 * (cycle * 7 % 30))
        wait_for(lambda: free(luce), "free slots")
        again = httpx.post(server.url + CHAT, json=chat("</think>hello world"), timeout=WAIT_S).json()["choices"]
        assert again == alone
        wait_for(lambda: luce.stats().activity is Activity.IDLE, "an idle engine")
        assert luce.stats().invariant_violations == 0


def test_a_deadline() -> None:
    with echo_server(LoadOptions(max_ctx=512), deadline_s=0.2) as (server, luce, _):
        late = httpx.post(server.url + CHAT, json=chat("</think>LONG SLOW "), timeout=WAIT_S)
        assert late.status_code == 504
        assert late.json()["error"]["type"] == "server_error"
        wait_for(lambda: free(luce), "free slots")


SCRIPT = """
import sys
from pyluce.options import LoadOptions
from pyluce.server import ServerSettings, serve
from pyluce.service import LuceService
from tests.support.echo_service import echo_luce

options = LoadOptions(max_ctx=512)
with echo_luce(options) as (luce, echo), LuceService(luce, options, lambda: echo.vocabulary) as service:
    serve(service, ServerSettings(port=0, shutdown_grace_s=5), lambda url: print(url, flush=True))
    print("slots", luce.stats().busy_slots, flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_end_the_server(number: signal.Signals) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        with httpx.stream("POST", url + CHAT, json=chat("</think>SLOW hello", stream=True), timeout=WAIT_S) as answer:
            process.send_signal(number)
            assert answer.read().endswith(b"data: [DONE]\n\n")
        out, err = process.communicate(timeout=20)
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, out, err) == (0, "slots 0\n", "")
