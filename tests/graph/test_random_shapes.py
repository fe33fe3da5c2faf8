"""Every luce op kind at random sizes and at the model's own, against float64."""

from __future__ import annotations

import numpy as np
import pytest

from pyluce.selftest import cases
from pyluce.selftest.cases import MODEL, Case, Sizes
from tests.support.device import ON_GPU, THREADS
from tests.support.op_bench import OpBench

SEEDS = range(40 if ON_GPU else 12)


def check(case: Case, n_threads: int = 1) -> None:
    error = case.error(case.compute(lambda arrays: OpBench(arrays, n_threads)))
    assert error <= case.bound_on(ON_GPU), f"{case.kind}, {case.shape}: {error:.2e}"


def sizes_of(seed: int) -> tuple[np.random.Generator, Sizes]:
    rng = np.random.default_rng(seed)
    return rng, cases.random_sizes(rng)


@pytest.mark.parametrize("n_threads", THREADS)
@pytest.mark.parametrize("seed", SEEDS)
def test_random_sizes(seed: int, n_threads: int) -> None:
    for case in cases.all_cases(*sizes_of(seed)):
        check(case, n_threads)


@pytest.mark.parametrize("family", [cases.hyper_connections, cases.attention, cases.ngram, cases.experts])
def test_the_widths_of_the_model(family: object) -> None:
    assert callable(family)
    for case in family(np.random.default_rng(1), MODEL):
        check(case)


def test_the_linear_layer_of_the_model() -> None:
    check(cases.gdn(np.random.default_rng(2), MODEL))
    check(cases.norm_rope(np.random.default_rng(3), MODEL))


def test_control_a_wrong_value_is_an_error() -> None:
    for case in cases.all_cases(*sizes_of(0)):
        found = case.compute(OpBench)
        assert case.error(found) < 1e-3, case.kind
        found[-1] = found[-1].copy()
        found[-1].flat[-1] += 1
        assert case.error(found) > 1e-2, case.kind
        found[-1] = found[-1].astype(np.float64)
        found[-1].flat[0] = np.nan
        assert case.error(found) == float("inf"), case.kind
