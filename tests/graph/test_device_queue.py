"""A device that does things when their turn comes: the same bits, whether it begins at once or when somebody waits.

The CPU runs the GPU's way of inputs and results here (see test_device_path.py), behind a queue like a device's stream: everything in
order, copies reading and writing host memory when they are done.
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
from pyluce.graph.results import ResultReader
from pyluce.graph.staging import Staging
from pyluce.native.backend import Backend
from pyluce.weights import ModelError, ModelFile, PleTable
from tests.graph.test_device_path import like_a_gpu
from tests.support.device import only_cpu
from tests.support.models import ModelCache, luce_tiny_path, model_cache  # noqa: F401
from tests.support.real_model import require_libraries

OPTIONS = RunnerOptions(n_ctx=320, n_slots=3, chunk_tokens=64, repack=False)
Work = Callable[[], object]

pytestmark = only_cpu


@contextmanager
def queued(monkeypatch: pytest.MonkeyPatch, eager: bool) -> Iterator[list[Work]]:
    """Runners made here have a queue, emptied at once (`eager`) or when somebody waits."""
    queue: list[Work] = []
    send, start, fetch, attach = Staging.send, Backend.start, Backend.fetch, ModelFile.attach_draft

    def run() -> None:
        while queue:
            queue.pop(0)()

    def add(work: Work) -> None:
        queue.append(work)
        if eager:
            run()

    with like_a_gpu(monkeypatch), monkeypatch.context() as patch:
        patch.setattr(Staging, "send", lambda *a: add(lambda: send(*a)))
        patch.setattr(Backend, "start", lambda *a: add(lambda: start(*a)))
        patch.setattr(Backend, "fetch", lambda *a: add(lambda: fetch(*a)))
        patch.setattr(Backend, "wait", lambda self: run())
        patch.setattr(ModelFile, "attach_draft", lambda self, **_: attach(self, embedding=True))
        yield queue


def walk(path: Path, options: RunnerOptions) -> list[bytes]:
    """Rows in many shapes, with what can come between; what every row gave."""
    rng = np.random.default_rng(7)
    found: list[bytes] = []
    with TrunkRunner(path, options) as runner:

        def rows(steps: int, *states: Any, wants: bool | None = None, drafts: int = 0) -> None:
            for _ in range(steps):
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
        rows(4, a, wants=False)
        prompt(b, 61)
        rows(4, a, b)
        a.rollback(3)
        copy = a.copy()  # shares its pages: whoever writes first gets one of its own
        rows(3, b, copy)
        rows(3, a, wants=True)
        prompt(copy, 20)
        snapshot = copy.snapshot()
        copy.free()
        c = runner.new_sequence()
        c.restore(snapshot)
        rows(3, a, b, a, c)
        if options.mtp:
            rows(3, a, b, drafts=2)
        b.free()
        runner.poison_free_state()
        b = runner.new_sequence()
        prompt(b, 60)
        rows(8, b, wants=False)  # across a page
        return found


@pytest.fixture
def path(model_cache: ModelCache) -> Path:  # noqa: F811
    require_libraries()
    return Path(model_cache.tiny("Q8_0"))


@pytest.mark.parametrize("eager", [False, True])
def test_the_same_bits_soon_or_late(path: Path, eager: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = walk(path, OPTIONS)
    with queued(monkeypatch, eager):
        assert walk(path, OPTIONS) == expected


def test_with_a_draft_head(monkeypatch: pytest.MonkeyPatch) -> None:
    require_libraries()
    options = replace(OPTIONS, mtp=True)
    expected = walk(luce_tiny_path(), options)
    with queued(monkeypatch, eager=False):
        assert walk(luce_tiny_path(), options) == expected


def test_control_results_that_are_read_too_soon_show(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = walk(path, OPTIONS)
    whole = ResultReader.rows

    def hasty(self: ResultReader, asked: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(Backend, "wait", lambda self: None)
            return whole(self, asked)

    with queued(monkeypatch, eager=False):
        monkeypatch.setattr(ResultReader, "rows", hasty)
        assert walk(path, OPTIONS) != expected


def test_inputs_that_cannot_be_written_leave_nothing_under_way(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = list(range(1, 40))

    def three(runner: TrunkRunner, state: Any) -> bytes:
        return np.asarray([runner.decode([(state, 5)])[0] for _ in range(3)]).tobytes()

    with TrunkRunner(path, OPTIONS) as runner:
        state = runner.new_sequence()
        first = np.asarray(runner.prefill(state, tokens)).tobytes()
        expected = three(runner, state)

    def fails(self: PleTable, ids: Any, address: int) -> Any:
        raise ModelError("the table is gone")

    with queued(monkeypatch, eager=False) as queue, TrunkRunner(path, OPTIONS) as runner:
        state, other = runner.new_sequence(), runner.new_sequence()
        runner.prefill(state, [9, 8, 7])
        runner.prefill(other, tokens)
        with monkeypatch.context() as patch:
            patch.setattr(PleTable, "gather_few", fails)
            with pytest.raises(ModelError, match="the table is gone"):
                runner.decode_rows([(state, 5)], [False])
        assert not queue
        state.clear()
        assert np.asarray(runner.prefill(state, tokens)).tobytes() == first, "neither this sequence"
        assert three(runner, other) == expected, "nor another is any the worse"
