"""A tiny random model and the real libraries. Without the libraries tests fail; LUCE_TESTS_WITHOUT_LIBRARY=1 skips them instead."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pyluce.native import NativeError
from pyluce.native.library import find_directory
from tests.support.device import BACKEND
from tests.support.models import ModelCache


def require_libraries() -> None:
    """Fail, or skip where that was asked for, when the native libraries are not built."""
    try:
        find_directory(BACKEND)
    except NativeError as error:
        if os.environ.get("LUCE_TESTS_WITHOUT_LIBRARY") == "1":
            pytest.skip(str(error))
        pytest.fail(str(error))


@pytest.fixture(scope="session")
def tiny_model(model_cache: ModelCache) -> Path:
    """A random model whose budget is 32 tokens, with a chat template; imported by each conftest that needs it."""
    require_libraries()
    return model_cache.tiny("Q8_0")
