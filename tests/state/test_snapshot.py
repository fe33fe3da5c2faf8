"""A snapshot restored into another slot is bit for bit what a cold run has there; each part left out is noticed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from pyluce.graph import RunnerOptions, TrunkRunner
from pyluce.state import SequenceState
from tests.support.device import DEVICE
from tests.support.models import ModelCache, model_cache  # noqa: F401
from tests.support.real_model import require_libraries

LENGTHS = (1, 3, 40, 63, 64, 65, 130)


@pytest.fixture(scope="module", params=["F32", "Q4_K"])
def runner(request: pytest.FixtureRequest, model_cache: ModelCache) -> Iterator[TrunkRunner]:  # noqa: F811
    require_libraries()
    options = RunnerOptions(n_ctx=256, n_slots=3, chunk_tokens=64, max_rollback=4, device=DEVICE)
    with TrunkRunner(model_cache.tiny(request.param), options) as runner:
        yield runner


def tokens(runner: TrunkRunner, n: int, seed: int = 0) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(1, runner.vocab_size, n)]


def go_on(runner: TrunkRunner, state: SequenceState, more: list[int]) -> list[bytes]:
    """Logits of a chunk of half of `more`, then of the rest row by row."""
    half = len(more) // 2
    logits = runner.prefill(state, more[:half], want="all")
    assert logits is not None
    rows = [runner.decode([(state, token)])[0] for token in more[half:]]
    return [row.tobytes() for row in (*logits, *rows)]


def cold(runner: TrunkRunner, prompt: list[int], more: list[int]) -> list[bytes]:
    state = runner.new_sequence()
    runner.prefill(state, prompt)
    out = go_on(runner, state, more)
    state.free()
    return out


@pytest.mark.parametrize("length", LENGTHS)
def test_restored_equals_cold(runner: TrunkRunner, length: int) -> None:
    prompt, more = tokens(runner, length), tokens(runner, 20, seed=1)
    expected = cold(runner, prompt, more)
    state = runner.new_sequence()
    logits = runner.prefill(state, prompt)
    snapshot = state.snapshot(logits)
    go_on(runner, state, tokens(runner, 30, seed=2))  # the owner goes on elsewhere: shared pages must not change
    state.free()
    runner.poison_free_state()
    other = runner.new_sequence()
    blocker = runner.new_sequence()
    other.restore(snapshot)
    assert snapshot.logits is not None and logits is not None and snapshot.logits.tobytes() == logits.tobytes()
    assert go_on(runner, other, more) == expected
    other.free()
    other = runner.new_sequence()
    other.restore(snapshot)
    assert go_on(runner, other, more) == expected, "a second use of the same snapshot"
    other.free()
    blocker.free()
    snapshot.close()
    snapshot.close()


@pytest.mark.parametrize("part", ["recurrent", "pages", "tokens"])
def test_a_part_left_out_is_noticed(runner: TrunkRunner, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt, more = tokens(runner, 70), tokens(runner, 20, seed=1)
    expected = cold(runner, prompt, more)
    state = runner.new_sequence()
    runner.prefill(state, prompt)
    snapshot = state.snapshot()
    state.free()
    if part == "recurrent":
        snapshot.recurrent = np.zeros_like(snapshot.recurrent)
    elif part == "pages":
        snapshot.pages = snapshot.pages[::-1]
    else:
        snapshot.tokens = tuple(tokens(runner, 70, seed=9))
    other = runner.new_sequence()
    other.restore(snapshot)
    assert go_on(runner, other, more) != expected
    other.free()
    snapshot.close()


def test_pages_are_held_until_the_snapshot_is_closed(runner: TrunkRunner) -> None:
    pool: Any = runner._pool
    free = pool.allocator.n_free
    state = runner.new_sequence()
    runner.prefill(state, tokens(runner, 70))
    snapshot = state.snapshot()
    state.free()
    assert pool.allocator.n_free == free - 2
    snapshot.close()
    assert pool.allocator.n_free == free


def test_a_snapshot_of_another_length_or_context_is_refused(runner: TrunkRunner) -> None:
    state = runner.new_sequence()
    runner.prefill(state, tokens(runner, 10))
    snapshot = state.snapshot()
    with pytest.raises(ValueError, match="expected an empty sequence"):
        state.restore(snapshot)
    state.clear()
    snapshot.tokens = snapshot.tokens[:1]
    with pytest.raises(ValueError, match="bytes of recurrent state at 1 tokens"):
        state.restore(snapshot)
    state.free()
    snapshot.close()
