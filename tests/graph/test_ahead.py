"""Chunks whose inputs were prepared while the one before computed: the same bits, errors in their place, nothing counted in vain.

The CPU runs the GPU's way of inputs here (see test_device_path.py).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyluce.graph import TrunkRunner
from pyluce.graph.ahead import Ahead, Stretch
from pyluce.graph.inputs import InputWriter
from pyluce.weights import GatherCounts, ModelError, PleTable
from tests.graph.test_device_path import OPTIONS, like_a_gpu
from tests.support.models import ModelCache, model_cache  # noqa: F401
from tests.support.real_model import require_libraries

CHUNK = OPTIONS.chunk_tokens


@pytest.fixture
def path(model_cache: ModelCache) -> Path:  # noqa: F811
    require_libraries()
    return Path(model_cache.tiny("Q8_0"))


@pytest.fixture
def runner(path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TrunkRunner]:
    with like_a_gpu(monkeypatch):
        runner = TrunkRunner(path, OPTIONS)
    with runner as made:
        assert made._inputs.ahead is not None
        yield made


def prompt(n: int, seed: int = 5) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(1, 250, n)]


def used(runner: TrunkRunner) -> int:
    assert runner._inputs.ahead is not None
    return runner._inputs.ahead.used


def in_place(path: Path, tokens: list[int]) -> bytes:
    """Logits of every row, with inputs that the step itself writes into the tensors."""
    with TrunkRunner(path, OPTIONS) as plain:
        assert plain._inputs.ahead is None, "on the CPU the device's threads are the host's"
        return np.asarray(plain.prefill(plain.new_sequence(), tokens, want="all")).tobytes()


def test_the_same_bits_and_every_chunk_but_the_first_prepared(path: Path, runner: TrunkRunner) -> None:
    tokens = prompt(4 * CHUNK + 21)
    found = np.asarray(runner.prefill(runner.new_sequence(), tokens, want="all")).tobytes()
    assert used(runner) == 4
    assert found == in_place(path, tokens)


def test_control_wrong_rows_prepared_show(path: Path, runner: TrunkRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = InputWriter._fill

    def late(self: InputWriter, stretch: Stretch, block: int) -> GatherCounts:
        return whole(self, Stretch((), stretch.first, stretch.tokens, stretch.n_rows), block)

    monkeypatch.setattr(InputWriter, "_fill", late)
    runner._inputs.ahead._fill = runner._inputs._fill  # type: ignore[union-attr]
    tokens = prompt(2 * CHUNK)
    found = np.asarray(runner.prefill(runner.new_sequence(), tokens, want="all")).tobytes()
    assert used(runner) == 1
    assert found != in_place(path, tokens)


def test_chunks_one_by_one_with_other_steps_between(path: Path, runner: TrunkRunner) -> None:
    """As the batch core does it: a hint, a chunk, rows of another sequence, the hinted chunk."""
    tokens, other = prompt(3 * CHUNK), prompt(CHUNK, 9)
    second = runner.new_sequence()
    runner.prefill(second, other)
    state, parts = runner.new_sequence(), []
    for begin in range(0, len(tokens), CHUNK):
        if begin + CHUNK < len(tokens):
            runner.expect(tokens, begin + CHUNK, begin + 2 * CHUNK)
        parts.append(np.asarray(runner.prefill(state, tokens[begin : begin + CHUNK], want="all")))
        runner.decode([(second, 3), (second, 4)])
    assert used(runner) == 2
    assert np.concatenate(parts).tobytes() == in_place(path, tokens)


def test_a_wrong_hint_changes_nothing(path: Path, runner: TrunkRunner) -> None:
    tokens = prompt(2 * CHUNK)
    changed = [*tokens[: CHUNK - 1], tokens[CHUNK - 1] + 1, *tokens[CHUNK:]]  # the same chunk after another token
    state = runner.new_sequence()
    runner.expect(changed, CHUNK, 2 * CHUNK)
    parts = [np.asarray(runner.prefill(state, tokens[:CHUNK], want="all"))]
    parts.append(np.asarray(runner.prefill(state, tokens[CHUNK:], want="all")))
    assert used(runner) == 0
    assert np.concatenate(parts).tobytes() == in_place(path, tokens)
    with pytest.raises(ValueError, match="expected an id from 0"):
        runner.expect([1, -2], 1, 2)
    with pytest.raises(ValueError, match="expected a part of a prompt of 2 tokens, found 1 to 3"):
        runner.expect([1, 2], 1, 3)


def test_rows_of_a_chunk_that_never_runs_are_not_counted(runner: TrunkRunner) -> None:
    tokens = prompt(2 * CHUNK)
    runner.expect(tokens, CHUNK, 2 * CHUNK)
    runner.prefill(runner.new_sequence(), tokens[:CHUNK])
    assert runner._inputs.ahead is not None and runner._ple is not None
    runner._inputs.ahead.drop()
    ple = runner.hparams.ple
    assert ple is not None
    assert runner._ple.rows_requested == CHUNK * ple.n_heads


def test_an_error_is_raised_by_the_chunk_it_belongs_to(
    path: Path, runner: TrunkRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = prompt(2 * CHUNK)
    whole = PleTable.gather_into

    def fails(self: PleTable, ids: Any, out: Any) -> GatherCounts:
        if threading.current_thread() is not threading.main_thread():
            raise ModelError("the table is gone")
        return whole(self, ids, out)

    state = runner.new_sequence()
    monkeypatch.setattr(PleTable, "gather_into", fails)
    runner.expect(tokens, CHUNK, 2 * CHUNK)
    runner.prefill(state, tokens[:CHUNK])
    assert state.length == CHUNK, "the chunk before is none the worse"
    with pytest.raises(ModelError, match="the table is gone"):
        runner.prefill(state, tokens[CHUNK:])
    monkeypatch.setattr(PleTable, "gather_into", whole)
    state.clear()
    assert np.asarray(runner.prefill(state, tokens, want="all")).tobytes() == in_place(path, tokens)


def test_one_stretch_at_a_time_never_in_the_block_of_the_step() -> None:
    filled: list[tuple[int, int]] = []
    gate = threading.Event()

    def fill(stretch: Stretch, block: int) -> GatherCounts:
        gate.wait(10)
        filled.append((stretch.first, block))
        return GatherCounts(requested=stretch.first)

    a, b = Stretch((), 1, (5,), 16), Stretch((), 2, (5,), 16)
    ahead = Ahead(fill)
    assert ahead.take(a) is None and ahead.free_block == 0
    ahead.start(a, 0)
    assert ahead.free_block == 0, "the step's own"
    ahead.start(a, 0)  # again: it is under way
    gate.set()
    ahead.start(b, 0)  # waits for a
    assert filled[0] == (1, 1)
    assert ahead.take(a) is None
    assert ahead.take(b) == (1, GatherCounts(requested=2))
    ahead.start(a, 1)
    ahead.close()
    ahead.close()
    assert filled == [(1, 1), (2, 1), (1, 0)]
