"""The real tiny model, for the tests that allocate state."""

from __future__ import annotations

from tests.support.models import model_cache
from tests.support.real_model import tiny_model

__all__ = ["model_cache", "tiny_model"]
