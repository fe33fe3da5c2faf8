"""Logits of rows that callers keep, written by a device into memory that it uses again: they stay as they are.

The CPU runs the GPU's way of results here (see test_device_path.py), in arrays of a host buffer type as a GPU has them; a GPU with
`LUCE_TEST_DEVICE=cuda:0`.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyluce import Luce
from pyluce.engine import GenerationRequest
from pyluce.graph import RunnerOptions, TrunkRunner, results
from pyluce.graph.copies import MOST_ARRAYS, SMALLEST
from pyluce.native import NativeError, host_array
from pyluce.native.backend import Backend
from pyluce.native.ggml_backend import ggml_backend_cpu_buffer_type
from pyluce.native.reset import reset_device
from tests.graph.test_device_path import like_a_gpu
from tests.support.device import BACKEND, DEVICE, LOAD_OPTIONS, ON_GPU, load
from tests.support.models import ModelCache, model_cache  # noqa: F401
from tests.support.real_model import require_libraries

OPTIONS = RunnerOptions(n_ctx=256, n_slots=4, chunk_tokens=64, repack=ON_GPU, device=DEVICE)


@pytest.fixture
def freed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Buffers of results that were freed. Runners made here read them as a GPU's."""
    require_libraries()
    load()
    pointers: list[int] = []
    free = host_array._free

    def noted(guard: Any, pointer: int) -> None:
        pointers.append(pointer)
        free(guard, pointer)

    monkeypatch.setattr(host_array, "_free", noted)
    with ExitStack() as stack:
        if not ON_GPU:
            stack.enter_context(like_a_gpu(monkeypatch))
            locked = partial(host_array.host_array, ggml_backend_cpu_buffer_type())
            monkeypatch.setattr(results, "_arrays_of", lambda backend: locked)
        yield pointers


@pytest.fixture
def path(model_cache: ModelCache) -> Path:  # noqa: F811
    return Path(model_cache.tiny("Q8_0"))


Step = Callable[..., list[Any]]


def stepping(runner: TrunkRunner, n: int = 3) -> Step:
    """`step(wants)`: the next row of so many sequences."""
    states = [runner.new_sequence() for _ in range(n)]
    for i, state in enumerate(states):
        runner.prefill(state, [5, 6, 7 + i])
    rng = np.random.default_rng(3)

    def step(*wants: bool) -> list[Any]:
        return runner.decode_rows([(s, int(rng.integers(1, 250))) for s, _ in zip(states, wants, strict=False)], wants)

    return step


WANTS = [(True, True, True), (True,), (False, True, False), (True, True), (False, False), (True, False, True)]


def test_what_is_held_stays_and_is_the_same_as_what_is_dropped(path: Path, freed: list[int]) -> None:
    """All of it, far more than the memory that is used again; then some of it, as it comes."""

    def walk(keep: Callable[[int], bool]) -> list[list[bytes]]:
        with TrunkRunner(path, OPTIONS) as runner:
            step = stepping(runner)
            seen: list[list[bytes]] = []
            held: dict[int, list[Any]] = {}
            for i in range(4 * len(WANTS)):
                rows = step(*WANTS[i % len(WANTS)])
                seen.append([np.asarray(row).tobytes() for row in rows])
                if keep(i):
                    held[i] = rows[-1:] if i % 2 else rows  # one row holds its array as well
                held.pop(i - 9, None)
                del rows
                for j, those in held.items():
                    assert [np.asarray(row).tobytes() for row in those] == seen[j][-len(those) :], f"{j} after {i}"
            assert runner._results.host_bytes <= MOST_ARRAYS * SMALLEST
            return seen

    alone = walk(lambda i: False)
    assert walk(lambda i: True) == alone
    assert walk(lambda i: i % 3 != 1) == alone


def test_memory_is_used_again_and_its_amount_is_bounded(path: Path, freed: list[int]) -> None:
    with TrunkRunner(path, OPTIONS) as runner:
        step = stepping(runner)

        def place(rows: list[Any]) -> int:
            return int(rows[0].ctypes.data)

        first = place(step(True, True, True))
        assert [place(step(True, True, True)) for _ in range(3)] == [first] * 3
        held = [step(True, True, True) for _ in range(MOST_ARRAYS + 2)]
        assert len({place(rows) for rows in held}) == len(held)
        assert runner._results.host_bytes == MOST_ARRAYS * SMALLEST, "the last two have memory of their own"
        assert isinstance(step(False)[0], int), "and a token alone is read even so"
        lasting = held[0][1]
        assert first == place(held[0])
        held.clear()
        assert place(step(True, True)) != first, "one row of the three is held"
        del lasting
        assert place(step(True, True)) == first
        assert not freed


def test_decode_gives_rows_in_the_order_asked_for(path: Path, freed: list[int]) -> None:
    with TrunkRunner(path, OPTIONS) as runner:
        a, b = runner.new_sequence(), runner.new_sequence()
        for state in (a, b):
            runner.prefill(state, [5, 6, 7])
        mixed = runner.decode([(a, 8), (b, 9), (a, 10)])
        a.rollback(2)
        b.rollback(1)
        rows = [(a, 8), (a, 10), (b, 9)]
        assert runner.decode(rows)[[0, 2, 1]].tobytes() == mixed.tobytes()


def test_what_is_held_outlives_the_runner(path: Path, freed: list[int]) -> None:
    with TrunkRunner(path, OPTIONS) as runner:
        step = stepping(runner)
        held = [step(True, True), step(True, True)]
        step(True, True)
        row = held[1][1]
        expected = [row.tobytes(), *(row.tobytes() for row in held[0])]
        del held[1]
    assert len(freed) == 1, "of three arrays the one that nobody holds"
    with TrunkRunner(path, OPTIONS) as runner:
        step = stepping(runner)
        for _ in range(3):
            step(True, True)
    assert [row.tobytes(), *(row.tobytes() for row in held[0])] == expected
    freed.clear()
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    assert len(freed) == 1, "by whichever thread lets go of it"
    del row
    assert len(freed) == 2


def test_memory_that_cannot_be_had_is_an_error(freed: list[int]) -> None:
    with Backend(DEVICE), pytest.raises(NativeError, match="expected 4611686018427387904 bytes of host memory"):
        host_array.host_array(ggml_backend_cpu_buffer_type(), 1 << 62)


def test_an_engine_holds_nothing_while_it_is_parked(path: Path, freed: list[int]) -> None:
    """A device is not reset while memory of its is held."""
    made: list[int] = []
    make = host_array._Memory.__init__

    def noted(self: Any, pointer: int, n_bytes: int) -> None:
        made.append(pointer)
        make(self, pointer, n_bytes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_array._Memory, "__init__", noted)
        with Luce.load(path, max_ctx=256, max_concurrency=2, prefix_cache_mib=16, **LOAD_OPTIONS) as luce:
            for seed in range(3):
                request = GenerationRequest((5, 6, 7 + seed), max_tokens=8, n_logprobs=2, ignore_end=True)
                assert len(list(luce.run(request))) > 8
            luce.park(discard=True)
            gc.collect()
            assert made and sorted(freed) == sorted(made)


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
def test_a_device_is_not_reset_under_what_is_held(path: Path, freed: list[int]) -> None:
    with TrunkRunner(path, OPTIONS) as runner:
        row = stepping(runner)(True)[0]
        expected = row.tobytes()
    if BACKEND == "cuda":
        with pytest.raises(NativeError, match="still use the device"):
            reset_device(DEVICE)
    assert row.tobytes() == expected


def test_control_memory_that_is_used_too_soon_shows(path: Path, freed: list[int]) -> None:
    with TrunkRunner(path, OPTIONS) as runner:
        step = stepping(runner)
        runner._results._arrays._alone += 2  # the holders that the two rows are
        held = step(True, True)
        before = [row.tobytes() for row in held]
        step(True, True)
        assert [row.tobytes() for row in held] != before
