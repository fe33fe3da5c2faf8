"""The prefix cache as an engine uses it: start a sequence from what is kept, offer what could be kept.

Half of the budget is pages of the pool, allocated with it; the other half may go into recurrent states and logits, which
lie on the host. So the budget is what the cache takes at most, and the pool's report and the cache's say where it is.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from pyluce.state.disk_cache import DiskCache
from pyluce.state.entry_file import DamagedError, read_head, write_entry
from pyluce.state.image import load_snapshot, restore_live, take_image, take_live_image
from pyluce.state.layout import StateOptions, page_bytes, recurrent_bytes
from pyluce.state.pages import OutOfPagesError, pages_for
from pyluce.state.pool import StatePool
from pyluce.state.prefix_cache import CacheEntry, CacheStats, PrefixCache, prefix_keys
from pyluce.state.sequence_state import SequenceState
from pyluce.state.snapshot import Snapshot

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


class SpillError(RuntimeError):
    """What is kept could not be written; nothing was given up."""


class SnapshotStore:
    """Snapshots of one pool, and of a folder where one is attached. Every call comes from the engine's thread."""

    def __init__(self, pool: StatePool, budget_bytes: int) -> None:
        pages = pool.options.cache_pages * pool.page_bytes
        self._cache = PrefixCache(pool.page_bytes, budget_bytes, max(0, budget_bytes - pages))
        self._pool = pool
        self._disk: DiskCache | None = None
        self._started: dict[SequenceState, CacheEntry] = {}
        pool.allocator.reclaim = self._cache.reclaim

    def start(self, state: SequenceState, prompt: Sequence[int], boundaries: Collection[int]) -> Start:
        """Restore the longest kept prefix of `prompt` that ends at one of `boundaries` into an empty sequence."""
        if self._cache.budget_bytes == 0:
            return NOWHERE
        if self._disk is not None:
            self._fetch(self._disk, prompt, boundaries)
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
            self._keep(state.snapshot(logits))

    def end(self, state: SequenceState) -> None:
        """The sequence is about to be freed."""
        entry = self._started.pop(state, None)
        if entry is not None:
            self._cache.release(entry)

    @property
    def own_bytes(self) -> int:
        """Bytes of recurrent states and logits that are kept."""
        return self._cache.own_bytes

    def newest_entries(self, limit: int) -> list[CacheEntry]:
        """The entries used last, newest first."""
        return self._cache.newest(limit)

    def stats(self) -> CacheStats:
        """Sizes and counters."""
        return self._cache.stats()

    def report(self) -> dict[str, object]:
        """Sizes and counters by name; `disk` where a folder is attached."""
        disk = {"disk": self._disk.report()} if self._disk is not None else {}
        return {**asdict(self._cache.stats()), **disk}

    def attach(self, disk: DiskCache) -> None:
        """Keep entries in a folder too, and start from what is there. The folder stays the caller's to close."""
        self._disk = disk

    def spill(self) -> int:
        """Write every entry that the folder does not have yet. Without a folder: the number of entries, which are kept nowhere else.

        Raises SpillError when a file cannot be written. Entries that the folder's limit has no room for are let go.
        """
        if self._disk is None:
            return self._cache.stats().entries
        before = self._disk.report()["failures"]
        for entry in self._cache.entries():
            self._write(self._disk, entry.snapshot)
            self._disk.flush()  # one at a time: what is copied meanwhile is bounded
        failed = self._disk.flush() - before
        if failed:
            raise SpillError(f"{failed} entries of the prefix cache could not be written to {self._disk.folder}")
        return 0

    def write_live(self, state: SequenceState, path: Path, identity: Mapping[str, str]) -> None:
        """Write a running sequence to a file, decoded tokens included. Raises OSError, ValueError when something is attached to it."""
        if state.parts:
            raise ValueError(f"a sequence with {', '.join(state.parts)} attached cannot be written")
        write_entry(path, take_live_image(self._pool, state), identity)

    def read_live(self, state: SequenceState, path: Path, identity: Mapping[str, str]) -> None:
        """Put a running sequence into an empty one. Raises DamagedError, OSError or OutOfPagesError."""
        head = read_head(path)
        if head.identity != identity:
            raise DamagedError(f"{path.name} was written with other settings")
        restore_live(self._pool, state, head)

    def _keep(self, snapshot: Snapshot) -> None:
        kept = self._cache.insert(snapshot) and bool(snapshot.pages)  # without pages: it was there already
        if kept and self._disk is not None and self._disk.room_for(self._cost(self._disk, snapshot)):
            self._write(self._disk, snapshot)

    def _write(self, disk: DiskCache, snapshot: Snapshot) -> None:
        """Copy a snapshot and have it written, unless it is there: of its pages those that no shorter entry on disk has."""
        ends = (*snapshot.cuts, snapshot.length)
        key = prefix_keys(snapshot.tokens, [snapshot.length], snapshot.cuts)[snapshot.length]
        if disk.has(key, with_logits=snapshot.logits is not None):
            return
        parent = disk.parent_of(snapshot.tokens, ends)
        first = self._pool.settled_pages(parent[1]) if parent is not None else 0
        disk.put(key, take_image(self._pool, snapshot, first), parent[0] if parent is not None else None)

    def _cost(self, disk: DiskCache, snapshot: Snapshot) -> int:
        parent = disk.parent_of(snapshot.tokens, (*snapshot.cuts, snapshot.length))
        first = self._pool.settled_pages(parent[1]) if parent is not None else 0
        return (pages_for(snapshot.length) - first) * self._pool.page_bytes + snapshot.own_bytes

    def _fetch(self, disk: DiskCache, prompt: Sequence[int], boundaries: Collection[int]) -> None:
        """Bring the longest entry of the folder into memory, if it is longer than what is there. A file that is damaged is passed over."""
        kept = self._cache.peek(prompt, boundaries)
        longer_than = kept.snapshot.length if kept is not None else 0
        while (stored := disk.find(prompt, boundaries, longer_than)) is not None:
            used = False
            try:
                if not self._cache.could_hold(stored.n_pages, stored.own_bytes):
                    return
                like = [entry.snapshot for entry in self._cache.entries()]
                snapshot = load_snapshot(self._pool, disk.heads(stored), like)
                used = self._cache.insert(snapshot)
                return
            except OutOfPagesError:
                return  # live sequences have them
            except (DamagedError, OSError) as error:
                disk.spoil(stored, error)
            finally:
                disk.release(stored, used=used)

    def clear(self) -> None:
        """Drop everything that is kept."""
        self._cache.clear()
