"""The models that the references are compared on."""

from __future__ import annotations

from tests.support.models import model_cache

__all__ = ["model_cache"]
