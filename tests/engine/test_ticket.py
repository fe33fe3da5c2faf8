"""Tickets and stats across threads: who is told what, when, and that nobody waits for the engine thread to be told."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pyluce.engine import (
    Activity,
    BatchCore,
    ContextLimitError,
    DeadlineError,
    Engine,
    EngineClosedError,
    FinishEvent,
    GenerationRequest,
    Outcome,
    PrefillEvent,
    QueueFullError,
    RequestCancelledError,
    Resources,
    Ticket,
    TokenEvent,
)
from pyluce.engine import thread as engine_thread
from pyluce.text import Tokenizer
from tests.support.desk import VOCABULARY, alone, read, request
from tests.support.fake_runner import FakeRunner, NumpyChain


class Gated(FakeRunner):
    """A runner whose chunks wait until the test lets them go."""

    def __init__(self, n_slots: int) -> None:
        super().__init__(VOCABULARY.n_tokens, n_slots=n_slots)
        self.open = threading.Event()
        self.open.set()
        self.inside = threading.Event()

    def prefill(self, *arguments: Any, **options: Any) -> Any:
        self.inside.set()
        assert self.open.wait(30)
        return super().prefill(*arguments, **options)


class Bench:
    """An engine over a gated runner."""

    def __init__(self, n_slots: int = 2, max_queue: int = 2) -> None:
        self.runners: list[Gated] = []

        def open_core(report: Any) -> BatchCore[Any]:
            runner = Gated(n_slots)
            self.runners.append(runner)
            resources = Resources(runner, Tokenizer(VOCABULARY), NumpyChain, 4096, 16)
            return BatchCore(resources, runner.close, n_slots=n_slots, max_queue=max_queue, prefill_share=0.5)

        self.engine = Engine(open_core)
        self.runner = self.runners[0]


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.runner.open.set()
    bench.engine.close()


def wait_for(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.002)


def test_a_callback_gets_all_messages_in_order_whenever_it_comes(bench: Bench) -> None:
    for delay in (0.0, 0.001, 0.05):
        ticket = bench.engine.submit(request([1, 2, 3], 20))
        time.sleep(delay)
        messages: list[object] = []
        ticket.on_event(messages.append)
        wait_for(lambda ticket=ticket, messages=messages: bool(messages) and messages[-1] is None)
        answer = read(messages)
        assert answer.complete
        assert len(answer.tokens) == 20


def test_a_callback_runs_on_the_engine_thread(bench: Bench) -> None:
    bench.runner.open.clear()
    ticket = bench.engine.submit(request([1], 2))
    names: list[str] = []
    ticket.on_event(lambda message: names.append(threading.current_thread().name))
    bench.runner.open.set()
    wait_for(lambda: len(names) == 5)
    assert set(names) == {"luce-engine"}


def test_a_cancelled_ticket_is_answered(bench: Bench) -> None:
    ticket = bench.engine.submit(request([1], 4000))
    events = ticket.events()
    next(events)
    ticket.cancel()
    with pytest.raises(RequestCancelledError):
        list(events)


def test_a_deadline_ends_a_request(bench: Bench) -> None:
    ticket = bench.engine.submit(request([1], 4000, deadline_s=0.05))
    begun = time.monotonic()
    with pytest.raises(DeadlineError, match=r"deadline_s: the answer took longer than 0\.05 s"):
        list(ticket.events())
    assert time.monotonic() - begun < 10
    assert bench.engine.stats().requests[Outcome.DEADLINE] == 1


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("inf"), float("nan")])
def test_bad_deadlines_are_refused(seconds: float) -> None:
    with pytest.raises(ValueError, match="deadline_s"):
        GenerationRequest((1,), deadline_s=seconds)


def test_stats_and_refusals_do_not_wait_for_a_long_chunk(bench: Bench) -> None:
    bench.runner.open.clear()
    bench.runner.inside.clear()
    tickets = [bench.engine.submit(request([1] * 20, 2))]
    assert bench.runner.inside.wait(20)
    tickets += [bench.engine.submit(request([2] * 20, 2)) for _ in range(3)]
    begun = time.monotonic()
    for _ in range(100):
        stats = bench.engine.stats()
        with pytest.raises(QueueFullError):
            bench.engine.submit(request([1], 2))
        with pytest.raises(ContextLimitError):
            bench.engine.submit(request([1], 5000))
    assert time.monotonic() - begun < 2.0
    assert (stats.activity, stats.busy_slots, stats.queue_length, stats.refused) == (Activity.PREFILL, 1, 3, 99)
    time.sleep(0.2)
    assert time.perf_counter() - bench.engine.stats().heartbeat >= 0.2
    bench.runner.open.set()
    for ticket in tickets:
        assert isinstance(list(ticket.events())[-1], FinishEvent)
    stats = bench.engine.stats()
    assert (stats.busy_slots, stats.queue_length, stats.requests[Outcome.LENGTH]) == (0, 0, 4)
    assert stats.prompt_tokens_total == 80


def test_an_idle_engine_still_beats(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_thread, "HEARTBEAT_S", 0.01)
    list(bench.engine.submit(request([1], 2)).events())
    before = bench.engine.stats().heartbeat
    wait_for(lambda: bench.engine.stats().heartbeat > before + 0.05)
    assert bench.engine.stats().activity is Activity.IDLE


def test_many_threads_on_many_slots_get_what_each_would_get_alone() -> None:
    bench = Bench(n_slots=8, max_queue=64)
    wanted = {number: request([number, 7] * (1 + number), 8) for number in range(32)}
    found: dict[int, list[int]] = {}

    def ask(number: int) -> None:
        events = list(bench.engine.submit(wanted[number]).events())
        found[number] = [event.token for event in events if isinstance(event, TokenEvent)]

    threads = [threading.Thread(target=ask, args=(number,)) for number in wanted]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stats = bench.engine.stats()
    bench.engine.close()
    assert found == {number: alone(each, n_ctx=4096).tokens for number, each in wanted.items()}
    assert stats.decode_rows > stats.decode_steps, "no two requests ever shared a step"
    assert stats.invariant_violations == 0


def test_ids_grow_with_the_order_of_submission(bench: Bench) -> None:
    tickets = [bench.engine.submit(request([1], 1)) for _ in range(3)]
    assert [ticket.id for ticket in tickets] == sorted({ticket.id for ticket in tickets})
    for ticket in tickets:
        list(ticket.events())


def test_closing_while_a_chunk_runs_answers_everybody(bench: Bench) -> None:
    bench.runner.open.clear()
    bench.runner.inside.clear()
    tickets = [bench.engine.submit(request([1] * 40, 2)) for _ in range(4)]
    assert bench.runner.inside.wait(20)
    closing = threading.Thread(target=bench.engine.close)
    closing.start()
    time.sleep(0.05)
    bench.runner.open.set()
    closing.join(20)
    for ticket in tickets:
        with pytest.raises(EngineClosedError):
            list(ticket.events())
    assert bench.engine.stats().activity is Activity.CLOSED


def test_a_refused_submission_gives_its_place_back(bench: Bench) -> None:
    bench.engine.close()
    for _ in range(10):
        with pytest.raises(EngineClosedError):
            bench.engine.submit(request([1], 1))
    assert bench.engine.stats().queue_length == 0


def test_a_ticket_is_answered_once() -> None:
    class Here:
        forked = False

        def check_process(self) -> None:
            pass

    left: list[int] = []
    ticket = Ticket(request([1], 1), Here(), 3, on_answer=lambda: left.append(1))
    ticket.put(PrefillEvent())
    ticket.finish()
    with pytest.raises(RuntimeError, match="request 3 was answered twice"):
        ticket.fail(ValueError("late"))
    assert left == [1]
    assert list(ticket.events()) == [PrefillEvent()]
