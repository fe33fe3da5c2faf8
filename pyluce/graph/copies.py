"""Memory for results that a caller may keep, used again when nobody keeps them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

SMALLEST: Final = 64 << 10
"""Below it, fresh memory costs nothing to speak of."""

MOST_ARRAYS: Final = 4
MOST_BYTES: Final = 128 << 20


def plain_array(n_bytes: int) -> Bytes:
    """Memory of the process, not initialised."""
    return np.empty(n_bytes, np.uint8)


class Reused:
    """A few arrays. One is given again when no view of it is left: views hold their owner, so its reference count tells.

    What the count is of an array that nobody else holds is measured, not assumed: interpreters differ.
    """

    def __init__(
        self, make: Callable[[int], Bytes] = plain_array, most: int = MOST_ARRAYS, most_bytes: int = MOST_BYTES
    ) -> None:
        """`make(n_bytes)`: a new array. At most `most` of them, of `most_bytes` together, are remembered."""
        self._make = make
        self._most = most
        self._most_bytes = most_bytes
        self._arrays: list[Bytes] = [plain_array(0)]
        self._alone = self._holders(0)
        self._arrays.clear()

    def _holders(self, i: int) -> int:
        return sys.getrefcount(self._arrays[i])

    @property
    def n_bytes(self) -> int:
        """Bytes of the arrays that are remembered, held or not."""
        return sum(array.nbytes for array in self._arrays)

    def take(self, n_bytes: int) -> Bytes | None:
        """`n_bytes` that nobody else has for as long as a view of them is held. None: others hold too much."""
        free = [i for i in range(len(self._arrays)) if self._holders(i) == self._alone]
        fitting = [i for i in free if self._arrays[i].nbytes >= n_bytes]
        if fitting:
            return self._arrays[min(fitting, key=lambda i: self._arrays[i].nbytes)][:n_bytes]
        for i in reversed(free):  # too small, all of them: what is wanted has grown
            del self._arrays[i]
        size = max(SMALLEST, 1 << (n_bytes - 1).bit_length())
        if len(self._arrays) >= self._most or self.n_bytes + size > self._most_bytes:
            return None
        self._arrays.append(self._make(size))
        return self._arrays[-1][:n_bytes]

    def clear(self) -> None:
        """Remember none; what somebody holds stays."""
        self._arrays.clear()


class Copies:
    """Logits of a step are megabytes: memory fresh from the system for each step costs a page fault every 4 KiB."""

    def __init__(self, most: int = MOST_ARRAYS) -> None:
        """`most`: arrays that are remembered; beyond them each copy has memory of its own."""
        self._reused = Reused(most=most)

    def of(self, raw: Bytes) -> Bytes:
        """A copy of `raw`, one-dimensional, that stays as it is for as long as it or a view of it is held."""
        copy = self._reused.take(raw.nbytes) if raw.nbytes >= SMALLEST else None
        if copy is None:
            return raw.copy()
        copy[:] = raw
        return copy
