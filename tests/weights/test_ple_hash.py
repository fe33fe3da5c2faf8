"""The n-gram hash against rows worked out by hand, and against plain Python integers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyluce.weights import PleParams, ple_row_ids, ple_window_row_ids

EOS = 2


def params(
    multipliers: Sequence[int] = (3, 5, 7),
    sizes: Sequence[int] = (101, 103),
    offsets: Sequence[int] = (0, 101),
    eos: int = EOS,
) -> PleParams:
    ngram = len(multipliers)
    return PleParams(
        layer=1,
        ngram_size=ngram,
        heads_per_ngram=len(sizes) // (ngram - 1),
        n_heads=len(sizes),
        head_dim=8,
        conv_kernel=4,
        eos_token_id=eos,
        image_token_id=None,
        multipliers=tuple(multipliers),
        head_offsets=tuple(offsets),
        head_vocab_sizes=tuple(sizes),
    )


def test_rows_worked_out_by_hand() -> None:
    """11*3 ^ 9*5 = 33 ^ 45 = 12; 12 mod 101 = 12. 12 ^ 7*7 = 12 ^ 49 = 61; 61 mod 103 + 101 = 162."""
    assert ple_row_ids(params(), [7, 9, 11])[-1].tolist() == [12, 162]


def test_the_same_rows_from_previous_tokens() -> None:
    assert ple_row_ids(params(), [11], [7, 9]).tolist() == [[12, 162]]
    assert ple_row_ids(params(), [11], [1000, 2000, 7, 9]).tolist() == [[12, 162]], "older tokens do not count"


def test_start_of_sequence_reads_as_eos() -> None:
    """7*3 ^ 2*5 = 21 ^ 10 = 31; 31 ^ 2*7 = 31 ^ 14 = 17, + 101. Then 9: 27 ^ 35 = 56; 56 ^ 14 = 54, + 101."""
    assert ple_row_ids(params(), [7, 9]).tolist() == [[31, 118], [56, 155]]


def test_eos_inside_the_window_cuts_everything_older() -> None:
    """At 11 after [7, EOS]: ctx = 11, EOS, EOS (not 7): 33 ^ 10 = 43; 43 ^ 14 = 37, + 101 = 138."""
    assert ple_row_ids(params(), [7, EOS, 11])[-1].tolist() == [43, 138]
    assert ple_row_ids(params(), [7, EOS, 11])[-1].tolist() == ple_row_ids(params(), [11])[-1].tolist()


def test_eos_at_the_far_end_of_the_window() -> None:
    """At 11 after [EOS, 9]: 33 ^ 45 = 12; 12 ^ 14 = 2, + 101 = 103."""
    assert ple_row_ids(params(), [EOS, 9, 11])[-1].tolist() == [12, 103]


def test_eos_as_own_token_does_not_cut_its_own_context() -> None:
    """At EOS after [7, 9]: 2*3 ^ 9*5 = 6 ^ 45 = 43; 43 ^ 49 = 26, + 101 = 127."""
    assert ple_row_ids(params(), [7, 9, EOS])[-1].tolist() == [43, 127]


def test_missing_previous_tokens_are_negative() -> None:
    assert ple_row_ids(params(), [11], [-1, 9]).tolist() == ple_row_ids(params(), [9, 11])[1:].tolist()
    assert ple_row_ids(params(), [11], [7, -1]).tolist() == ple_row_ids(params(), [11]).tolist()


def test_products_wrap_around_at_64_bits() -> None:
    """5 * (2^64 - 3) = -15 = 2^64 - 15 (mod 2^64), where a signed or wider product gives another row."""
    huge = (1 << 64) - 3
    p = params(multipliers=(huge, 1), sizes=(101,), offsets=(0,))
    assert ple_row_ids(p, [5], [0])[0, 0] == ((1 << 64) - 15) % 101
    assert ((1 << 64) - 15) % 101 not in (-15 % 101, 5 * huge % 101)


def test_multipliers_of_the_real_model() -> None:
    """Token 248319 after 151000 and 77: one literal, computed with unlimited integers."""
    p = params(
        multipliers=(23703573157769, 20109073645365, 8052911324071),
        sizes=(20000003, 20000083),
        offsets=(0, 20000003),
        eos=248044,
    )
    mixed = 248319 * 23703573157769 ^ 151000 * 20109073645365
    assert mixed < 1 << 64, "no wrap-around here"
    expected = [mixed % 20000003, (mixed ^ 77 * 8052911324071) % 20000083 + 20000003]
    assert ple_row_ids(p, [248319], [77, 151000]).tolist() == [expected]


def test_nothing_in_nothing_out() -> None:
    rows = ple_row_ids(params(), [])
    assert rows.shape == (0, 2) and rows.dtype == np.int64


@pytest.mark.parametrize("tokens", [[-1], [[1, 2]], [1.5]])
def test_bad_tokens(tokens: object) -> None:
    with pytest.raises(ValueError, match=r"tokens: expected .*, found"):
        ple_row_ids(params(), tokens)  # type: ignore[arg-type]


def reference(p: PleParams, tokens: Sequence[int], previous: Sequence[int]) -> list[list[int]]:
    """The rule, one token and one head at a time, with Python's integers."""
    everything = [*previous, *tokens]
    rows = []
    for i in range(len(previous), len(everything)):
        context = [everything[i]]
        cut = False
        for back in range(1, p.ngram_size):
            token = everything[i - back] if i - back >= 0 else -1
            cut = cut or token < 0 or token == p.eos_token_id
            context.append(p.eos_token_id if cut else token)
        row = []
        for head in range(p.n_heads):
            n = 2 + head // p.heads_per_ngram
            mixed = 0
            for j in range(n):
                mixed ^= context[j] * p.multipliers[j] % (1 << 64)
            row.append(mixed % p.head_vocab_sizes[head] + p.head_offsets[head])
        rows.append(row)
    return rows


@st.composite
def cases(draw: st.DrawFn) -> tuple[PleParams, list[int], list[int]]:
    ngram = draw(st.integers(2, 5))
    per_ngram = draw(st.integers(1, 3))
    n_heads = (ngram - 1) * per_ngram
    sizes = draw(st.lists(st.integers(1, 20000171), min_size=n_heads, max_size=n_heads))
    offsets = [sum(sizes[:i]) for i in range(n_heads)]
    multipliers = draw(st.lists(st.integers(1, (1 << 64) - 1), min_size=ngram, max_size=ngram))
    eos = draw(st.integers(0, 4))
    token = st.one_of(st.integers(0, 5), st.integers(0, 250000))
    return (
        params(multipliers, sizes, offsets, eos),
        draw(st.lists(token, max_size=12)),
        draw(st.lists(st.one_of(token, st.just(-1)), max_size=6)),
    )


@settings(max_examples=200, deadline=None)
@given(cases())
def test_equal_to_plain_integers(case: tuple[PleParams, list[int], list[int]]) -> None:
    p, tokens, previous = case
    assert ple_row_ids(p, tokens, previous).tolist() == reference(p, tokens, previous)


@settings(max_examples=60, deadline=None)
@given(cases(), st.integers(0, 12))
def test_a_cut_anywhere_changes_nothing(case: tuple[PleParams, list[int], list[int]], cut: int) -> None:
    """Chunked or whole, one token at a time or all: the same rows, given the tokens before."""
    p, tokens, previous = case
    whole = ple_row_ids(p, tokens, previous)
    head, tail = tokens[:cut], tokens[cut:]
    parts = [ple_row_ids(p, head, previous), ple_row_ids(p, tail, [*previous, *head])]
    assert np.array_equal(np.concatenate(parts), whole)


@pytest.mark.parametrize("count", [1, 3, 12, 13, 40])
def test_windows_of_any_sequences_give_the_rows_of_each_alone(count: int) -> None:
    rng = np.random.default_rng(count)
    p = params(multipliers=(11, (1 << 64) - 59, 1 << 63, 29), sizes=(101, 103, 107), offsets=(0, 101, 204))
    sequences = [rng.integers(0, 6, 4).tolist() for _ in range(count)]  # EOS among them
    lengths = [int(n) for n in rng.integers(1, 5, count)]
    windows = [[-1] * (4 - n) + tokens[:n] for tokens, n in zip(sequences, lengths, strict=True)]
    alone = [ple_row_ids(p, tokens[:n])[-1] for tokens, n in zip(sequences, lengths, strict=True)]
    assert ple_window_row_ids(p, windows).tolist() == np.array(alone).tolist()
