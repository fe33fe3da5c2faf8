"""Snapshots of prompts, found again by their tokens, under one budget of bytes.

An entry holds the state after a prefix of some prompt. A request may start from an entry only where its own cold run ends
a chunk, and only if the entry was computed in the same chunks as that cold run would have been. Entries share pages with each other and with live
sequences, so a conversation that grows costs its differences.

Eviction takes the entry that was used longest ago among those that no other entry extends and no live sequence came from,
but keeps the one that was used last (the point where the active conversation will go on). Taking only such leaves
keeps the shorter prefixes, which more requests share. A new entry for which that makes no room takes the place of those that it
extends itself: the deepest point of a conversation is worth most.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from pyluce.state.snapshot import Snapshot


@dataclass(frozen=True, slots=True)
class CacheStats:
    """What the cache holds and what it did. `hit_tokens`: tokens that requests did not have to prefill."""

    entries: int
    n_bytes: int
    budget_bytes: int
    lookups: int
    hits: int
    hit_tokens: int
    evictions: int
    refused: int


class CacheEntry:
    """One snapshot in the cache. `pins` counts live sequences that started from it."""

    __slots__ = ("key", "last_use", "pins", "snapshot")

    def __init__(self, key: bytes, snapshot: Snapshot) -> None:
        self.key = key
        self.snapshot = snapshot
        self.last_use = 0
        self.pins = 0


class PrefixCache:
    """Keeps snapshots; see the module. `page_bytes`: bytes of one page, `budget_bytes` 0: keep nothing.

    `own_budget_bytes`: of the budget, what may go into recurrent states and logits; the rest is pages of the pool.
    """

    def __init__(self, page_bytes: int, budget_bytes: int, own_budget_bytes: int | None = None) -> None:
        if budget_bytes < 0:
            raise ValueError(f"budget_bytes: expected 0 or more, found {budget_bytes}")
        self._own_budget = budget_bytes if own_budget_bytes is None else own_budget_bytes
        self._page_bytes = page_bytes
        self.budget_bytes = budget_bytes
        self._entries: dict[bytes, CacheEntry] = {}
        self._lengths: Counter[int] = Counter()
        self._pages: Counter[int] = Counter()
        self._own_bytes = 0
        self._clock = 0
        self._lookups = self._hits = self._hit_tokens = self._evictions = self._refused = 0

    @property
    def n_bytes(self) -> int:
        """Bytes that the entries keep: each page once, and what each has alone."""
        return len(self._pages) * self._page_bytes + self._own_bytes

    @property
    def own_bytes(self) -> int:
        """Those of them that are no pages: recurrent states and logits."""
        return self._own_bytes

    def stats(self) -> CacheStats:
        """Counters and sizes now."""
        return CacheStats(
            entries=len(self._entries),
            n_bytes=self.n_bytes,
            budget_bytes=self.budget_bytes,
            lookups=self._lookups,
            hits=self._hits,
            hit_tokens=self._hit_tokens,
            evictions=self._evictions,
            refused=self._refused,
        )

    def newest(self, limit: int) -> list[CacheEntry]:
        """The entries used last, newest first."""
        return sorted(self._entries.values(), key=lambda entry: -entry.last_use)[:limit]

    def find(self, tokens: Sequence[int], boundaries: Collection[int]) -> CacheEntry | None:
        """The longest entry that is a prefix of `tokens` and ends at one of `boundaries`; it is pinned until `release`.

        At len(tokens) only an entry with logits counts, as nothing is left to compute them from.
        """
        self._lookups += 1
        entry = self.peek(tokens, boundaries)
        if entry is not None:
            self._touch(entry)
            entry.pins += 1
            self._hits += 1
            self._hit_tokens += entry.snapshot.length
        return entry

    def peek(self, tokens: Sequence[int], boundaries: Collection[int]) -> CacheEntry | None:
        """What `find` would find, left as it is."""
        keys = prefix_keys(tokens, [n for n in self._lengths if n <= len(tokens) and n in boundaries], boundaries)
        for length in sorted(keys, reverse=True):
            entry = self._entries.get(keys[length])
            if entry is None or entry.snapshot.tokens != tuple(tokens[:length]):
                continue
            if entry.snapshot.cuts != tuple(sorted(b for b in boundaries if 0 < b < length)):
                continue
            if length == len(tokens) and entry.snapshot.logits is None:
                continue
            return entry
        return None

    def entries(self) -> list[CacheEntry]:
        """All entries, shorter ones first."""
        return sorted(self._entries.values(), key=lambda entry: entry.snapshot.length)

    def release(self, entry: CacheEntry) -> None:
        """A live sequence that came from this entry has ended."""
        if entry.pins < 1:
            raise ValueError("this entry is not pinned")
        entry.pins -= 1

    def wants(self, tokens: Sequence[int], cuts: Collection[int], needs_logits: bool = False) -> bool:
        """Whether a snapshot after these tokens, computed in chunks cut there, would be new."""
        if self.budget_bytes == 0:
            return False
        entry = self._entries.get(prefix_keys(tokens, [len(tokens)], cuts)[len(tokens)])
        return entry is None or (needs_logits and entry.snapshot.logits is None)

    def insert(self, snapshot: Snapshot) -> bool:
        """Keep a snapshot, evicting others for it; if it does not fit, it is closed and False returned."""
        key = prefix_keys(snapshot.tokens, [snapshot.length], snapshot.cuts)[snapshot.length]
        old = self._entries.get(key)
        if old is not None:
            if old.snapshot.logits is not None or snapshot.logits is None:
                self._touch(old)
                snapshot.close()
                return True
            if old.pins == 0:
                self._remove(old)
        new_pages = sum(1 for page in set(snapshot.pages) if page not in self._pages)
        needed = new_pages * self._page_bytes + snapshot.own_bytes
        own = snapshot.own_bytes
        fits = self.could_hold(len(set(snapshot.pages)), own)
        while self.n_bytes + needed > self.budget_bytes or self._own_bytes + own > self._own_budget:
            if key in self._entries or not (fits and self._evict_one(protect=snapshot)):
                self._refused += 1
                snapshot.close()
                return False
            needed = snapshot.own_bytes + self._page_bytes * sum(p not in self._pages for p in set(snapshot.pages))
        entry = CacheEntry(key, snapshot)
        self._entries[key] = entry
        self._lengths[snapshot.length] += 1
        self._pages.update(set(snapshot.pages))
        self._own_bytes += snapshot.own_bytes
        self._touch(entry)
        return True

    def could_hold(self, n_pages: int, own_bytes: int) -> bool:
        """An entry of this size fits when everything else has gone."""
        whole = n_pages * self._page_bytes + own_bytes
        return whole <= self.budget_bytes and own_bytes <= self._own_budget

    def reclaim(self, n_pages: int) -> None:
        """Evict until that many pages are held by no entry any more, or nothing can be evicted: live work comes first."""
        goal = len(self._pages) - n_pages
        while len(self._pages) > goal and self._evict_one(protect=None, keep_last=False):
            pass

    def clear(self) -> None:
        """Drop every entry, pinned ones too: a live sequence holds its pages itself."""
        for entry in list(self._entries.values()):
            self._remove(entry)

    def _touch(self, entry: CacheEntry) -> None:
        self._clock += 1
        entry.last_use = self._clock

    def _evict_one(self, protect: Snapshot | None, keep_last: bool = True) -> bool:
        """Evict one leaf; `protect`: a new snapshot, what it extends goes last."""
        extended = self._extended()
        unpinned = [entry for entry in self._entries.values() if entry.pins == 0]
        before = [entry for entry in unpinned if protect is not None and _extends(protect, entry.snapshot)]
        candidates = [entry for entry in unpinned if entry.key not in extended and entry not in before]
        if keep_last and candidates and protect is None:
            candidates.remove(max(candidates, key=lambda e: e.last_use))
        if not (candidates or before):
            return False
        self._remove(min(candidates or before, key=lambda e: e.last_use))
        self._evictions += 1
        return True

    def _extended(self) -> set[bytes]:
        """Keys of the entries that another entry extends."""
        found: set[bytes] = set()
        for entry in self._entries.values():
            snapshot = entry.snapshot
            shorter = [n for n in snapshot.cuts if n in self._lengths]
            keys = prefix_keys(snapshot.tokens, shorter, snapshot.cuts)
            found.update(key for key in keys.values() if key in self._entries)
        return found

    def _remove(self, entry: CacheEntry) -> None:
        del self._entries[entry.key]
        snapshot = entry.snapshot
        self._lengths[snapshot.length] -= 1
        if self._lengths[snapshot.length] == 0:
            del self._lengths[snapshot.length]
        for page in set(snapshot.pages):
            self._pages[page] -= 1
            if self._pages[page] == 0:
                del self._pages[page]
        self._own_bytes -= snapshot.own_bytes
        snapshot.close()


def _extends(longer: Snapshot, shorter: Snapshot) -> bool:
    """One was computed by going on from the other, or could have been."""
    return (
        shorter.length in longer.cuts
        and longer.tokens[: shorter.length] == shorter.tokens
        and longer.cuts[: len(shorter.cuts)] == shorter.cuts
    )


def prefix_keys(tokens: Sequence[int], lengths: Collection[int], cuts: Collection[int]) -> dict[int, bytes]:
    """For each n of `lengths` a SHA-256 of the first n tokens and of the cuts before n, in one pass over the tokens."""
    data = np.asarray(tokens, "<i4").tobytes()
    ends = np.array(sorted(cuts), "<i4")
    digest, at, out = hashlib.sha256(), 0, {}
    for length in sorted(lengths):
        digest.update(data[4 * at : 4 * length])
        at = length
        whole = digest.copy()
        whole.update(b"cuts" + ends[(ends > 0) & (ends < length)].tobytes())
        out[length] = whole.digest()
    return out
