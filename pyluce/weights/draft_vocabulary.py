"""The tokens that a draft head may guess, where its output over all of them would take most of a draft step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
import numpy.typing as npt

from pyluce.weights.gguf_reader import GgufArray, MetaValue

DRAFT_VOCAB: Final = 64_000
PAYS_FROM: Final = 2
"""Times the compact vocabulary that the whole one has at least, for the copies of its rows to be worth their memory."""
_TYPES: Final = "tokenizer.ggml.token_type"
_REQUIRED_TYPES: Final = (3, 4)
"""Control tokens, and those that a tokenizer adds by name."""


def pays(n_vocab: int, size: int) -> bool:
    """A vocabulary of `size` is used for one of `n_vocab` tokens; never with a size of 0."""
    return 0 < PAYS_FROM * size <= n_vocab


def compact_ids(metadata: Mapping[str, MetaValue], n_vocab: int, size: int) -> npt.NDArray[np.int64]:
    """`size` ids in rising order: control tokens and those that the file names first, then the lowest."""
    chosen = np.zeros(n_vocab, np.bool_)
    types = metadata.get(_TYPES)
    if isinstance(types, GgufArray):
        chosen[np.isin(types.numbers(), _REQUIRED_TYPES)] = True
    for key, value in metadata.items():
        if (
            key.startswith("tokenizer.")
            and key.endswith("_token_id")
            and isinstance(value, int)
            and 0 <= value < n_vocab
        ):
            chosen[value] = True
    required = np.flatnonzero(chosen)[:size]
    others = np.flatnonzero(~chosen)[: size - len(required)]
    return np.sort(np.concatenate([required, others])).astype(np.int64)
