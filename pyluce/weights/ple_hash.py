"""Which rows of the PLE table a token reads: the n-gram hash, on the host, for any number of tokens at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from pyluce.weights.hparams import PleParams

FEW_TOKENS: Final = 4
"""Up to this many tokens plain integers are faster than numpy."""


def ple_row_ids(ple: PleParams, tokens: npt.ArrayLike, previous: Sequence[int] = ()) -> npt.NDArray[np.int64]:
    """Rows of the table for `tokens` [T] of one sequence -> int64 [T, n_heads] (heads fastest).

    `previous`: the tokens before `tokens[0]`, oldest first; only the last `ngram_size - 1` count, fewer mean that the
    sequence starts there. ctx[0] is the token itself, ctx[s] the token s back. Going back, the first EOS or missing
    token turns itself and everything older into EOS; an EOS in ctx[0] cuts nothing. For each n from 2 to `ngram_size`,
    in 64-bit arithmetic that wraps: mixed = XOR over j < n of ctx[j] * multipliers[j]; each head h of that n reads row
    mixed mod head_vocab_sizes[h] + head_offsets[h].
    """
    if isinstance(tokens, list) and 0 < len(tokens) <= FEW_TOKENS:
        return _few_row_ids(ple, tokens, previous)
    own = np.asarray(tokens)
    if own.ndim != 1 or (own.size and not np.issubdtype(own.dtype, np.integer)):
        raise ValueError(f"tokens: expected a list of integers, found {own.dtype} of shape {own.shape}")
    if own.size and int(own.min()) < 0:
        raise ValueError(f"tokens: expected ids from 0 on, found {int(own.min())}")
    n_back, eos = ple.ngram_size - 1, ple.eos_token_id
    before = [int(t) for t in previous][-n_back:]
    history = np.array([eos] * (n_back - len(before)) + before + own.tolist(), np.int64)

    n_tokens = own.size
    mixed = history[n_back:].astype(np.uint64) * np.uint64(ple.multipliers[0])
    cut = np.zeros(n_tokens, bool)
    rows = np.empty((n_tokens, ple.n_heads), np.int64)
    for back in range(1, ple.ngram_size):
        token = history[n_back - back : n_back - back + n_tokens]
        cut |= (token == eos) | (token < 0)
        context = np.where(cut, eos, token).astype(np.uint64)
        mixed = mixed ^ (context * np.uint64(ple.multipliers[back]))
        first = (back - 1) * ple.heads_per_ngram
        heads = slice(first, first + ple.heads_per_ngram)
        sizes = np.array(ple.head_vocab_sizes[heads], np.uint64)
        offsets = np.array(ple.head_offsets[heads], np.int64)
        rows[:, heads] = (mixed[:, None] % sizes).astype(np.int64) + offsets
    return rows


def _few_row_ids(ple: PleParams, tokens: list[int], previous: Sequence[int]) -> npt.NDArray[np.int64]:
    """`ple_row_ids` for the tokens of a decode step."""
    n_back, eos, wrap = ple.ngram_size - 1, ple.eos_token_id, (1 << 64) - 1
    history = [int(t) for t in previous][-n_back:]
    rows = []
    for token in tokens:
        if not isinstance(token, (int, np.integer)):
            raise ValueError(f"tokens: expected a list of integers, found {type(token).__name__}")
        if token < 0:
            raise ValueError(f"tokens: expected ids from 0 on, found {token}")
        mixed = (int(token) * ple.multipliers[0]) & wrap
        cut, head = False, 0
        for back in range(1, ple.ngram_size):
            context = history[-back] if back <= len(history) else eos
            cut = cut or context == eos or context < 0
            mixed ^= ((eos if cut else context) * ple.multipliers[back]) & wrap
            for _ in range(ple.heads_per_ngram):
                rows.append(mixed % ple.head_vocab_sizes[head] + ple.head_offsets[head])
                head += 1
        history.append(int(token))
    return np.array(rows, np.int64).reshape(len(tokens), ple.n_heads)
