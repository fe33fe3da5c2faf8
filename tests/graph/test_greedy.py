"""`decode_greedy`: the token with the largest logit, of every row, wherever it stands."""

from __future__ import annotations

import numpy as np

from pyluce.graph import RunnerOptions, TrunkRunner
from pyluce.native import luce
from tests.support.device import DEVICE
from tests.support.models import luce_tiny_path
from tests.support.op_bench import OpBench


def test_argmax_ties_and_nan() -> None:
    logits = np.random.default_rng(3).standard_normal((5, 1000)).astype(np.float32)
    logits[0, [700, 20, 999]] = 9.0
    logits[1] = -np.inf
    logits[2, [5, 8]] = [np.nan, 50.0]
    logits[3] = [0.0, *[-0.0] * 999]
    logits[4, 999] = 7.0
    with OpBench({"logits": logits}) as bench:
        found = bench.run(lambda c, t: luce.ggml_luce_argmax(c, t["logits"]), np.int32)
    assert found.ravel().tolist() == [20, 0, -1, 0, 999]


def test_same_tokens_as_from_logits() -> None:
    prompts = [[5, 6, 7], list(range(40, 110)), [9]]
    chosen: list[list[list[int]]] = []
    for greedy in (False, True):
        with TrunkRunner(luce_tiny_path(), RunnerOptions(n_ctx=256, n_slots=3, device=DEVICE)) as runner:
            states = [runner.new_sequence() for _ in prompts]
            tokens = [int(np.argmax(runner.prefill(s, p))) for s, p in zip(states, prompts, strict=True)]  # type: ignore[arg-type]
            steps = []
            for step in range(6):
                order = [step % 3, (step + 1) % 3, (step + 2) % 3]
                rows = [(states[i], tokens[i]) for i in order]
                best = runner.decode_greedy(rows) if greedy else [int(np.argmax(x)) for x in runner.decode(rows)]
                for i, token in zip(order, best, strict=True):
                    tokens[i] = token
                steps.append(list(tokens))
            chosen.append(steps)
    assert chosen[0] == chosen[1]
