"""The real tiny models, for the plans that are compared with allocations."""

from __future__ import annotations

from tests.support.models import model_cache
from tests.support.real_model import tiny_model

__all__ = ["model_cache", "tiny_model"]
