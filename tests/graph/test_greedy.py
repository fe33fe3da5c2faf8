"""`decode_rows`: of a row its logits or only the token with the largest one, wherever it stands and whatever the others want."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pyluce.graph import RunnerOptions, TrunkRunner
from pyluce.native import luce
from pyluce.native.tensors import tensor_get, tensor_set, tensor_struct
from tests.support.device import DEVICE, only_cpu
from tests.support.models import luce_tiny_path
from tests.support.op_bench import OpBench


def test_argmax_ties_and_nan() -> None:
    logits = np.random.default_rng(3).standard_normal((8, 1000)).astype(np.float32)
    logits[0, [700, 20, 999]] = 9.0
    logits[1] = -np.inf
    logits[2, [5, 8]] = [np.nan, 50.0]
    logits[3] = [0.0, *[-0.0] * 999]
    logits[4, 999] = 7.0
    logits[5, [30, 40]] = np.inf
    logits[6, :999] = -np.inf
    logits[7, :] = np.finfo(np.float32).max
    with OpBench({"logits": logits}) as bench:
        found = bench.run(lambda c, t: luce.ggml_luce_argmax(c, t["logits"]), np.int32)
    assert found.ravel().tolist() == [20, -1, -1, 0, 999, -1, 999, 0]


Step = list[tuple[int, bool, Any]]  # of each row its sequence, whether it wants logits, what came


def steps_of(wants: Callable[[int, int], bool]) -> list[Step]:
    """Greedy steps of three sequences; `wants(step, sequence)`: the logits of this row."""
    prompts = [[5, 6, 7], list(range(40, 110)), [9]]
    steps: list[Step] = []
    with TrunkRunner(luce_tiny_path(), RunnerOptions(n_ctx=256, n_slots=3, device=DEVICE)) as runner:
        states = [runner.new_sequence() for _ in prompts]
        tokens = [int(np.argmax(runner.prefill(s, p))) for s, p in zip(states, prompts, strict=True)]  # type: ignore[arg-type]
        for step in range(6):
            order = [step % 3, (step + 1) % 3, (step + 2) % 3]
            wanted = [wants(step, i) for i in order]
            found = runner.decode_rows([(states[i], tokens[i]) for i in order], wanted)
            steps.append(list(zip(order, wanted, found, strict=True)))
            for i, row in zip(order, found, strict=True):
                tokens[i] = row if isinstance(row, int) else int(np.argmax(row))
    return steps


def test_same_tokens_and_bits_whoever_wants_logits() -> None:
    whole = steps_of(lambda step, i: True)
    for wants in (lambda step, i: False, lambda step, i: (step + i) % 2 == 0, lambda step, i: i == 1):
        for expected, found in zip(whole, steps_of(wants), strict=True):
            for (i, _, logits), (j, wanted, row) in zip(expected, found, strict=True):
                assert i == j and isinstance(row, int) != wanted
                assert row.tobytes() == logits.tobytes() if wanted else row == int(np.argmax(logits))


def test_rows_of_one_sequence_and_what_is_refused() -> None:
    with TrunkRunner(luce_tiny_path(), RunnerOptions(n_ctx=256, n_slots=2, device=DEVICE)) as runner:
        states = [runner.new_sequence() for _ in range(4 // 2)]
        for state in states:
            runner.prefill(state, [5, 6, 7])
        rows = [(states[0], 8), (states[1], 9), (states[0], 10)]
        expected = runner.decode(rows)
        for state, count in zip(states, (2, 1), strict=True):
            state.rollback(count)
        found = runner.decode_rows(rows, [False, True, True])
        assert found[0] == int(np.argmax(expected[0]))
        assert [np.asarray(row).tobytes() for row in found[1:]] == [row.tobytes() for row in expected[1:]]
        with pytest.raises(ValueError, match="expected one for each of 1 rows, found 2"):
            runner.decode_rows([(states[0], 8)], [True, False])


@only_cpu  # a GPU's row products quantise what they read, and a NaN with it: it does not reach the logits
def test_a_row_without_a_choice_has_its_logits() -> None:
    with TrunkRunner(luce_tiny_path(), RunnerOptions(n_ctx=256, n_slots=2, device=DEVICE)) as runner:
        good, bad = runner.new_sequence(), runner.new_sequence()
        for state in (good, bad):
            runner.prefill(state, [5, 6, 7])
        for tensor in runner._pool.gdn.values():
            # the ring of one slot is spoilt: its rows are NaN, the other's are none the worse
            header = tensor_struct(tensor)
            values = tensor_get(tensor, np.float32, (header.ne[2], header.ne[1], header.ne[0]))
            values[bad.slot] = np.nan
            tensor_set(tensor, values)
        found = runner.decode_rows([(bad, 8), (good, 8)], [False, False])
        assert isinstance(found[1], int)
        assert np.isnan(found[0]).any()
