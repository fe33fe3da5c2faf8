"""Logits against libllama from the same source tree: upstream's own graph, another path through the same patched ggml.

Within the selection budget attention is dense; beyond it both must select the same blocks, ties to the lower index.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from pyluce.native import LlamaContext
from pyluce.native.ggml import GGMLType
from tests.support.compare import assert_close, distance
from tests.support.models import ORACLE_EOS, ORACLE_SHAPE, SMOOTH_SHAPE, WEIGHT_TYPES, ModelCache
from tests.support.runs import decode_one_by_one, open_runner, prompt_tokens

N_CTX = 1024


def llama_logits(model: Path, tokens: Sequence[int], n_ubatch: int = 512) -> np.ndarray:
    """Logits of every token [T, n_vocab]: F32 cache, no flash attention, weights as stored."""
    with LlamaContext(
        model, n_ctx=N_CTX, n_batch=N_CTX, n_ubatch=n_ubatch, kv_type=GGMLType.F32, repack=False
    ) as context:
        return np.array(context.decode(list(tokens), want="all"))


def runner_logits(model: Path, tokens: Sequence[int], n_prompt: int, **options: object) -> np.ndarray:
    """Logits of every token: the first n_prompt by chunk graphs, the rest row by row."""
    with open_runner(model, n_ctx=N_CTX, kv_type="f32", **options) as runner:
        state = runner.new_sequence()
        prompt = np.array(runner.prefill(state, list(tokens[:n_prompt]), want="all"))
        return np.concatenate([prompt, decode_one_by_one(runner, state, tokens[n_prompt:])])


def tokens_of(n: int, eos_at: Sequence[int] = ()) -> list[int]:
    return prompt_tokens(n, 100 + n, ORACLE_SHAPE.n_vocab, ORACLE_EOS, eos_at)


def test_within_the_budget(model_cache: ModelCache) -> None:
    n = ORACLE_SHAPE.indexer_top_k + 2
    tokens, model = tokens_of(n, (9, n - 2)), model_cache.oracle()
    print(assert_close(runner_logits(model, tokens, n - 10), llama_logits(model, tokens), f"{n} tokens"))


@pytest.mark.parametrize("n", (70, 600))
def test_beyond_the_budget(model_cache: ModelCache, n: int) -> None:
    tokens, model = tokens_of(n, (3, 33, n - 5)), model_cache.oracle()
    print(assert_close(runner_logits(model, tokens, n - 30), llama_logits(model, tokens), f"{n} tokens"))


def test_control_ties_to_the_higher_block(model_cache: ModelCache) -> None:
    tokens, model = tokens_of(200), model_cache.oracle()
    found = distance(runner_logits(model, tokens, 150, debug_fault="tie_high"), llama_logits(model, tokens))
    assert found.max_abs > 1e-2, found


@pytest.mark.parametrize("weight_type", WEIGHT_TYPES)
def test_every_type_agrees_to_its_rounding(model_cache: ModelCache, weight_type: str) -> None:
    """Within the budget and with every expert in use, where rounding cannot flip a choice.

    Both sides round activations alike (to 8 bits for quantised weights) but from values that differ in the last bits of
    float32: rows agree like float32 until one value falls on the other side, and to that rounding from then on, as
    libllama does with itself when its weights are repacked.
    """
    n = SMOOTH_SHAPE.indexer_top_k + 2
    tokens, model = prompt_tokens(n, 5, SMOOTH_SHAPE.n_vocab, ORACLE_EOS, (9, n - 2)), model_cache.smooth(weight_type)
    expected = llama_logits(model, tokens)
    for repack in (False, True):
        logits = runner_logits(model, tokens, n - 8, repack=repack)
        gaps = np.abs(logits - expected).max(axis=1)
        error = float(np.sqrt(np.mean((logits - expected) ** 2)) / expected.std())
        print(f"{weight_type}, repack {repack}: {distance(logits, expected)}, relative error {error:.1e}")
        assert gaps.min() < 1e-5, f"repack {repack}: no row agrees like float32, the best is {gaps.min():.1e} off"
        if weight_type == "F32":
            assert gaps.max() < 1e-4, f"repack {repack}: {gaps.max():.1e}"
        else:
            assert error < 0.03, f"repack {repack}: relative error {error:.1e}"
