"""Tiny models by weight type, written once a session; requests that are expensive alone are computed once a session."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.exactness.case import Case
from tests.support.models import WEIGHT_TYPES, ModelCache, model_cache


@pytest.fixture(scope="session")
def case_of(model_cache: ModelCache) -> Callable[[str], Case]:
    """The case of a weight type, by name."""
    cases: dict[str, Case] = {}

    def get(weight_type: str) -> Case:
        if weight_type not in cases:
            cases[weight_type] = Case(model_cache.tiny(weight_type), model_cache.vocab)
        return cases[weight_type]

    return get


@pytest.fixture(scope="session", params=WEIGHT_TYPES)
def case(request: pytest.FixtureRequest, case_of: Callable[[str], Case]) -> Case:
    """Every weight type in turn."""
    return case_of(request.param)


@pytest.fixture(scope="session")
def control_case(case_of: Callable[[str], Case]) -> Case:
    """The weight type on which the negative controls run."""
    return case_of("F32")


__all__ = ["case", "case_of", "control_case", "model_cache"]
