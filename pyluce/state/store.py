"""The prefix cache as an engine uses it: start a sequence from what is kept, offer what could be kept.

Half of the budget is pages of the pool, allocated with it; the other half may go into recurrent states and logits, which
lie on the host. So the budget is what the cache takes at most, and the pool's report and the cache's say where it is.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from pyluce.state.layout import StateOptions, page_bytes, recurrent_bytes
from pyluce.state.pages import pages_for
from pyluce.state.pool import StatePool
from pyluce.state.prefix_cache import CacheEntry, CacheStats, PrefixCache
from pyluce.state.sequence_state import SequenceState

if TYPE_CHECKING:
    from pyluce.weights import HParams


@dataclass(frozen=True, slots=True)
class Start:
    """Where a sequence starts: `length` tokens are in its state; `logits` [n_vocab] follow when that is the whole prompt."""

    length: int
    logits: npt.NDArray[np.float32] | None


NOWHERE = Start(0, None)


def cache_pages(h: HParams, options: StateOptions, budget_bytes: int) -> int:
    """Pages that a budget adds to the pool."""
    return budget_bytes // 2 // page_bytes(h, options)


def automatic_budget(h: HParams, options: StateOptions, available_bytes: int) -> int:
    """Room for three snapshots of a full context, at most a quarter of the memory that is available."""
    full = pages_for(options.n_ctx) * page_bytes(h, options) + recurrent_bytes(h, options) + 4 * h.n_vocab
    return min(2 * 3 * full, available_bytes // 4)


class SnapshotStore:
    """Snapshots of one pool. Every call comes from the engine's thread."""

    def __init__(self, pool: StatePool, budget_bytes: int) -> None:
        pages = pool.options.cache_pages * pool.page_bytes
        self._cache = PrefixCache(pool.page_bytes, budget_bytes, max(0, budget_bytes - pages))
        self._started: dict[SequenceState, CacheEntry] = {}
        pool.allocator.reclaim = self._cache.reclaim

    def start(self, state: SequenceState, prompt: Sequence[int], boundaries: Collection[int]) -> Start:
        """Restore the longest kept prefix of `prompt` that ends at one of `boundaries` into an empty sequence."""
        if self._cache.budget_bytes == 0:
            return NOWHERE
        entry = self._cache.find(prompt, boundaries)
        if entry is None:
            return NOWHERE
        try:
            state.restore(entry.snapshot)
        except BaseException:
            self._cache.release(entry)
            raise
        self._started[state] = entry
        whole = entry.snapshot.length == len(prompt)
        return Start(entry.snapshot.length, entry.snapshot.logits if whole else None)

    def offer(self, state: SequenceState, logits: npt.NDArray[np.float32] | None = None) -> None:
        """Keep the sequence's state, which a chunk graph has just left, unless it is kept already or does not fit."""
        if self._cache.wants(state.tokens, state.chunk_ends[:-1], needs_logits=logits is not None):
            self._cache.insert(state.snapshot(logits))

    def end(self, state: SequenceState) -> None:
        """The sequence is about to be freed."""
        entry = self._started.pop(state, None)
        if entry is not None:
            self._cache.release(entry)

    def stats(self) -> CacheStats:
        """Sizes and counters."""
        return self._cache.stats()

    def report(self) -> dict[str, int]:
        """Sizes and counters by name."""
        return asdict(self._cache.stats())

    def clear(self) -> None:
        """Drop everything that is kept."""
        self._cache.clear()
