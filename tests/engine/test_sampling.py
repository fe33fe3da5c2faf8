from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from pyluce.engine import LogitsError, RequestError, SamplingParams
from pyluce.engine.sampling import GreedySampler, check_logits, make_sampler
from tests.support.fake_runner import NumpyChain


def names(params: SamplingParams) -> list[str]:
    return [step.name for step in (*params.steps_over_prompt(), *params.steps_over_answer(7))]


def test_the_order_of_the_steps() -> None:
    full = SamplingParams(
        temperature=0.7,
        top_k=20,
        top_p=0.8,
        min_p=0.05,
        repeat_penalty=1.1,
        frequency_penalty=0.2,
        presence_penalty=0.3,
        logit_bias={3: 1.0},
    )
    assert names(full) == ["logit_bias", "penalties", "penalties", "top_k", "temperature", "top_p", "min_p", "draw"]
    assert list(full.steps_over_prompt())[1].arguments == (256, 1.1, 0.0, 0.0)
    assert list(full.steps_over_answer(7))[0].arguments == (256, 1.0, 0.2, 0.3)


def test_steps_that_are_off_are_left_out() -> None:
    assert names(SamplingParams(temperature=1.0)) == ["temperature", "draw"]
    assert names(SamplingParams(presence_penalty=1.0)) == ["penalties", "greedy"]
    assert names(SamplingParams(temperature=1.0, repeat_penalty=1.5, presence_penalty=1.0, penalty_window=0)) == [
        "temperature",
        "draw",
    ]


def test_pure_greedy_needs_no_chain_and_prefers_the_lowest_id() -> None:
    def no_chain() -> NumpyChain:
        raise AssertionError("no chain is needed")

    sampler = make_sampler(SamplingParams(top_k=5, top_p=0.5, seed=3), [1], 3, 10, no_chain)
    assert isinstance(sampler, GreedySampler)
    assert sampler.sample(np.array([1, 5, 5, 2], np.float32)) == 1


def test_repetition_counts_the_prompt_and_presence_does_not() -> None:
    chain = NumpyChain()
    params = SamplingParams(repeat_penalty=2.0, presence_penalty=1.0, penalty_window=2)
    sampler = make_sampler(params, [0, 1, 2], 0, 4, lambda: chain)
    logits = np.array([4.0, 4.0, 6.0, 3.5], np.float32)
    # halved: 1 and 2 of the prompt, then 2 and the chosen 0 (which presence lowers too), then 0 and 1
    assert [sampler.sample(logits) for _ in range(3)] == [0, 1, 2]


def test_a_chain_that_cannot_be_built_is_closed() -> None:
    chain = NumpyChain()
    chain.add = None  # type: ignore[method-assign, assignment]
    with pytest.raises(TypeError):
        make_sampler(SamplingParams(temperature=1.0), [1], 0, 4, lambda: chain)
    assert chain.closed


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("temperature", -0.1, "temperature: expected a number from 0 to 100, found -0.1"),
        ("temperature", math.nan, "temperature.*nan"),
        ("temperature", math.inf, "temperature.*inf"),
        ("temperature", 1e-9, r"temperature: expected 0 \(greedy\)"),
        ("temperature", "1", "temperature: expected a number, found str"),
        ("temperature", True, "temperature: expected a number, found bool"),
        ("top_k", -1, "top_k"),
        ("top_k", 1.5, "top_k: expected an integer, found float"),
        ("top_p", 1.1, "top_p"),
        ("min_p", -1, "min_p"),
        ("repeat_penalty", 0.0, "repeat_penalty: expected more than 0"),
        ("frequency_penalty", 2.5, "frequency_penalty"),
        ("presence_penalty", -3, "presence_penalty"),
        ("penalty_window", -1, "penalty_window"),
        ("seed", -1, "seed"),
        ("seed", 2**32 - 1, "seed"),
        ("logit_bias", {1: 101.0}, r"logit_bias\[1\]"),
        ("logit_bias", {"1": 1.0}, "logit_bias: token id: expected an integer, found str"),
    ],
)
def test_bad_values_are_refused_by_name(field: str, value: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        SamplingParams(**{field: value})


def test_a_biased_token_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(RequestError, match="below 10, found 10"):
        make_sampler(SamplingParams(logit_bias={10: 1.0}), [1], 0, 10, NumpyChain)


def test_check_logits() -> None:
    check_logits(np.array([-np.inf, 1.0], np.float32), 0)
    with pytest.raises(LogitsError, match="step 3: 1 of 2 logits are NaN"):
        check_logits(np.array([np.nan, 1.0], np.float32), 3)
    for row in ([np.inf, 0.0], [-np.inf, -np.inf]):
        with pytest.raises(LogitsError, match="the largest of 2 logits is"):
            check_logits(np.array(row, np.float32), 0)
