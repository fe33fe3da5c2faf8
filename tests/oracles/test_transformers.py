"""Teacher-forced logits against `transformers` in float32: from committed fixtures, and live where torch is installed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.oracles.columns import FIXTURES, Reference
from tests.oracles.make_fixtures import LUCE_TINY_FIXTURE, TINY_FIXTURE, oracle_python, run_reference
from tests.support.compare import assert_close
from tests.support.models import ORACLE_EOS, ORACLE_SHAPE, ModelCache, luce_tiny_path
from tests.support.runs import decode_one_by_one, open_runner, prompt_tokens

LIMIT = 1e-4
N_CTX = 1024


def prefilled(model: Path, tokens: Sequence[int], **options: object) -> np.ndarray:
    """Logits of every token [T, n_vocab], by chunk graphs."""
    with open_runner(model, n_ctx=N_CTX, kv_type="f32", **options) as runner:
        return np.array(runner.prefill(runner.new_sequence(), list(tokens), want="all"))


def decoded(model: Path, tokens: Sequence[int], **options: object) -> np.ndarray:
    """Logits of every token [T, n_vocab], one row at a time."""
    with open_runner(model, n_ctx=N_CTX, kv_type="f32", **options) as runner:
        return decode_one_by_one(runner, runner.new_sequence(), tokens)


def check(reference: Reference, logits: np.ndarray, what: str) -> None:
    found, agreement = reference.max_difference(logits), reference.agreement(logits)
    print(f"{what}: max |difference| {found:.2e}, argmax agreement {agreement:.2%} over {len(logits)} tokens")
    assert found < LIMIT and agreement == 1.0, f"{what}: {found:.2e} from the reference, {agreement:.2%} argmax"


@pytest.fixture(scope="module")
def tiny(model_cache: ModelCache) -> tuple[Path, Reference]:
    reference = Reference.load(TINY_FIXTURE)
    model = model_cache.oracle()
    reference.check_model(model)
    assert len(reference.tokens) >= 1000 > 10 * ORACLE_SHAPE.indexer_top_k
    assert ORACLE_EOS in reference.tokens
    return model, reference


@pytest.mark.parametrize("run", (prefilled, decoded))
def test_random_model(tiny: tuple[Path, Reference], run: object) -> None:
    model, reference = tiny
    check(reference, run(model, reference.tokens.tolist()), run.__name__)  # type: ignore[operator, attr-defined]


def test_control_ties_to_the_higher_block(tiny: tuple[Path, Reference]) -> None:
    """The prompt reaches ties, and the comparison sees who wins them."""
    model, reference = tiny
    logits = prefilled(model, reference.tokens.tolist(), debug_fault="tie_high")
    assert reference.max_difference(logits) > 100 * LIMIT
    # up to the budget nothing is selected, so nothing may differ
    within = ORACLE_SHAPE.indexer_top_k
    assert np.abs(logits[:within][:, reference.columns] - reference.logits[:within]).max() < LIMIT


def luce_tiny_reference() -> Reference:
    if not LUCE_TINY_FIXTURE.exists():
        pytest.skip("no reference logits of luce-tiny are committed")
    reference = Reference.load(LUCE_TINY_FIXTURE)
    reference.check_model(luce_tiny_path())
    return reference


@pytest.mark.parametrize("run", (prefilled, decoded))
def test_luce_tiny(model_cache: ModelCache, run: object) -> None:
    """The shipped weights, widened to float32 for both."""
    reference = luce_tiny_reference()
    logits = run(model_cache.luce_tiny_f32(), reference.tokens.tolist())  # type: ignore[operator]
    check(reference, logits, f"luce-tiny, {run.__name__}")  # type: ignore[attr-defined]


@pytest.mark.parametrize("prompt", (0, 1, 2))
def test_luce_tiny_as_shipped(prompt: int) -> None:
    """The shipped file, quantised, against the float32 original that was trained: what quantisation costs, no more."""
    with np.load(FIXTURES / "luce_tiny_reference.npz") as stored:
        tokens, best = stored[f"tokens_{prompt}"].tolist(), stored[f"argmax_{prompt}"]
        positions, expected = stored[f"positions_{prompt}"], stored[f"logits_{prompt}"]
    with open_runner(luce_tiny_path(), n_ctx=N_CTX) as runner:
        logits = np.array(runner.prefill(runner.new_sequence(), tokens, want="all"))
    error = float(np.sqrt(np.mean((logits[positions] - expected) ** 2)) / expected.std())
    agreement = float((logits.argmax(axis=1) == best).mean())
    print(f"{len(tokens)} tokens: relative error {error:.3f}, argmax agreement {agreement:.1%}")
    assert error < 0.15 and agreement > 0.85, f"relative error {error:.3f}, argmax agreement {agreement:.1%}"


@pytest.mark.skipif(oracle_python() is None, reason="needs torch and transformers: make test-oracle")
@pytest.mark.parametrize("n_tokens", (50, 400))
def test_live_reference(model_cache: ModelCache, n_tokens: int) -> None:
    model = model_cache.oracle()
    tokens = prompt_tokens(n_tokens, 4711, ORACLE_SHAPE.n_vocab, ORACLE_EOS, (7, 200, 201))
    expected = run_reference(model, [tokens])["logits_0"]
    print(assert_close(prefilled(model, tokens), expected, "prefill", LIMIT))
    print(assert_close(decoded(model, tokens), expected, "decode", LIMIT))


@pytest.mark.skipif(oracle_python() is None, reason="needs torch and transformers: make test-oracle")
def test_live_reference_of_luce_tiny(model_cache: ModelCache) -> None:
    reference = luce_tiny_reference()
    model, tokens = model_cache.luce_tiny_f32(), reference.tokens.tolist()
    expected = run_reference(model, [tokens])["logits_0"]
    print(assert_close(prefilled(model, tokens), expected, "luce-tiny, prefill", LIMIT))
