"""Reading and widening rows of a table in a file: by the native library where it is loaded, else by `preadv` and numpy."""

from __future__ import annotations

import errno
import os
from array import array
from collections.abc import Callable
from typing import NoReturn, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from pyluce.native.declare import UnboundFunction
from pyluce.native.errors import NativeError
from pyluce.native.luce import ggml_luce_pread_rows
from pyluce.weights.dequantise import row_decoder

Ids: TypeAlias = npt.NDArray[np.int64]
Reader: TypeAlias = Callable[[int, int, Ids, Ids, npt.NDArray[np.float32]], int]
"""(file, offset of the table, rows in rising order, where each goes, into float32 [n, width]) -> system calls.

`RowsMissing` when the file ends early, OSError when it cannot be read. Any number of threads may call it at once."""
FewReader: TypeAlias = Callable[[int, int, "array[int]", "array[int]", int], int]
"""The same with an address instead of the last."""


class RowsMissing(Exception):
    """The file ends before the end of `row`."""

    def __init__(self, row: int) -> None:
        super().__init__(row)
        self.row = row


def row_reader(type_id: int, row_bytes: int) -> Reader:
    """The reader of rows of `type_id`. Both read each row of a call once, and neighbours by one call.

    `ModelError` when nothing here knows the type.
    """
    if isinstance(cast(object, ggml_luce_pread_rows), UnboundFunction):
        return plain_reader(type_id, row_bytes)
    return native_reader(type_id, row_bytes)


def native_reader(type_id: int, row_bytes: int) -> Reader:
    """`ggml_luce_pread_rows`: no copy in between, and other threads run meanwhile."""

    def read(fd: int, offset: int, rows: Ids, places: Ids, out: npt.NDArray[np.float32]) -> int:
        calls = array("q", (0,))
        done = ggml_luce_pread_rows(
            fd, offset, row_bytes, type_id, rows.ctypes.data, places.ctypes.data, rows.size,
            out.shape[1], out.ctypes.data, calls.buffer_info()[0],
        )  # fmt: skip
        if done != rows.size:
            _explain(done, rows, type_id, row_bytes, out.shape[1])
        return calls[0]

    return read


def few_reader(type_id: int, row_bytes: int, width: int) -> FewReader:
    """As `native_reader`, for rows of `width` values and their places in arrays of 64-bit integers, into an address."""

    def read(fd: int, offset: int, rows: array[int], places: array[int], address: int) -> int:
        calls = array("q", (0,))
        done = ggml_luce_pread_rows(
            fd, offset, row_bytes, type_id, rows.buffer_info()[0], places.buffer_info()[0], len(rows),
            width, address, calls.buffer_info()[0],
        )  # fmt: skip
        if done != len(rows):
            _explain(done, rows, type_id, row_bytes, width)
        return calls[0]

    return read


def _explain(done: int, rows: Ids | array[int], type_id: int, row_bytes: int, width: int) -> NoReturn:
    """Raise what stopped a read after `done` rows."""
    if done == -errno.EINVAL:
        raise NativeError(f"rows of {row_bytes} bytes of type {type_id} cannot be widened to {width} values")
    if done < 0:
        raise OSError(-done, os.strerror(-done))
    raise RowsMissing(int(rows[done]))


def plain_reader(type_id: int, row_bytes: int) -> Reader:
    """The same without the library."""
    decode = row_decoder(type_id)

    def read(fd: int, offset: int, rows: Ids, places: Ids, out: npt.NDArray[np.float32]) -> int:
        distinct, position = np.unique(rows, return_inverse=True)
        raw = np.empty((distinct.size, row_bytes), np.uint8)
        starts = np.flatnonzero(np.diff(distinct, prepend=distinct[0] - 2) != 1).tolist()
        for start, end in zip(starts, [*starts[1:], distinct.size], strict=True):
            _read_run(fd, offset, row_bytes, int(distinct[start]), raw[start:end].reshape(-1).data)
        out[places] = decode(raw, out.shape[1])[position.reshape(-1)]
        return len(starts)

    return read


def _read_run(fd: int, offset: int, row_bytes: int, row: int, into: memoryview) -> None:
    """Fill `into` with the rows from `row` on."""
    done = 0
    while done < len(into):
        got = os.preadv(fd, [into[done:]], offset + row * row_bytes + done)
        if not got:
            raise RowsMissing(row + done // row_bytes)
        done += got
