"""Hashes that say whether two runs are the same, bit for bit.

* token ids: SHA-256 over the ids as signed 32-bit little-endian integers, one after the other.
* logits of one step: SHA-256 over the row's values as 32-bit little-endian IEEE floats, in the order of the vocabulary.
* logits of an answer: SHA-256 over the 32-byte digests of its steps, in order; step 0 is the row behind the prompt's last token.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt


def hash_tokens(tokens: Iterable[int]) -> bytes:
    """The digest of a list of token ids."""
    return hashlib.sha256(np.fromiter(tokens, dtype="<i4").tobytes()).digest()


def hash_logits(row: npt.NDArray[np.float32]) -> bytes:
    """The digest of one row [n_vocab]. Raises TypeError for another type than float32: a conversion would hide a difference."""
    if row.dtype != np.float32:
        raise TypeError(f"logits: expected float32, found {row.dtype}")
    return hashlib.sha256(np.ascontiguousarray(row, dtype="<f4").data).digest()


class StepHasher:
    """Adds up the digests of an answer's steps."""

    def __init__(self) -> None:
        self._digests: list[bytes] = []

    def add(self, row: npt.NDArray[np.float32]) -> bytes:
        """Hash the row of the next step and return its digest."""
        digest = hash_logits(row)
        self._digests.append(digest)
        return digest

    @property
    def steps(self) -> tuple[bytes, ...]:
        """The digest of each step."""
        return tuple(self._digests)

    def digest(self) -> bytes:
        """The digest of all steps."""
        return hash_steps(self._digests)


def hash_steps(digests: Iterable[bytes]) -> bytes:
    """The digest of an answer's logits from the digests of its steps."""
    return hashlib.sha256(b"".join(digests)).digest()
