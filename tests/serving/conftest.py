"""The model of the tests in this folder, and what each request gets alone, computed once a session."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.serving.exact import Alone
from tests.support.models import SEED, TEST_SHAPE, ModelCache, luce_tiny_path, model_cache
from tests.support.real_model import require_libraries

SERVING_SHAPE = replace(TEST_SHAPE, n_embd=128, n_head=2, n_ff_exp=64, n_ff_shexp=64, hc_low_rank=32)
"""As TEST_SHAPE (a budget of 32 tokens), narrower: prompts of thousands of tokens take a second. F32, where batches show most."""


@pytest.fixture(scope="session")
def serving_model(model_cache: ModelCache) -> Path:
    require_libraries()
    return model_cache.write("serving-F32.gguf", SERVING_SHAPE, SEED)


@pytest.fixture(scope="session")
def drafting_model(model_cache: ModelCache) -> Path:
    """The same shape with a draft head, as random as the rest: what it drafts is nearly always wrong."""
    require_libraries()
    return model_cache.write("serving-mtp-F32.gguf", replace(SERVING_SHAPE, mtp=True), SEED)


@pytest.fixture(scope="session")
def luce_tiny() -> Path:
    """The trained model, whose head drafts well."""
    require_libraries()
    return luce_tiny_path()


@pytest.fixture(scope="session")
def alone_undrafted(drafting_model: Path) -> Alone:
    """What each request gets alone, with speculation off."""
    return Alone(drafting_model)


@pytest.fixture(scope="session")
def alone(serving_model: Path) -> Alone:
    return Alone(serving_model)


__all__ = ["alone", "alone_undrafted", "drafting_model", "luce_tiny", "model_cache", "serving_model"]
