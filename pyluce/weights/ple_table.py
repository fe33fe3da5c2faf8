"""The PLE table: tens of gigabytes of which a token needs a few rows, so it stays in the file.

Rows are read with `pread`, never through the memory map: a page fault for each row would read ahead, evict other
pages and stall on every miss, and a truncated file would end the process instead of raising an error.
"""

from __future__ import annotations

import itertools
import os
from array import array
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from threading import Lock
from types import TracebackType
from typing import Final

import numpy as np
import numpy.typing as npt

from pyluce.weights.errors import ModelError, refuse
from pyluce.weights.model_file import ModelFile
from pyluce.weights.ple_reader import Ids, RowsMissing, few_reader, row_reader
from pyluce.weights.tensors import PLE_TABLE

SERIAL_ROWS: Final = 512
"""Up to this many rows one thread reads: starting others costs more than they save."""

READERS: Final = 4
"""Threads that read at once, where the process may use so many processors."""


@dataclass(frozen=True, slots=True)
class GatherCounts:
    """What a gather did: rows asked for, rows that came from the file, system calls."""

    requested: int = 0
    read: int = 0
    calls: int = 0


class PleTable:
    """Reads rows of `per_layer_token_embd.weight`; any number of threads at once. It keeps the file open by itself.

    `rows_read` counts rows that came from the file, `rows_requested` those that were asked for, `reads` system calls: of every
    `gather`, and of a `gather_into` once its caller says with `count` that the rows were used.
    """

    def __init__(self, model_file: ModelFile, threads: int | None = None) -> None:
        """`threads`: readers of a large gather, `READERS` if not given and there are so many processors."""
        info = model_file.tensors.get(PLE_TABLE)
        if info is None:
            refuse(model_file.path, PLE_TABLE, expected="a PLE table", found="a model without one")
        if threads is None:
            threads = min(READERS, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else READERS)
        if threads < 1:
            raise ValueError(f"threads: expected 1 or more, found {threads}")
        shard = model_file.shards[info.shard]
        self.width, self.n_rows = info.ne
        self.row_bytes = info.row_bytes
        self.rows_requested = 0
        self.rows_read = 0
        self.reads = 0
        self._path = shard.path
        self._offset = info.offset
        self._reader = row_reader(info.type_id, info.row_bytes)
        self._few = few_reader(info.type_id, info.row_bytes, self.width)
        self._threads = threads
        self._lock = Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._fd = os.dup(shard.fd)

    def gather(self, row_ids: npt.ArrayLike) -> npt.NDArray[np.float32]:
        """Rows `row_ids` (any shape, n in all) as float32 [n, width] (width fastest), in the order asked for; counted."""
        ids = np.asarray(row_ids, np.int64)
        out = np.empty((ids.size, self.width), np.float32)
        self.count(self.gather_into(ids, out))
        return out

    def gather_into(self, row_ids: npt.ArrayLike, out: npt.NDArray[np.float32]) -> GatherCounts:
        """The same into `out`, contiguous, of n * width values in any shape; counted by `count` only.

        Each distinct row is read once, in file order; neighbours in one call. `IndexError` for a row outside the
        table; `ModelError` if the file ends early or cannot be read, after which other rows can still be read.
        """
        if self._fd < 0:
            raise ValueError(f"the PLE table of {self._path} is closed")
        wanted = np.asarray(row_ids, np.int64).reshape(-1)
        if out.dtype != np.float32 or not out.flags.c_contiguous or out.size != wanted.size * self.width:
            raise ValueError(
                f"expected contiguous float32 for {wanted.size} rows of {self.width}, found {out.dtype} of {out.shape}"
            )
        if not wanted.size:
            return GatherCounts()
        into = out.reshape(wanted.size, self.width)
        places = np.argsort(wanted)
        rows = wanted[places]
        self._check_range(int(rows[0]), int(rows[-1]))
        calls = self._read_all(rows, places, into)
        return GatherCounts(wanted.size, 1 + int(np.count_nonzero(rows[1:] != rows[:-1])), calls)

    def gather_few(self, row_ids: list[int], address: int) -> GatherCounts:
        """As `gather_into`, of at least one row, into float32 [n, width] at an address: what takes longest of a few rows is numpy."""
        if self._fd < 0:
            raise ValueError(f"the PLE table of {self._path} is closed")
        places = sorted(range(len(row_ids)), key=row_ids.__getitem__)
        rows = [row_ids[place] for place in places]
        self._check_range(rows[0], rows[-1])
        where = array("q", places)
        calls = self._explained(rows, lambda: self._few(self._fd, self._offset, array("q", rows), where, address))
        return GatherCounts(len(rows), len(set(rows)), calls)

    def count(self, counts: GatherCounts) -> None:
        """Add to the totals."""
        with self._lock:
            self.rows_requested += counts.requested
            self.rows_read += counts.read
            self.reads += counts.calls

    def _check_range(self, first: int, last: int) -> None:
        if first < 0 or last >= self.n_rows:
            bad = first if first < 0 else last
            raise IndexError(f"row of the PLE table: expected 0 to {self.n_rows - 1}, found {bad}")

    def _read_all(self, rows: Ids, places: Ids, out: npt.NDArray[np.float32]) -> int:
        """Fill `out` with the ascending `rows`; returns system calls. The caller reads a slice, the pool's threads the others."""
        if rows.size <= SERIAL_ROWS or self._threads == 1:
            return self._read(rows, places, out)
        cuts = rows[[rows.size * i // self._threads for i in range(1, self._threads)]]
        bounds = [0, *np.searchsorted(rows, cuts).tolist(), rows.size]  # a row is in one slice only
        slices = [slice(a, b) for a, b in itertools.pairwise(bounds) if a < b]
        pool = self._readers()
        jobs: list[Future[int]] = [pool.submit(self._read, rows[s], places[s], out) for s in slices[1:]]
        try:
            calls = self._read(rows[slices[0]], places[slices[0]], out)
        finally:
            errors = [job.exception() for job in jobs]  # nobody writes into `out` any more
        for error in errors:
            if error is not None:
                raise error
        return calls + sum(job.result() for job in jobs)

    def _readers(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self._threads - 1, thread_name_prefix="ple-read")
            return self._pool

    def _read(self, rows: Ids, places: Ids, out: npt.NDArray[np.float32]) -> int:
        return self._explained(rows, lambda: self._reader(self._fd, self._offset, rows, places, out))

    def _explained(self, rows: Ids | list[int], read: Callable[[], int]) -> int:
        """What `read` returns, which reads the ascending `rows`; its errors say which file and table they are about."""
        try:
            return read()
        except RowsMissing as missing:
            hint = "The file was truncated after it was opened: restore it and load the model again"
            what = f"row {missing.row} of {PLE_TABLE}"
            refuse(self._path, what, expected=f"{self.row_bytes} bytes", found="the end of the file", hint=hint)
        except OSError as error:
            which = f"rows {rows[0]} to {rows[-1]}" if len(rows) > 1 else f"row {rows[0]}"
            message = f"{self._path}: {which} of {PLE_TABLE} cannot be read: {error.strerror or error}"
            raise ModelError(message) from error

    def close(self) -> None:
        """Stop the readers and close the file. Idempotent; no gather may be under way."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> PleTable:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
