"""Which rows of the PLE table a token reads: the n-gram hash, on the host, for any number of tokens at once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Final

import numpy as np
import numpy.typing as npt

from pyluce.weights.hparams import PleParams

FEW_TOKENS: Final = 12
"""Up to this many tokens plain integers are faster than numpy."""

WRAP: Final = (1 << 64) - 1


def ple_row_ids(ple: PleParams, tokens: npt.ArrayLike, previous: Sequence[int] = ()) -> npt.NDArray[np.int64]:
    """Rows of the table for `tokens` [T] of one sequence -> int64 [T, n_heads] (heads fastest).

    `previous`: the tokens before `tokens[0]`, oldest first; only the last `ngram_size - 1` count, fewer mean that the
    sequence starts there. See `ple_window_row_ids` for the formula.
    """
    own = np.asarray(tokens)
    if own.ndim != 1 or (own.size and not np.issubdtype(own.dtype, np.integer)):
        raise ValueError(f"tokens: expected a list of integers, found {own.dtype} of shape {own.shape}")
    if own.size and int(own.min()) < 0:
        raise ValueError(f"tokens: expected ids from 0 on, found {int(own.min())}")
    if not own.size:
        return np.empty((0, ple.n_heads), np.int64)
    n_back = ple.ngram_size - 1
    before = [int(t) for t in previous][-n_back:]
    history = np.array([-1] * (n_back - len(before)) + before + own.tolist(), np.int64)
    return _row_ids(ple, np.lib.stride_tricks.sliding_window_view(history, ple.ngram_size))


def ple_window_row_ids(ple: PleParams, windows: Sequence[Sequence[int]]) -> npt.NDArray[np.int64]:
    """Rows of the table for tokens of any sequences, each in its window of tokens -> int64 [T, n_heads] (heads fastest).

    `windows` [T, ngram_size]: the token itself last, those before it in order; before a sequence's start, negative. With ctx[0] the token
    itself and ctx[s] the token s back: going back, the first EOS or missing token turns itself and everything older into EOS; an EOS in
    ctx[0] cuts nothing. For each n from 2 to `ngram_size`, in 64-bit arithmetic that wraps: mixed = XOR over j < n of
    ctx[j] * multipliers[j]; each head h of that n reads row mixed mod head_vocab_sizes[h] + head_offsets[h].
    """
    if len(windows) > FEW_TOKENS:
        return _row_ids(ple, windows)
    return np.array(ple_few_row_ids(ple, windows), np.int64).reshape(len(windows), ple.n_heads)


def ple_few_row_ids(ple: PleParams, windows: Sequence[Sequence[int]]) -> list[int]:
    """The same as a list, row by row, in plain integers."""
    rows = []
    for window in windows:
        mixed, cut, head = window[-1] * ple.multipliers[0], False, 0
        for back in range(1, ple.ngram_size):
            context = window[-1 - back]
            cut = cut or context == ple.eos_token_id or context < 0
            mixed ^= (ple.eos_token_id if cut else context) * ple.multipliers[back]
            low = mixed & WRAP
            for _ in range(ple.heads_per_ngram):
                rows.append(low % ple.head_vocab_sizes[head] + ple.head_offsets[head])
                head += 1
    return rows


def _row_ids(ple: PleParams, windows: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """The same for many."""
    multipliers, sizes, offsets = _constants(ple)
    context = np.array(windows, np.int64)[:, ::-1]
    older = context[:, 1:]
    older[np.logical_or.accumulate((older == ple.eos_token_id) | (older < 0), axis=1)] = ple.eos_token_id
    mixed = np.bitwise_xor.accumulate(context.astype(np.uint64) * multipliers, axis=1)[:, 1:]
    return (np.repeat(mixed, ple.heads_per_ngram, axis=1) % sizes).astype(np.int64) + offsets


@lru_cache(maxsize=8)
def _constants(ple: PleParams) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64], npt.NDArray[np.int64]]:
    """multipliers [ngram_size], head_vocab_sizes and head_offsets [n_heads]."""
    return (
        np.array(ple.multipliers, np.uint64),
        np.array(ple.head_vocab_sizes, np.uint64),
        np.array(ple.head_offsets, np.int64),
    )
