"""Copies of results that a caller may keep, in memory that is used again when nobody keeps them."""

from __future__ import annotations

import sys
from typing import Final

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

SMALLEST: Final = 64 << 10
"""Below it, fresh memory costs nothing to speak of."""


class Copies:
    """Logits of a step are megabytes: memory fresh from the system for each step costs a page fault every 4 KiB.

    An array is given again when no view of it is left: views hold their owner, so its reference count tells. What the count is of an
    array that nobody else holds is measured, not assumed: interpreters differ.
    """

    def __init__(self, kept: int = 4) -> None:
        """`kept`: arrays that are remembered; beyond them each copy has memory of its own."""
        self._kept = kept
        self._arrays: list[Bytes] = [np.empty(0, np.uint8)]
        self._alone = self._holders(0)

    def _holders(self, i: int) -> int:
        return sys.getrefcount(self._arrays[i])

    def of(self, raw: Bytes) -> Bytes:
        """A copy of `raw`, one-dimensional, that stays as it is for as long as it or a view of it is held."""
        if raw.nbytes < SMALLEST:
            return raw.copy()
        copy = self._room(raw.nbytes)[: raw.nbytes]
        copy[:] = raw
        return copy

    def _room(self, n_bytes: int) -> Bytes:
        for i in range(len(self._arrays)):
            if self._holders(i) == self._alone:
                if self._arrays[i].nbytes < n_bytes:
                    self._arrays[i] = np.empty(n_bytes, np.uint8)
                return self._arrays[i]
        fresh = np.empty(n_bytes, np.uint8)
        if len(self._arrays) < self._kept:
            self._arrays.append(fresh)
        return fresh
