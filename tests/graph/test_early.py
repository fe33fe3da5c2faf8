"""Steps that are launched before their tokens are known: the same bits, whatever comes instead, and nothing that waits for ever.

The CPU runs the GPU's way of inputs and results here (see test_device_path.py), behind a queue that does what a device's stream does:
everything in order, as late as somebody waits or as soon as it can, copies reading host memory when they are done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyluce.graph import RunnerOptions, TrunkRunner
from pyluce.graph import runner as module
from pyluce.graph.early import REPEATS
from pyluce.graph.inputs import InputWriter
from pyluce.graph.staging import Staging
from pyluce.native.backend import Backend
from pyluce.native.gate import StreamGate
from pyluce.weights import ModelError, ModelFile, PleTable
from tests.graph.test_device_path import like_a_gpu
from tests.support.models import ModelCache, luce_tiny_path, model_cache  # noqa: F401
from tests.support.real_model import require_libraries

OPTIONS = RunnerOptions(n_ctx=512, n_slots=3, chunk_tokens=64, repack=False, early=True)


class DeadlockError(AssertionError):
    """Somebody waits for what is behind a gate that nobody opens."""


class Stream:
    """What was started, in order. A gate in it is a number: what follows goes on when `opened` has reached it."""

    def __init__(self, eager: bool) -> None:
        self.eager = eager
        self.queue: list[Any] = []
        self.opened = 0

    def add(self, work: Any) -> None:
        self.queue.append(work)
        if self.eager:
            self.run()

    def run(self, until: object = None) -> None:
        """As far as it goes, or as it must."""
        while self.queue:
            work = self.queue[0]
            if isinstance(work, int) and work > self.opened:
                if until is not None:
                    raise DeadlockError
                return
            self.queue.pop(0)
            if work is until:
                return
            if callable(work):
                work()


class Gate:
    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.number = 0
        self.is_shut = False

    def shut(self) -> bool:
        assert not self.is_shut
        self.number += 1
        self.is_shut = True
        self.stream.add(self.number)
        return True

    def claim(self) -> bool:
        return self.is_shut

    def open(self) -> None:
        self.is_shut = False
        self.stream.opened = self.number
        if self.stream.eager:
            self.stream.run()

    expire = open

    def close(self) -> None:
        self.open()
        self.stream.run()


class Event:
    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.mark: object = None

    def record(self) -> None:
        self.mark = object()
        self.stream.add(self.mark)

    def wait(self) -> None:
        if self.mark in self.stream.queue:
            self.stream.run(until=self.mark)

    def close(self) -> None:
        pass


@contextmanager
def streamed(monkeypatch: pytest.MonkeyPatch, eager: bool) -> Iterator[Gate]:
    """Runners made here have a stream with a gate."""
    stream = Stream(eager)
    gate = Gate(stream)
    send, start, fetch, attach = Staging.send, Backend.start, Backend.fetch, ModelFile.attach_draft

    def wait(self: Backend) -> None:
        end = object()
        stream.queue.append(end)
        stream.run(until=end)

    with like_a_gpu(monkeypatch), monkeypatch.context() as patch:
        patch.setattr(Staging, "send", lambda *a: stream.add(lambda: send(*a)))
        patch.setattr(Backend, "start", lambda *a: stream.add(lambda: start(*a)))
        patch.setattr(Backend, "fetch", lambda *a: stream.add(lambda: fetch(*a)))
        patch.setattr(Backend, "wait", wait)
        patch.setattr(Staging, "is_locked", True)
        patch.setattr(ModelFile, "attach_draft", lambda self, **_: attach(self, embedding=True))
        patch.setattr(module.StreamGate, "for_backend", lambda backend: gate)
        patch.setattr(module, "BackendEvent", lambda backend: Event(stream))
        yield gate


def walk(
    path: Path, options: RunnerOptions, between: Callable[[TrunkRunner, int], None] = lambda runner, i: None
) -> tuple[list[bytes], Any]:
    """Many steps of one shape and all that can come between; what every row gave, and the early steps' counts."""
    rng = np.random.default_rng(7)
    found: list[bytes] = []
    with TrunkRunner(path, options) as runner:

        def rows(steps: int, *states: Any, wants: bool | None = None, drafts: int = 0) -> None:
            for i in range(steps):
                between(runner, i)
                if drafts:
                    found.append(repr(runner.draft([(s, 3, drafts) for s in states])).encode())
                wanted = [bool(rng.integers(2)) if wants is None else wants for _ in states]
                tokens = [int(t) for t in rng.integers(1, 250, len(states))]
                for row in runner.decode_rows(list(zip(states, tokens, strict=True)), wanted):
                    found.append(np.asarray(row).tobytes())

        def prompt(state: Any, n: int) -> None:
            found.append(np.asarray(runner.prefill(state, [int(t) for t in rng.integers(1, 250, n)])).tobytes())

        a, b = runner.new_sequence(), runner.new_sequence()
        prompt(a, 130)
        rows(3 * REPEATS, a, wants=False)
        prompt(b, 61)
        rows(2 * REPEATS, a, b)
        a.rollback(3)
        copy = a.copy()  # shares its pages: whoever writes first gets one of its own
        rows(2 * REPEATS, b, copy)
        rows(2 * REPEATS, a, wants=True)
        prompt(copy, 20)
        snapshot = copy.snapshot()
        copy.free()
        c = runner.new_sequence()
        c.restore(snapshot)
        rows(2 * REPEATS, a, b, c)
        if options.mtp:
            rows(3, a, b, drafts=2)
        b.free()
        runner.poison_free_state()
        b = runner.new_sequence()
        prompt(b, 5)
        rows(70, b, wants=False)  # across a page
        return found, (runner._early.launched, runner._early.used) if runner._early is not None else (0, 0)


@pytest.fixture
def path(model_cache: ModelCache) -> Path:  # noqa: F811
    require_libraries()
    return Path(model_cache.tiny("Q8_0"))


@pytest.fixture
def plain(path: Path) -> list[bytes]:
    found, counts = walk(path, OPTIONS)
    assert counts == (0, 0), "the CPU launches nothing early"
    return found


@pytest.mark.parametrize("eager", [False, True])
def test_the_same_bits_and_most_steps_early(
    path: Path, plain: list[bytes], eager: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with streamed(monkeypatch, eager):
        found, (launched, used) = walk(path, OPTIONS)
        assert found == plain
        assert used > 75 and launched - used == 5, "once wrong at every change of shape"
        found, counts = walk(path, replace(OPTIONS, early=False))
        assert found == plain and counts == (0, 0)


@pytest.mark.parametrize("eager", [False, True])
def test_a_gate_that_opens_by_itself_changes_nothing(
    path: Path, plain: list[bytes], eager: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(1)
    with streamed(monkeypatch, eager) as gate:

        def between(runner: TrunkRunner, i: int) -> None:
            if gate.is_shut and rng.random() < 0.4:
                gate.expire()
                if rng.random() < 0.5:
                    gate.stream.run()

        found, (launched, used) = walk(path, OPTIONS, between)
    assert found == plain
    assert 5 < used < launched - 5


def test_control_padding_that_is_somebodys_row_shows(
    path: Path, plain: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step before once more would not: its state is written where it lies already."""

    def pad(self: InputWriter, graph: Any) -> None:
        into = self._arrays(graph, 1 - self._row_block)
        into.rows[:] = (0, 100, 0, 0)
        into.cells[:] = 3

    monkeypatch.setattr(InputWriter, "pad_next", pad)
    with streamed(monkeypatch, eager=True) as gate:
        found, _ = walk(path, OPTIONS, lambda runner, i: gate.expire() if gate.is_shut and i % 3 == 0 else None)
    assert found != plain


def test_with_a_draft_head(monkeypatch: pytest.MonkeyPatch) -> None:
    require_libraries()
    options = replace(OPTIONS, mtp=True, n_ctx=320)
    expected, _ = walk(luce_tiny_path(), options)
    with streamed(monkeypatch, eager=True) as gate:
        found, (_, used) = walk(luce_tiny_path(), options)
        assert found == expected and used > 75
        found, _ = walk(
            luce_tiny_path(), options, lambda runner, i: gate.expire() if gate.is_shut and i % 3 == 0 else None
        )
    assert found == expected


def test_inputs_that_cannot_be_written_open_the_gate(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = list(range(1, 40))
    with TrunkRunner(path, OPTIONS) as runner:
        state = runner.new_sequence()
        expected = np.asarray(
            [runner.prefill(state, tokens), *(runner.decode([(state, 5)])[0] for _ in range(3))]
        ).tobytes()
    whole = PleTable.gather_few

    def fails(self: PleTable, ids: Any, address: int) -> Any:
        raise ModelError("the table is gone")

    with streamed(monkeypatch, eager=False) as gate, TrunkRunner(path, OPTIONS) as runner:
        state, other = runner.new_sequence(), runner.new_sequence()
        runner.prefill(state, [9, 8, 7])
        runner.prefill(other, tokens)
        for _ in range(REPEATS + 2):
            runner.decode_rows([(state, 5)], [False])
        assert gate.is_shut
        monkeypatch.setattr(PleTable, "gather_few", fails)
        with pytest.raises(ModelError, match="the table is gone"):
            runner.decode_rows([(state, 5)], [False])
        assert not gate.is_shut and not gate.stream.queue
        monkeypatch.setattr(PleTable, "gather_few", whole)
        found = [*(runner.decode([(other, 5)])[0] for _ in range(3))]
        state.clear()
        first = runner.prefill(state, tokens)
        assert np.asarray([first, *found]).tobytes() == expected, "neither this sequence nor another is any the worse"


@pytest.mark.parametrize("opened", [False, True])
def test_a_row_without_a_choice(path: Path, opened: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its logits are still there, unless the step behind has begun."""
    with streamed(monkeypatch, eager=False) as gate, TrunkRunner(path, OPTIONS) as runner:
        state = runner.new_sequence()
        runner.prefill(state, [9, 8, 7])
        for _ in range(REPEATS + 2):
            runner.decode_rows([(state, 5)], [False])
        runner.poison_free_state()
        runner._pool._free_slots.append(state.slot)  # poison what it holds, too
        runner.poison_free_state()
        runner._pool._free_slots.remove(state.slot)
        if opened:
            monkeypatch.setattr(gate, "claim", lambda: gate.is_shut and runner._early._waiting is None)  # type: ignore[union-attr]
        (row,) = runner.decode_rows([(state, 5)], [False])
        assert row == -1 if opened else np.isnan(row).all()


def test_closing_opens_the_gate(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with streamed(monkeypatch, eager=False) as gate:
        with TrunkRunner(path, OPTIONS) as runner:
            state = runner.new_sequence()
            runner.prefill(state, [9, 8, 7])
            for _ in range(REPEATS + 2):
                runner.decode_rows([(state, 5)], [False])
            assert gate.is_shut
        assert not gate.is_shut and not gate.stream.queue


def test_nothing_waits_where_memory_may_be_read_too_early(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with streamed(monkeypatch, eager=False):
        monkeypatch.setattr(Staging, "is_locked", False)
        _, counts = walk(path, OPTIONS)
    assert counts == (0, 0)


def test_the_cpu_has_no_gate() -> None:
    require_libraries()
    with Backend("cpu") as backend:
        assert StreamGate.for_backend(backend) is None
