"""Sampler chains: what each step keeps, determinism, and what is refused before C sees it."""

from __future__ import annotations

import gc
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from pyluce.native import NativeError, SamplerChain, Vocabulary
from tests.native.small_models import vocabulary_tokens

N = 200
LOGITS = np.random.default_rng(3).standard_normal(N).astype(np.float32) * 3
ORDER = np.argsort(-LOGITS)


def chain(*steps: tuple[object, ...], n_vocab: int = N) -> SamplerChain:
    made = SamplerChain(n_vocab)
    for name, *arguments in steps:
        made.add(str(name), *arguments)
    return made


def draws(made: SamplerChain, count: int, logits: np.ndarray = LOGITS) -> list[int]:
    return [made.sample(logits) for _ in range(count)]


def survivors(made: SamplerChain, logits: np.ndarray = LOGITS) -> set[int]:
    array = made.apply(logits)
    return {array.data[i].id for i in range(array.size) if array.data[i].logit > -np.inf}


def test_greedy_takes_the_largest_and_the_lowest_id_of_equals() -> None:
    with chain(("greedy",)) as greedy:
        assert greedy.sample(LOGITS) == ORDER[0]
        equal = np.zeros(N, np.float32)
        equal[[50, 40, 60]] = 1.0
        assert greedy.sample(equal) == 40
        assert greedy.steps == ["greedy"]


def test_the_row_is_not_changed() -> None:
    before = LOGITS.copy()
    with chain(("top_k", 5), ("temperature", 0.5), ("draw", 1)) as made:
        made.sample(LOGITS)
    assert np.array_equal(LOGITS, before)


def test_the_same_seed_draws_the_same() -> None:
    with chain(("draw", 11)) as first, chain(("draw", 11)) as second, chain(("draw", 12)) as other:
        drawn = draws(first, 50)
        assert drawn == draws(second, 50)
        assert drawn != draws(other, 50)
        assert len(set(drawn)) > 5


def test_draws_follow_the_probabilities() -> None:
    logits = np.log(np.array([0.6, 0.3, 0.1], np.float32))
    with chain(("draw", 5), n_vocab=3) as made:
        counted = Counter(draws(made, 3000, logits))
    for token, expected in enumerate((0.6, 0.3, 0.1)):
        assert abs(counted[token] / 3000 - expected) < 0.04


def test_reset_starts_again() -> None:
    with chain(("penalties", 64, 1.5, 0.0, 0.0), ("draw", 4)) as made:
        first = draws(made, 30)
        assert draws(made, 30) != first
        made.reset()
        assert draws(made, 30) == first


def test_clone_continues_independently() -> None:
    with chain(("penalties", 64, 1.3, 0.2, 0.1), ("top_k", 40), ("draw", 9)) as made:
        draws(made, 10)
        with made.clone() as copy:
            continued = draws(made, 30)
            assert draws(copy, 30) == continued
            draws(copy, 5)
        assert len(draws(made, 5)) == 5


def test_top_k_top_p_min_p_keep_what_they_say() -> None:
    p = np.exp(LOGITS.astype(np.float64))
    p /= p.sum()
    with chain(("top_k", 7)) as made:
        assert survivors(made) == set(ORDER[:7])
    with chain(("top_p", 0.8)) as made:
        count = int(np.searchsorted(np.cumsum(p[ORDER]), 0.8)) + 1
        assert survivors(made) == set(ORDER[:count])
    with chain(("min_p", 0.1)) as made:
        assert survivors(made) == set(np.flatnonzero(p >= 0.1 * p.max()))


def test_temperature_scales_the_logits() -> None:
    with chain(("temperature", 0.5)) as made:
        array = made.apply(LOGITS)
        found = {array.data[i].id: array.data[i].logit for i in range(array.size)}
        np.testing.assert_allclose([found[i] for i in range(N)], LOGITS / 0.5, rtol=1e-6)


def test_penalties_act_on_accepted_tokens_within_the_window() -> None:
    with chain(("penalties", 2, 1.0, 0.5, 0.25), ("greedy",)) as made:
        for token in (3, 5, 5):
            made.accept(token)
        array = made.apply(LOGITS)
        found = {array.data[i].id: array.data[i].logit for i in range(array.size)}
        assert found[3] == LOGITS[3]
        np.testing.assert_allclose(found[5], LOGITS[5] - 2 * 0.5 - 0.25, rtol=1e-6)


def test_logit_bias_moves_the_choice() -> None:
    with chain(("logit_bias", {17: 100.0, 18: -100.0}), ("greedy",)) as made:
        assert made.sample(LOGITS) == 17
    with chain(("logit_bias", {int(ORDER[0]): float("-inf")}), ("greedy",)) as made:
        assert made.sample(LOGITS) == ORDER[1]


def test_grammar_restricts_survives_clone_and_never_kills_the_process(vocabulary_path: Path) -> None:
    tokens = vocabulary_tokens()
    yes, no = tokens.index("y"), tokens.index("n")
    logits = np.zeros(len(tokens), np.float32)
    logits[no] = 1.0
    logits[tokens.index("z")] = 9.0
    with Vocabulary(vocabulary_path) as vocabulary:
        made = SamplerChain(vocabulary.n_tokens, vocabulary)
        made.add_grammar('root ::= ("n" "y" "n") | "yy"')
        made.add_greedy()
        assert made.choose(logits) == no
        with pytest.raises(ValueError, match="the grammar allows"):
            made.accept(tokens.index("z"))
        made.accept(no)
        copy = made.clone()
        for one in (made, copy):
            with pytest.raises(ValueError, match="the grammar allows"):
                one.accept(no)
            assert one.sample(logits) == yes
            assert one.sample(logits) == no
        assert made.choose(logits) == vocabulary.eos
        logits[:] = -np.inf
        with pytest.raises(NativeError, match="found none"):
            made.choose(logits)
    assert made.closed and copy.closed


def test_a_grammar_that_does_not_parse(vocabulary_path: Path) -> None:
    with Vocabulary(vocabulary_path) as vocabulary, SamplerChain(vocabulary.n_tokens, vocabulary) as made:
        with pytest.raises(NativeError, match="llama_sampler_init_grammar returned NULL"):
            made.add_grammar("root ::= (((")
        with pytest.raises(ValueError, match="empty text"):
            made.add_grammar("  ")
        made.add_greedy()
        assert made.steps == ["greedy"]
    with SamplerChain(5) as plain, pytest.raises(ValueError, match="made with a vocabulary"):
        plain.add_grammar('root ::= "a"')


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (("draw", 2**32 - 1), "expected a seed from 0"),
        (("draw", -1), "expected a seed from 0"),
        (("top_k", -1), "expected k from 0"),
        (("top_p", 1.5), "expected p from 0 to 1"),
        (("min_p", float("nan")), "expected p from 0 to 1"),
        (("temperature", float("inf")), "expected a finite temperature"),
        (("penalties", 5, 0.0, 0.0, 0.0), "expected repeat > 0"),
        (("penalties", -1, 1.0, 0.0, 0.0), "expected a window from 0"),
        (("logit_bias", {N: 1.0}), "expected a token id from 0"),
        (("logit_bias", {0: float("nan")}), "found NaN"),
        (("mirostat", 2), "expected a sampler step among"),
    ],
)
def test_bad_steps_are_refused(step: tuple[object, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        chain(step)


def test_bad_rows_are_refused() -> None:
    with chain(("greedy",)) as made:
        with pytest.raises(ValueError, match="expected a row of 200 logits"):
            made.sample(LOGITS[:-1])
        damaged = LOGITS.copy()
        damaged[3] = np.nan
        with pytest.raises(ValueError, match="found 1 of 200"):
            made.sample(damaged)
        with pytest.raises(ValueError, match="expected a token id"):
            made.accept(N)
        assert made.sample(LOGITS) == ORDER[0]


def test_a_chain_that_chooses_nothing_is_an_error() -> None:
    for made in (chain(), chain(("top_k", 3))):
        with made, pytest.raises(NativeError, match="whose last step chooses a token"):
            made.sample(LOGITS)


def test_collections_do_not_disturb_a_chain() -> None:
    with (
        chain(("logit_bias", {1: 0.5}), ("top_p", 0.9), ("draw", 6)) as one,
        chain(("logit_bias", {1: 0.5}), ("top_p", 0.9), ("draw", 6)) as two,
    ):
        found = []
        for _ in range(20):
            gc.collect()
            found.append(one.sample(LOGITS.copy()))
        assert found == draws(two, 20)
