"""The prefix cache on disk: entries survive the process that made them.

One file an entry (`entry_file.py`), written by a thread of its own from a queue with a bound; the engine's thread only copies
bytes into it. A file holds the pages that the entry it continues does not have, so only leaves are evicted: the one used longest
ago (the file's time of change).

A folder serves one process at a time: the process holds an exclusive lock on the file `lock` in it, which the system releases
however the process ends. Files appear by a rename after everything was written and synchronised, so a crash leaves a whole file
or none.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from pyluce.state.disk_folder import CacheDirError, FolderLock, Stored, file_name, read_folder
from pyluce.state.entry_file import EntryHead, StateImage, file_bytes, read_head, write_entry
from pyluce.state.prefix_cache import prefix_keys

QUEUE_BYTES: Final = 256 << 20

log = logging.getLogger(__name__)


@dataclass(slots=True)
class DiskCounters:
    """What the cache did. `dropped`: entries that found the queue full; `failures`: files that could not be written or read."""

    written: int = 0
    hits: int = 0
    hit_tokens: int = 0
    evictions: int = 0
    dropped: int = 0
    refused: int = 0
    failures: int = 0


@dataclass(frozen=True, slots=True)
class _Job:
    key: bytes
    parent: bytes | None
    image: StateImage
    done: threading.Event = field(default_factory=threading.Event)


class DiskCache:
    """The entries of one folder that belong to one model set up one way (`identity`). Every method is safe from any thread.

    `limit_bytes` bounds all entries of the folder, those of other models included. `warnings`: what was skipped when it was opened.
    """

    def __init__(
        self, lock: FolderLock, limit_bytes: int, identity: Mapping[str, str], *, queue_bytes: int = QUEUE_BYTES
    ) -> None:
        """Read what is in the locked folder. The lock stays the caller's. Raises CacheDirError."""
        self.folder = folder = lock.folder
        self.identity = dict(identity)
        self._limit = limit_bytes
        self._queue_bytes = queue_bytes
        try:
            self._files, self.warnings = read_folder(folder, self.identity)
        except OSError as error:
            raise CacheDirError(f"{folder}: cannot be read: {error.strerror or error}") from error
        self._skipped = sum(not stored.usable for stored in self._files.values())
        self._lock = threading.RLock()
        self._counters = DiskCounters()
        self._lengths: Counter[int] = Counter(s.head.length for s in self._files.values() if s.usable and s.head)
        self._pending: dict[bytes, _Job] = {}
        self._pending_bytes = 0
        self._failing = False
        self._queue: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._run, name="luce-cache", daemon=True)
        self._writer.start()

    # what is there

    def has(self, key: bytes, *, with_logits: bool = False) -> bool:
        """The entry is on disk, or on its way there. `with_logits`: as one that can answer its prompt at once, if that can still be had."""
        with self._lock:
            stored = self._files.get(key)
            if stored is None or not stored.usable or stored.head is None:
                return key in self._pending
            return not with_logits or stored.head.has_logits or key in self._pending or self._continued(key)

    def find(self, tokens: Sequence[int], boundaries: Collection[int], longer_than: int) -> Stored | None:
        """The longest entry as `PrefixCache.find` would choose it, if it is longer than that; pinned until `release`."""
        with self._lock:
            lengths = [n for n in self._lengths if longer_than < n <= len(tokens) and n in boundaries]
            keys = prefix_keys(tokens, lengths, boundaries)
            for length in sorted(keys, reverse=True):
                stored = self._files.get(keys[length])
                if stored is None or not stored.usable or stored.head is None:
                    continue
                head, cuts = stored.head, sorted(b for b in boundaries if 0 < b < length)
                if not np.array_equal(head.tokens, tokens[:length]) or head.ends[:-1].tolist() != cuts:
                    continue
                if length == len(tokens) and not head.has_logits:
                    continue
                for part in self._chain(stored):
                    part.pins += 1
                return stored
            return None

    def heads(self, stored: Stored) -> list[EntryHead]:
        """The files that an entry's pages lie in, the one that begins the sequence first."""
        with self._lock:
            return [part.head for part in self._chain(stored) if part.head is not None]

    def release(self, stored: Stored, *, used: bool) -> None:
        """A found entry was read; `used`: and restored, which makes it the one used last."""
        with self._lock:
            for part in self._chain(stored):
                part.pins -= 1
                if used:
                    part.last_use = time.time()
                    with contextlib.suppress(OSError):
                        os.utime(part.path)
            if used and stored.head is not None:
                self._counters.hits += 1
                self._counters.hit_tokens += stored.head.length

    def spoil(self, stored: Stored, error: BaseException) -> None:
        """An entry could not be read: it and what continues it are not used any more."""
        with self._lock:
            self._counters.failures += 1
            log.warning("cache file %s is skipped: %s", stored.path.name, error)
            for other in list(self._files.values()):
                if other.usable and any(part is stored for part in self._chain(other)):
                    self._disable(other)
                    other.damaged = True

    def parent_of(self, tokens: Sequence[int], ends: Sequence[int]) -> tuple[bytes, int] | None:
        """The deepest entry on disk (or on its way) that a state of these tokens continues: its key and length."""
        with self._lock:
            lengths = {*self._lengths, *(len(job.image.tokens) for job in self._pending.values())}
            known = [end for end in ends[:-1] if end in lengths]
            keys = prefix_keys(tokens, known, ends)
            for end in sorted(keys, reverse=True):
                if self.has(keys[end]):
                    return keys[end], end
            return None

    # writing

    def room_for(self, n_bytes: int) -> bool:
        """The queue takes an entry of this size. False counts it as dropped."""
        with self._lock:
            fits = not self._pending or self._pending_bytes + n_bytes <= self._queue_bytes
            self._counters.dropped += not fits
            return fits

    def put(self, key: bytes, image: StateImage, parent: bytes | None) -> None:
        """Have an entry written; the caller asked `room_for` it, or waits with `flush`."""
        job = _Job(key, parent, image)
        with self._lock:
            if key in self._pending:
                return
            self._pending[key] = job
            self._pending_bytes += image.n_bytes
        self._queue.put(job)

    def flush(self) -> int:
        """Wait until everything that was put is written; the number of files that failed so far."""
        with self._lock:
            jobs = list(self._pending.values())
        for job in jobs:
            job.done.wait()
        with self._lock:
            return self._counters.failures

    def report(self) -> dict[str, int]:
        """Sizes and counters. Sizes are in bytes and not of memory."""
        with self._lock:
            c = self._counters
            return {
                "entries": sum(stored.usable for stored in self._files.values()),
                "size_on_disk": self._size(),
                "size_limit": self._limit,
                "skipped": self._skipped,
                "written": c.written,
                "hits": c.hits,
                "hit_tokens": c.hit_tokens,
                "evictions": c.evictions,
                "dropped": c.dropped,
                "refused": c.refused,
                "failures": c.failures,
            }

    def close(self) -> None:
        """Write what is waiting, end the thread. Idempotent."""
        if self._writer.is_alive():
            self._queue.put(None)
            self._writer.join()

    # the writer's thread

    def _run(self) -> None:
        while self._run_one(self._queue.get()):
            pass

    def _run_one(self, job: _Job | None) -> bool:
        if job is None:
            return False
        try:
            self._write(job)
            self._failing = False
        except Exception as error:  # a full disk, say: serving goes on
            with self._lock:
                self._counters.failures += 1
            if not self._failing:
                log.warning("%s: an entry could not be written, serving goes on without it: %s", self.folder, error)
            self._failing = True
        finally:
            with self._lock:
                del self._pending[job.key]
                self._pending_bytes -= job.image.n_bytes
            job.done.set()
        return True

    def _write(self, job: _Job) -> None:
        with self._lock:
            parent = self._files.get(job.parent) if job.parent is not None else None
            if job.parent is not None and (parent is None or not parent.usable):
                self._counters.refused += 1
                return  # what it continues was not written
            old = self._files.get(job.key)
            if old is not None and self._continued(job.key):
                return  # others continue it as it is
            if not self._make_room(file_bytes(job.image, self.identity), parent):
                self._counters.refused += 1
                return
        path = self.folder / file_name(job.key, self.identity)
        digest = parent.head.digest if parent is not None and parent.head is not None else None
        write_entry(path, job.image, self.identity, job.parent, digest)
        head = read_head(path)
        with self._lock:
            if old is not None:
                self._disable(old)
            self._files[job.key] = Stored(path, head.n_bytes, time.time(), head, job.parent, usable=True)
            self._lengths[head.length] += 1
            self._counters.written += 1

    def _make_room(self, needed: int, parent: Stored | None) -> bool:
        """Evict until `needed` bytes fit. False when they never will."""
        if needed > self._limit:
            return False
        while self._size() + needed > self._limit:
            parents = {stored.parent for stored in self._files.values()}
            kept = set(map(id, self._chain(parent))) if parent is not None else set()
            leaves = [
                (not stored.damaged, stored.last_use, key)
                for key, stored in self._files.items()
                if key not in parents and not stored.pins and id(stored) not in kept
            ]
            if not leaves:
                return False
            key = min(leaves)[2]
            stored = self._files[key]
            with contextlib.suppress(FileNotFoundError):
                stored.path.unlink()
            self._disable(stored)
            del self._files[key]
            self._counters.evictions += 1
        return True

    def _continued(self, key: bytes) -> bool:
        return any(other.usable and other.parent == key for other in self._files.values())

    def _size(self) -> int:
        return sum(stored.n_bytes for stored in self._files.values())

    def _chain(self, stored: Stored) -> list[Stored]:
        chain = [stored]
        while chain[-1].parent is not None:
            parent = self._files.get(chain[-1].parent)
            if parent is None:
                break
            chain.append(parent)
        return chain[::-1]

    def _disable(self, stored: Stored) -> None:
        if stored.usable and stored.head is not None:
            self._lengths[stored.head.length] -= 1
            if not self._lengths[stored.head.length]:
                del self._lengths[stored.head.length]
        stored.usable = False
