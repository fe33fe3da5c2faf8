from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyluce.engine import (
    BatchCore,
    Engine,
    EngineClosedError,
    EngineError,
    EngineForkedError,
    EngineStats,
    GenerationRequest,
    LogitsError,
    RequestError,
    Resources,
    Ticket,
    TokenEvent,
    generate,
)
from pyluce.engine.thread import attach_finalizer
from pyluce.text import Tokenizer
from tests.support.fake_runner import FakeRunner, NumpyChain
from tests.support.fake_vocabulary import FakeVocabulary

ROOT = Path(__file__).resolve().parents[2]
VOCABULARY = FakeVocabulary()


class Box:
    """An engine over a fake runner, and the runner."""

    def __init__(self, **options: Any) -> None:
        self.runner: FakeRunner | None = None
        self.engine = Engine(lambda report: self._open(**options))

    def _open(self, n_slots: int = 1, max_queue: int = 64, **options: Any) -> BatchCore[Any]:
        self.runner = FakeRunner(VOCABULARY.n_tokens, n_slots=n_slots, **options)
        resources = Resources(self.runner, Tokenizer(VOCABULARY), NumpyChain, 4096, 16)
        return BatchCore(resources, self.runner.close, n_slots=n_slots, max_queue=max_queue, prefill_share=0.5)

    def tokens(self, prompt: tuple[int, ...], n: int = 8) -> list[int]:
        ticket = self.engine.submit(GenerationRequest(prompt, max_tokens=n, ignore_end=True))
        return [event.token for event in ticket.events() if isinstance(event, TokenEvent)]


def solo(prompt: tuple[int, ...], n: int = 8) -> list[int]:
    resources = Resources(FakeRunner(VOCABULARY.n_tokens), Tokenizer(VOCABULARY), NumpyChain, 4096, 16)
    events = generate(resources, GenerationRequest(prompt, max_tokens=n, ignore_end=True))
    return [event.token for event in events if isinstance(event, TokenEvent)]


@pytest.fixture
def box() -> Any:
    box = Box()
    yield box
    box.engine.close()
    assert box.runner is not None
    assert box.runner.closed


def wait_for(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.002)


def test_32_threads_get_what_each_would_get_alone(box: Box) -> None:
    answers: dict[int, list[int]] = {}

    def ask(number: int) -> None:
        answers[number] = box.tokens((number, 7, number))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {number: solo((number, 7, number)) for number in range(32)}


def test_a_cancelled_request_frees_its_state_and_the_next_one_runs(box: Box) -> None:
    assert box.runner is not None
    ticket = box.engine.submit(GenerationRequest((1, 2), max_tokens=4000, ignore_end=True))
    events = ticket.events()
    next(events)
    assert box.runner.live
    events.close()
    wait_for(lambda: not (box.runner and box.runner.live))
    assert box.tokens((3,)) == solo((3,))
    assert len(box.runner.calls) < 3000


def test_a_request_cancelled_in_the_queue_never_runs(box: Box) -> None:
    running = box.engine.submit(GenerationRequest((1, 2), max_tokens=500, ignore_end=True))
    waiting = box.engine.submit(GenerationRequest(tuple(range(33)), max_tokens=1))
    waiting.cancel()
    assert len(list(running.events())) == 502
    assert box.tokens((3,)) == solo((3,))
    assert box.runner is not None
    assert ("prefill:none", 16) not in box.runner.calls


def test_a_dropped_iterator_cancels(box: Box) -> None:
    events = box.engine.submit(GenerationRequest((1, 2), max_tokens=4000, ignore_end=True)).events()
    next(events)
    del events
    gc.collect()
    wait_for(lambda: not (box.runner and box.runner.live))


def test_a_failure_ends_one_request_alone() -> None:
    def spoil(tokens: list[int], row: Any) -> None:
        if tokens[0] == 13 and len(tokens) == 4:
            row[:] = np.nan

    box = Box(damage=spoil)
    with pytest.raises(LogitsError):
        box.tokens((13, 1))
    with pytest.raises(RequestError, match="token ids"):
        box.tokens((999_999,))
    assert box.tokens((3,)) == solo((3,))
    box.engine.close()


def test_a_failing_load_is_raised_where_it_was_asked_for() -> None:
    def fail(report: Any) -> BatchCore[Any]:
        raise ValueError("no such model")

    before = threading.active_count()
    with pytest.raises(ValueError, match="no such model"):
        Engine(fail)
    assert threading.active_count() == before


class BrokenCore:
    def __init__(self) -> None:
        self.dropped: list[Ticket] = []
        self.tickets: list[Ticket] = []

    def reserve(self, request: GenerationRequest) -> Callable[[], None]:
        return lambda: None

    def stats(self) -> EngineStats:
        return EngineStats(0.0, 0.0)

    def idle(self) -> None:
        pass

    def admit(self, ticket: Ticket) -> None:
        self.tickets.append(ticket)

    def step(self) -> bool:
        raise RuntimeError("a bug")

    def drop_all(self, error: BaseException) -> None:
        for ticket in self.tickets:
            ticket.fail(error)

    def close(self) -> None:
        pass


def test_a_broken_core_answers_everybody_and_later_calls_say_why() -> None:
    engine = Engine(lambda report: BrokenCore())
    ticket = engine.submit(GenerationRequest((1,)))
    with pytest.raises(EngineError, match="a bug"):
        list(ticket.events())
    with pytest.raises(EngineError, match="a bug"):
        engine.submit(GenerationRequest((1,)))
    engine.close()


def test_closing_ends_running_and_waiting_requests() -> None:
    box = Box()
    running = box.engine.submit(GenerationRequest((1,), max_tokens=4000, ignore_end=True)).events()
    waiting = box.engine.submit(GenerationRequest((2,))).events()
    next(running)
    box.engine.close()
    box.engine.close()
    with pytest.raises(EngineClosedError):
        list(running)
    with pytest.raises(EngineClosedError):
        list(waiting)
    with pytest.raises(EngineClosedError, match="load it again"):
        box.engine.submit(GenerationRequest((1,)))
    with pytest.raises(EngineClosedError):
        box.engine.call(lambda: 1)


def test_call_runs_on_the_engine_thread_between_steps(box: Box) -> None:
    assert box.runner is not None
    runner = box.runner
    events = box.engine.submit(GenerationRequest((1,), max_tokens=2000, ignore_end=True)).events()
    next(events)
    thread, live = box.engine.call(lambda: (threading.current_thread().name, len(runner.live)))
    assert (thread, live) == ("luce-engine", 1)
    assert box.engine.call(lambda: box.engine.call(lambda: 5)) == 5
    with pytest.raises(ZeroDivisionError):
        box.engine.call(lambda: 1 // 0)
    events.close()


def test_an_owner_dropped_without_close_ends_the_engine() -> None:
    class Owner:
        pass

    box = Box()
    owner = Owner()
    attach_finalizer(owner, box.engine)
    del owner
    gc.collect()
    wait_for(lambda: bool(box.runner and box.runner.closed))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_after_a_fork_every_call_is_an_error_and_close_does_nothing(box: Box) -> None:
    events = box.engine.submit(GenerationRequest((1,), max_tokens=4000, ignore_end=True)).events()
    next(events)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            for use in (
                lambda: box.engine.submit(GenerationRequest((1,))),
                lambda: box.engine.call(lambda: 1),
                lambda: next(events),
            ):
                try:
                    use()
                    os._exit(2)
                except EngineForkedError:
                    pass
            box.engine.close()
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert isinstance(next(events), TokenEvent)
    events.close()


PROGRAM = """
import sys, time
sys.path.insert(0, {root!r})
from pyluce.engine import Engine, GenerationRequest
from tests.engine.test_thread import Box
{body}
"""


def run_program(body: str, interrupt: bool = False) -> subprocess.CompletedProcess[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(root=str(ROOT), body=body)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    if interrupt:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


@pytest.mark.parametrize(
    "body",
    [
        "box = Box()",
        "box = Box(); events = box.engine.submit(GenerationRequest((1,), max_tokens=4000)).events(); next(events)",
        "box = Box(); box.engine.close(); box.engine.close()",
        "import gc; box = Box(); box.cycle = box; del box; gc.collect()",
    ],
)
def test_the_interpreter_ends_cleanly_with_a_live_engine(body: str) -> None:
    done = run_program(body)
    assert (done.returncode, done.stderr) == (0, "")


def test_ctrl_c_while_loading_and_while_generating() -> None:
    loading = """
def load(report):
    print("ready", flush=True)
    while True:
        time.sleep(0.01)
        report()
try:
    Engine(load)
except KeyboardInterrupt:
    print("interrupted")
"""
    done = run_program(loading, interrupt=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "interrupted\n", "")
    generating = """
box = Box()
ticket = box.engine.submit(GenerationRequest((1,), max_tokens=4000))
try:
    print("ready", flush=True)
    while True:
        list(ticket.events()); ticket = box.engine.submit(GenerationRequest((1,), max_tokens=4000, ignore_end=True))
except KeyboardInterrupt:
    box.engine.close()
    print("interrupted", box.runner.live, box.runner.closed)
"""
    done = run_program(generating, interrupt=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "interrupted [] True\n", "")
