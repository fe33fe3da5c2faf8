"""Five hundred requests from many threads, cancelled and failing at every stage; nothing may be left of them."""

from __future__ import annotations

import gc
import random
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import psutil
import pytest

from pyluce.engine import (
    BatchCore,
    DeadlineError,
    Engine,
    EngineStats,
    FinishEvent,
    LogitsError,
    Outcome,
    QueueFullError,
    RequestCancelledError,
    Resources,
    SamplingParams,
    TokenEvent,
)
from pyluce.text import Tokenizer
from tests.support.desk import VOCABULARY, alone, request
from tests.support.fake_runner import FakeRunner, NumpyChain

N_REQUESTS = 500
N_THREADS = 24
N_SLOTS = 8
N_CTX = 256
FLAT_BYTES = 12 << 20
NAN_PROMPT, BAD_CHUNK, BAD_ROW, BAD_CHAIN = 201, 202, 203, 204


class BadChainError(RuntimeError):
    """Planted: a sampler that cannot be made, or fails."""


class StepError(RuntimeError):
    """Planted: a native step that fails."""


class SoakRunner(FakeRunner):
    """Fails a step when a prompt's first token asks for it; keeps no list of calls."""

    def __init__(self) -> None:
        super().__init__(VOCABULARY.n_tokens, n_slots=N_SLOTS, damage=spoil)
        self.calls = _Nothing()  # type: ignore[assignment]
        self.most_live = 0

    def prefill(self, state: Any, tokens: Sequence[int], *rest: Any, **options: Any) -> Any:
        self.most_live = max(self.most_live, len(self.live))
        if (state.tokens or tokens)[0] == BAD_CHUNK and len(state.tokens) + len(tokens) > 16:
            raise StepError("planted in a chunk")
        return super().prefill(state, tokens, *rest, **options)

    def decode(self, rows: Sequence[tuple[Any, int]]) -> Any:
        time.sleep(0.0002)
        if any(state.tokens[0] == BAD_ROW and len(state.tokens) > 20 for state, _ in rows):
            raise StepError("planted in a row")
        return super().decode(rows)


class _Nothing(list):  # type: ignore[type-arg]
    def append(self, item: object) -> None:
        pass


def spoil(tokens: list[int], row: Any) -> None:
    if tokens[0] == NAN_PROMPT and len(tokens) > 14:
        row[:] = np.nan


class SoakChain(NumpyChain):
    def add(self, name: str, *arguments: object) -> None:
        if name == "logit_bias":
            raise BadChainError("planted")
        super().add(name, *arguments)


@dataclass
class Seen:
    """How one request went, from its caller's side."""

    how: str
    tokens: list[int]
    error: BaseException | None
    complete: bool


def plan_requests(rng: random.Random) -> list[tuple[str, Any]]:
    """(what happens to it, the request)"""
    plans = []
    for number in range(N_REQUESTS):
        how = rng.choices(
            ["fine", "cancelled", "closed", "deadline", "nan", "chunk", "row", "chain"], [60, 10, 8, 4, 5, 4, 4, 5]
        )[0]
        first = {"nan": NAN_PROMPT, "chunk": BAD_CHUNK, "row": BAD_ROW, "chain": BAD_CHAIN}.get(how, number % 200)
        options: dict[str, Any] = {}
        if how == "chain":
            options["sampling"] = SamplingParams(logit_bias={1: 1.0})
        elif how == "deadline":
            options["deadline_s"] = 0.001
        elif number % 3 == 0:
            options["sampling"] = SamplingParams(temperature=1.0, top_k=10, seed=number)
        prompt = [first, *(rng.randrange(200) for _ in range(rng.randrange(12, 60)))]
        plans.append((how, request(prompt, rng.randrange(8, 30), **options)))
    return plans


def run_one(engine: Engine, how: str, wanted: Any, rng: random.Random, refused: Counter[str]) -> Seen:
    while True:
        try:
            ticket = engine.submit(wanted)
            break
        except QueueFullError as error:
            refused["times"] += 1
            assert error.retry_after_s >= 1.0
            time.sleep(0.002)
    seen = Seen(how, [], None, False)
    events = ticket.events()
    leave_after = rng.randrange(6)
    try:
        if how == "cancelled" and leave_after == 0:
            ticket.cancel()
        for index, event in enumerate(events):
            if isinstance(event, TokenEvent):
                seen.tokens.append(event.token)
            seen.complete = isinstance(event, FinishEvent)
            if how == "cancelled" and index == leave_after:
                ticket.cancel()
            if how == "closed" and index == leave_after:
                break
    except Exception as error:
        seen.error = error
    return seen


def soak(seed: int) -> tuple[list[tuple[Any, Seen]], EngineStats, SoakRunner, Counter[str], list[int]]:
    runners: list[SoakRunner] = []

    def open_core(report: Any) -> BatchCore[Any]:
        runners.append(SoakRunner())
        resources = Resources(runners[0], Tokenizer(VOCABULARY), SoakChain, N_CTX, 16)
        return BatchCore(resources, runners[0].close, n_slots=N_SLOTS, max_queue=10, prefill_share=0.5)

    engine = Engine(open_core)
    plans = plan_requests(random.Random(seed))
    todo = list(enumerate(plans))[::-1]
    found: list[tuple[Any, Seen]] = []
    refused: Counter[str] = Counter()
    memory: list[int] = []
    lock = threading.Lock()

    def client(number: int) -> None:
        rng = random.Random(1000 * seed + number)
        while True:
            with lock:
                if not todo:
                    return
                index, (how, wanted) = todo.pop()
                if index % 50 == 0:
                    gc.collect()
                    memory.append(psutil.Process().memory_info().rss)
            seen = run_one(engine, how, wanted, rng, refused)
            with lock:
                found.append((wanted, seen))
            time.sleep(rng.random() * 0.004)

    threads = [threading.Thread(target=client, args=(number,)) for number in range(N_THREADS)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
            assert not thread.is_alive(), "a request was never answered"
        until = time.monotonic() + 20
        while sum(engine.stats().requests.values()) < N_REQUESTS and time.monotonic() < until:
            time.sleep(0.01)  # iterators that were closed are dropped by the engine a step later
        assert engine.call(lambda: len(runners[0].live)) == 0, "a state was never freed"
        gc.collect()
        memory.append(psutil.Process().memory_info().rss)
        stats = engine.stats()
    finally:
        engine.close()
    return found, stats, runners[0], refused, memory


def test_soak_of_500_requests() -> None:
    found, stats, runner, refused, memory = soak(7)
    assert len(found) == N_REQUESTS
    assert runner.closed
    assert runner.most_live == N_SLOTS, "the slots were never all in use"
    assert refused["times"] == stats.refused > 0
    assert stats.busy_slots == stats.queue_length == stats.invariant_violations == 0
    outcomes = Counter(stats.requests)
    assert sum(outcomes.values()) == N_REQUESTS
    assert all(outcomes[outcome] for outcome in Outcome if outcome is not Outcome.STOP), outcomes
    errors = {
        "nan": LogitsError,
        "chunk": StepError,
        "row": StepError,
        "chain": BadChainError,
        "deadline": DeadlineError,
    }
    for wanted, seen in found:
        assert seen.complete or seen.error is not None or seen.how == "closed"
        if seen.how == "fine" and not isinstance(seen.error, StepError):
            assert seen.complete
        if seen.complete:
            assert seen.tokens == alone(wanted, n_ctx=N_CTX).tokens
        elif seen.how in errors and not isinstance(seen.error, StepError):
            assert isinstance(seen.error, errors[seen.how])
        elif seen.how == "cancelled":
            assert isinstance(seen.error, (RequestCancelledError, StepError))
    assert sum(seen.how == "fine" and seen.complete for _, seen in found) > 200
    assert memory[-1] - memory[2] < FLAT_BYTES, [size >> 20 for size in memory]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_control_a_lost_state_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """If cancelled requests kept their states, the soak would end with an assertion."""
    free = BatchCore._end

    def forget(self: Any, number: int, outcome: Outcome, error: BaseException | None = None) -> None:
        live = self._live.get(number)
        if outcome is Outcome.CANCELLED and live is not None:
            live.state.free = lambda: None
        free(self, number, outcome, error)

    monkeypatch.setattr(BatchCore, "_end", forget)
    with pytest.raises(AssertionError, match="a state was never freed"):
        soak(7)
