from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from pyluce.engine import RequestError, SamplingParams, TokenEvent
from pyluce.engine.logprobs import token_logprobs
from tests.engine.constrained import VOCABULARY, resources, run

ROWS = arrays(np.float32, st.integers(1, 40), elements=st.floats(-50, 50, width=32) | st.sampled_from([0.0, 1.0]))


@given(ROWS, st.integers(min_value=0), st.integers(0, 20))
def test_against_exact_sums(row: np.ndarray, token: int, n_top: int) -> None:
    token %= row.size
    total = math.log(math.fsum(math.exp(float(value)) for value in row))
    expected = [float(value) - total for value in row]
    order = sorted(range(row.size), key=lambda index: (-row[index], index))[:n_top]
    logprob, top = token_logprobs(row, token, n_top)
    assert logprob == pytest.approx(expected[token], abs=1e-9)
    assert [index for index, _ in top] == order
    assert [value for _, value in top] == pytest.approx([expected[index] for index in order], abs=1e-9)


def test_ties_go_to_the_lower_id_across_the_cut() -> None:
    row = np.array([0, 5, 5, 7, 5, 5], dtype=np.float32)
    assert [index for index, _ in token_logprobs(row, 0, 3)[1]] == [3, 1, 2]


def test_huge_logits_and_impossible_tokens() -> None:
    row = np.array([3e38, -3e38, -np.inf], dtype=np.float32)
    logprob, top = token_logprobs(row, 2, 3)
    assert logprob == -math.inf
    assert [index for index, _ in top] == [0, 1, 2]
    assert top[0][1] == 0.0


def test_events_carry_the_models_own_distribution() -> None:
    sampling = SamplingParams(temperature=5.0, seed=3, logit_bias={7: 50.0}, repeat_penalty=1.5)
    events = [event for event in run(max_tokens=8, n_logprobs=2, sampling=sampling) if isinstance(event, TokenEvent)]
    core = resources()
    state = core.runner.new_sequence()
    row = core.runner.prefill(state, (104, 105, 10))
    assert 7 in {event.token for event in events}
    for event in events:
        assert row is not None
        assert (event.logprob, event.top_logprobs) == token_logprobs(row, event.token, 2)
        row = core.runner.decode([(state, event.token)])[0]


def test_asked_for_or_not() -> None:
    (none,) = (event for event in run(max_tokens=1) if isinstance(event, TokenEvent))
    (chosen,) = (event for event in run(max_tokens=1, n_logprobs=0) if isinstance(event, TokenEvent))
    assert (none.logprob, none.top_logprobs) == (None, ())
    assert chosen.logprob is not None
    assert chosen.logprob < 0.0
    assert chosen.top_logprobs == ()
    (many,) = (event for event in run(max_tokens=1, n_logprobs=20) if isinstance(event, TokenEvent))
    assert len(many.top_logprobs) == 20 < VOCABULARY.n_tokens
    for bad in (-1, 65):
        with pytest.raises(RequestError, match="n_logprobs"):
            run(n_logprobs=bad)
