"""The PLE table: tens of gigabytes of which a token needs a few rows, so it stays in the file.

Rows are read with `preadv`, never through the memory map: a page fault for each row would read ahead, evict other
pages and stall on every miss, and a truncated file would end the process instead of raising an error.
"""

from __future__ import annotations

import itertools
import os
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Final

import numpy as np
import numpy.typing as npt

from pyluce.weights.dequantise import row_decoder
from pyluce.weights.errors import ModelError, refuse
from pyluce.weights.model_file import ModelFile
from pyluce.weights.tensors import PLE_TABLE

SERIAL_ROWS: Final = 64
"""Up to this many distinct rows one thread reads: starting others costs more than they save."""


class PleTable:
    """Reads rows of `per_layer_token_embd.weight`. One caller at a time; it keeps the file open by itself.

    `rows_read` counts rows that came from the file, `rows_requested` those that were asked for, `reads` system calls.
    """

    def __init__(self, model_file: ModelFile, threads: int = 4) -> None:
        info = model_file.tensors.get(PLE_TABLE)
        if info is None:
            refuse(model_file.path, PLE_TABLE, expected="a PLE table", found="a model without one")
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
        self._decode = row_decoder(info.type_id)
        self._threads = threads
        self._pool: ThreadPoolExecutor | None = None
        self._fd = os.dup(shard.fd)

    def gather(self, row_ids: npt.ArrayLike) -> npt.NDArray[np.float32]:
        """Rows `row_ids` (any shape, n in all) as float32 [n, width] (width fastest), in the order asked for.

        Each distinct row is read once, in file order; neighbours in one call. `IndexError` for a row outside the
        table; `ModelError` if the file ends early or cannot be read, after which other rows can still be read.
        """
        if self._fd < 0:
            raise ValueError(f"the PLE table of {self._path} is closed")
        wanted = np.asarray(row_ids, np.int64).reshape(-1)
        if not wanted.size:
            return np.empty((0, self.width), np.float32)
        if wanted.size <= SERIAL_ROWS:
            return self._gather_few(wanted.tolist())
        distinct, position = np.unique(wanted, return_inverse=True)
        if distinct[0] < 0 or distinct[-1] >= self.n_rows:
            bad = int(distinct[0] if distinct[0] < 0 else distinct[-1])
            raise IndexError(f"row of the PLE table: expected 0 to {self.n_rows - 1}, found {bad}")
        raw = np.empty((distinct.size, self.row_bytes), np.uint8)
        self.reads += self._read_all(distinct, raw)
        self.rows_requested += wanted.size
        self.rows_read += distinct.size
        return self._decode(raw, self.width)[position.reshape(-1)]

    def _gather_few(self, wanted: list[int]) -> npt.NDArray[np.float32]:
        """`gather` for the rows of a decode step, where a numpy call costs as much as a read: each row to where it was asked for."""
        places: dict[int, int] = {}
        for place, row in enumerate(wanted):
            places.setdefault(row, place)
        distinct = sorted(places)
        if distinct[0] < 0 or distinct[-1] >= self.n_rows:
            bad = distinct[0] if distinct[0] < 0 else distinct[-1]
            raise IndexError(f"row of the PLE table: expected 0 to {self.n_rows - 1}, found {bad}")
        size = self.row_bytes
        raw = np.empty((len(wanted), size), np.uint8)
        into = raw.reshape(-1).data
        run: list[memoryview] = []
        for row, following in zip(distinct, [*distinct[1:], -1], strict=True):
            begin = places[row] * size
            run.append(into[begin : begin + size])
            if following != row + 1:
                self._read_run(row + 1 - len(run), run)
                run = []
                self.reads += 1
        self.rows_requested += len(wanted)
        self.rows_read += len(distinct)
        if len(distinct) < len(wanted):
            raw = raw[[places[row] for row in wanted]]
        return self._decode(raw, self.width)

    def _read_all(self, rows: npt.NDArray[np.int64], raw: npt.NDArray[np.uint8]) -> int:
        """Fill `raw` [n, row_bytes] with the ascending `rows`; the work is split by the workers that really run."""
        starts = np.flatnonzero(np.diff(rows, prepend=rows[0] - 2) != 1)
        runs = list(zip(starts.tolist(), [*starts[1:].tolist(), rows.size], strict=True))
        workers = 1 if rows.size <= SERIAL_ROWS else min(self._threads, len(runs))
        if workers == 1:
            self._read_runs(rows, raw, runs)
        else:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="ple-read")
            bounds = [len(runs) * i // workers for i in range(workers + 1)]
            parts = [runs[a:b] for a, b in itertools.pairwise(bounds)]
            jobs = [self._pool.submit(self._read_runs, rows, raw, part) for part in parts]
            errors = [job.exception() for job in jobs]
            for error in errors:
                if error is not None:
                    raise error
        return len(runs)

    def _read_runs(self, rows: npt.NDArray[np.int64], raw: npt.NDArray[np.uint8], runs: list[tuple[int, int]]) -> None:
        """Read runs of neighbouring rows; `runs` are index ranges of `rows`."""
        for start, end in runs:
            self._read_run(int(rows[start]), [raw[start:end].reshape(-1).data])

    def _read_run(self, row: int, parts: list[memoryview]) -> None:
        """Fill `parts` one after the other with the rows from `row` on."""
        missing, offset = sum(map(len, parts)), self._offset + row * self.row_bytes
        while True:
            try:
                got = os.preadv(self._fd, parts, offset)
            except OSError as error:
                message = f"{self._path}: row {row} of {PLE_TABLE} cannot be read: {error.strerror or error}"
                raise ModelError(message) from error
            missing -= got
            if not missing:
                return
            offset += got
            if not got:
                hint = "The file was truncated after it was opened: restore it and load the model again"
                what = f"row {(offset - self._offset) // self.row_bytes} of {PLE_TABLE}"
                refuse(self._path, what, expected=f"{missing} bytes more", found="the end of the file", hint=hint)
            parts = _after(parts, got)

    def close(self) -> None:
        """Stop the readers and close the file. Idempotent."""
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


def _after(parts: list[memoryview], n_bytes: int) -> list[memoryview]:
    """What is left of `parts` when their first bytes are full."""
    while n_bytes >= len(parts[0]):
        n_bytes -= len(parts[0])
        parts = parts[1:]
    return [parts[0][n_bytes:], *parts[1:]]
