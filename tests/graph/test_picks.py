"""Counted picks: that they are the experts which really computed, and that counting changes nothing."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from pyluce.graph import RunnerOptions, TrunkRunner
from pyluce.memory.experts import route_shape
from pyluce.placement.counts import RouteCounter
from pyluce.weights import open_model
from tests.support.compare import assert_same_bytes
from tests.support.device import DEVICE
from tests.support.models import ModelCache, model_cache

__all__ = ["model_cache"]

PROMPT = [5, 90, 17]
NEXT = [33, 7]


def options() -> RunnerOptions:
    return RunnerOptions(n_ctx=64, n_slots=2, chunk_tokens=16, max_rollback=2, device=DEVICE, repack=False)


def run(model: Path, counter: RouteCounter | None, prompt: Sequence[int] = PROMPT) -> np.ndarray:
    """Logits of a prompt by chunk, and of further tokens by rows."""
    with TrunkRunner(model, options(), routes=counter) as runner:
        state = runner.new_sequence()
        rows = [np.asarray(runner.prefill(state, prompt))]
        rows.extend(runner.decode([(state, token)])[0] for token in NEXT)
        return np.stack(rows)


def counter_of(model: Path) -> RouteCounter:
    with open_model(model) as file:
        return RouteCounter(route_shape(file.hparams))


def spoil(model: Path, to: Path, experts: Sequence[tuple[int, int]]) -> Path:
    """A copy of the model in which these experts, (layer, id), hold other weights."""
    shutil.copy(model, to)
    with open_model(model) as file, to.open("r+b") as out:
        for layer, expert in experts:
            for part in ("gate", "up", "down"):
                info = file.tensors[f"blk.{layer}.ffn_{part}_exps.weight"]
                size = info.nbytes // info.ne[2]
                out.seek(info.offset + expert * size)
                out.write(np.full(size // 4, 3.5, np.float32).tobytes())
    return to


@pytest.fixture(scope="module")
def model(model_cache: ModelCache) -> Path:
    return model_cache.tiny("F32")


def test_counting_changes_nothing_and_finds_every_row(model: Path) -> None:
    counter = counter_of(model)
    assert_same_bytes(run(model, counter), run(model, None), "with counting")
    assert counter.n_rows == len(PROMPT) + len(NEXT)
    shape = counter.shape
    assert counter.counts.sum(axis=1).tolist() == [counter.n_rows * shape.n_used] * shape.n_layer


def test_the_counted_experts_are_those_that_compute(model: Path, tmp_path: Path) -> None:
    """Experts without a count can hold anything; of those with one, each matters."""
    counter = counter_of(model)
    expected = run(model, counter)
    idle = [(int(layer), int(expert)) for layer, expert in np.argwhere(counter.counts == 0)]
    used = [(int(layer), int(expert)) for layer, expert in np.argwhere(counter.counts > 0)]
    assert len(idle) > 5
    assert_same_bytes(
        run(spoil(model, tmp_path / "idle.gguf", idle), None), expected, "other weights in what is not picked"
    )
    for one in (used[0], used[len(used) // 2], used[-1]):
        found = run(spoil(model, tmp_path / "used.gguf", [one]), None)
        assert not np.array_equal(found, expected), f"expert {one} was counted, and does not matter"


def test_rows_of_several_sequences_and_drafts_that_are_taken_back(model: Path) -> None:
    """What one sequence picks does not depend on the other, so the counts of both add up; rows that are taken back count."""
    alone = []
    for prompt in (PROMPT, NEXT):
        counter = counter_of(model)
        with TrunkRunner(model, options(), routes=counter) as runner:
            state = runner.new_sequence()
            runner.prefill(state, prompt)
            runner.decode([(state, 9), (state, 11)])
            state.rollback(1)
            runner.decode([(state, 12)])
        assert counter.n_rows == len(prompt) + 3
        alone.append(counter.counts)
    both = counter_of(model)
    with TrunkRunner(model, options(), routes=both) as runner:
        states = [runner.new_sequence(), runner.new_sequence()]
        for state, prompt in zip(states, (PROMPT, NEXT), strict=True):
            runner.prefill(state, prompt)
        runner.decode([(state, token) for state in states for token in (9, 11)])
        for state in states:
            state.rollback(1)
        runner.decode([(state, 12) for state in states])
    assert np.array_equal(both.counts, alone[0] + alone[1])
