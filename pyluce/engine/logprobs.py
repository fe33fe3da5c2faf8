"""Log-probabilities of tokens: of the model's own distribution, before bias, penalties, temperature and constraints."""

from __future__ import annotations

import numpy as np

from pyluce.engine.protocols import Logits


def token_logprobs(logits: Logits, token: int, n_top: int) -> tuple[float, tuple[tuple[int, float], ...]]:
    """The natural logarithm of the probability of `token`, and of the `n_top` most probable tokens with their ids, best first.

    `logits`: a row [n_vocab] whose largest value is finite. Of equal logits the lower id comes first.
    """
    values = logits.astype(np.float64)
    values -= values.max()
    values -= np.log(np.exp(values).sum())
    n_top = min(n_top, values.size)
    if n_top == 0:
        return float(values[token]), ()
    least = np.partition(logits, logits.size - n_top)[logits.size - n_top]
    candidates = np.flatnonzero(logits >= least)
    best = candidates[np.argsort(-logits[candidates], kind="stable")][:n_top]
    return float(values[token]), tuple((int(i), float(values[i])) for i in best)
