"""Reads the header of one GGUF file: metadata and the table of tensors.

Why not ggml's own reader: it is sound about lengths, but it copies every string of the vocabulary, reports a fault
only through the log, and leaves questions open that a loader must answer (zero-sized dimensions, data beyond the end
of the file when the data is not read). This reader works on a memory map, trusts no count before it was compared with
the bytes that are left, allocates nothing in proportion to a count from the file, and names file, field and offset.
Arrays stay in the file until asked for, so a vocabulary of 250,000 tokens costs a walk over its lengths (some 50 ms).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from mmap import mmap
from typing import Final, NoReturn, TypeAlias

import numpy as np
import numpy.typing as npt

from pyluce.weights.errors import refuse
from pyluce.weights.ggml_types import TYPES

MAGIC: Final = b"GGUF"
VERSIONS: Final = (2, 3)
DEFAULT_ALIGNMENT: Final = 32
MAX_ALIGNMENT: Final = 1 << 16
MAX_DIMS: Final = 4
MAX_NAME_BYTES: Final = 63
MAX_KEY_BYTES: Final = 65535
MAX_KEYS: Final = 1 << 16
MAX_TENSORS: Final = 1 << 16
MAX_STRING_BYTES: Final = 1 << 24
MAX_ARRAY_STRINGS: Final = 1 << 22
MAX_ARRAY_NUMBERS: Final = 1 << 26

DAMAGED: Final = "The file is damaged or incomplete: download or convert it again"

_STRING: Final = 8
_ARRAY: Final = 9
_SCALARS: Final[dict[int, tuple[str, str]]] = {
    0: ("u8", "<u1"),
    1: ("i8", "<i1"),
    2: ("u16", "<u2"),
    3: ("i16", "<i2"),
    4: ("u32", "<u4"),
    5: ("i32", "<i4"),
    6: ("f32", "<f4"),
    7: ("bool", "<u1"),
    10: ("u64", "<u8"),
    11: ("i64", "<i8"),
    12: ("f64", "<f8"),
}
_SCALAR_FORMATS: Final = {
    code: struct.Struct(fmt)
    for code, fmt in {
        0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<B", 10: "<Q", 11: "<q", 12: "<d",
    }.items()
}  # fmt: skip
_U32: Final = struct.Struct("<I")
_U64: Final = struct.Struct("<Q")


class GgufArray:
    """An array of metadata, still in the file. Usable until the file is closed."""

    __slots__ = ("_data", "_offset", "kind", "length")

    def __init__(self, data: mmap, offset: int, kind: str, length: int) -> None:
        self._data = data
        self._offset = offset
        self.kind = kind
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __repr__(self) -> str:
        return f"an array of {self.length} {self.kind}"

    def numbers(self) -> npt.NDArray[np.generic]:
        """A copy of the elements; `TypeError` for strings."""
        if self.kind == "string":
            raise TypeError("this array holds strings")
        dtype = np.dtype(next(dtype for name, dtype in _SCALARS.values() if name == self.kind))
        raw = self._data[self._offset : self._offset + self.length * dtype.itemsize]
        values: npt.NDArray[np.generic] = np.frombuffer(raw, dtype)
        return values != 0 if self.kind == "bool" else values

    def strings(self) -> Iterator[str]:
        """The strings one by one; bytes that are no UTF-8 come as U+FFFD. `TypeError` for numbers."""
        if self.kind != "string":
            raise TypeError(f"this array holds {self.kind}")
        position = self._offset
        for _ in range(self.length):
            (size,) = _U64.unpack_from(self._data, position)
            position += 8 + size
            yield self._data[position - size : position].decode("utf-8", "replace")


MetaValue: TypeAlias = int | float | bool | str | GgufArray


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One row of the tensor table. `ne`: fastest axis first, as written; `offset`: bytes from the file's start."""

    name: str
    type_id: int
    ne: tuple[int, ...]
    nbytes: int
    offset: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """What stands before the data of a GGUF file."""

    version: int
    alignment: int
    data_offset: int
    metadata: dict[str, MetaValue] = field(repr=False)
    tensors: tuple[TensorEntry, ...] = field(repr=False)


class _Cursor:
    """A position in the mapped file; every read is checked against the bytes that are left."""

    __slots__ = ("data", "end", "path", "position")

    def __init__(self, data: mmap, path: str) -> None:
        self.data = data
        self.end = len(data)
        self.path = path
        self.position = 0

    def refuse(self, what: str, expected: object, found: object) -> NoReturn:
        refuse(self.path, f"{what} at byte {self.position}", expected=expected, found=found, hint=DAMAGED)

    def need(self, n_bytes: int, what: str) -> None:
        if n_bytes > self.end - self.position:
            self.refuse(what, f"{n_bytes} bytes", f"{self.end - self.position} bytes to the end of the file")

    def unpack(self, form: struct.Struct, what: str) -> int | float:
        self.need(form.size, what)
        (value,) = form.unpack_from(self.data, self.position)
        self.position += form.size
        assert isinstance(value, int | float)
        return value

    def u32(self, what: str) -> int:
        return int(self.unpack(_U32, what))

    def u64(self, what: str) -> int:
        return int(self.unpack(_U64, what))

    def count(self, what: str, limit: int, min_bytes_each: int) -> int:
        """A u64 that counts things which take at least `min_bytes_each` bytes of what is left."""
        n = self.u64(what)
        room = (self.end - self.position) // min_bytes_each
        if n > min(limit, room):
            self.position -= 8
            self.refuse(what, f"at most {min(limit, room)}", n)
        return n

    def string(self, what: str, limit: int) -> str:
        size = self.count(f"length of {what}", limit, 1)
        raw = self.data[self.position : self.position + size]
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError:
            self.refuse(what, "UTF-8 text", repr(raw[:40]))
        self.position += size
        return text

    def skip_strings(self, n: int, what: str) -> None:
        data, end, position, unpack = self.data, self.end, self.position, _U64.unpack_from
        for i in range(n):
            if position + 8 > end:
                self.position = position
                self.refuse(f"string {i} of {what}", "8 bytes of length", f"{end - position} bytes to the end")
            (size,) = unpack(data, position)
            position += 8 + size
            if position > end:
                self.position = position - 8 - size
                self.refuse(f"length of string {i} of {what}", f"at most {end - self.position - 8}", size)
        self.position = position


def read_header(data: mmap, path: str, *, whole: bool = True) -> GgufHeader:
    """Parse and check the header. The shapes are checked against types and file size, not against any model.

    `whole` False: the data may be missing, in part or entirely (a file that was cut off behind its header).
    """
    cursor = _Cursor(data, path)
    cursor.need(4, "magic")
    magic = data[:4]
    if magic != MAGIC:
        refuse(path, "first four bytes", expected="GGUF", found=repr(magic), hint="This is not a GGUF file")
    cursor.position = 4
    version = cursor.u32("version")
    if version & 0xFFFF == 0 and version != 0:
        refuse(path, "byte order", expected="little-endian", found="big-endian", hint="Convert it on this machine")
    if version not in VERSIONS:
        refuse(path, "version of GGUF", expected="2 or 3", found=version, hint=DAMAGED)
    n_tensors = cursor.count("number of tensors", MAX_TENSORS, 24)
    n_keys = cursor.count("number of keys", MAX_KEYS, 13)

    metadata: dict[str, MetaValue] = {}
    for i in range(n_keys):
        key = cursor.string(f"key {i}", MAX_KEY_BYTES)
        if not key or key in metadata:
            cursor.refuse(f"key {i}", "a new name", f"{key!r} again" if key else "an empty one")
        metadata[key] = _read_value(cursor, key)

    alignment = _alignment(metadata, path)
    described = [_read_tensor(cursor, i) for i in range(n_tensors)]
    data_offset = -(-cursor.position // alignment) * alignment
    tensors = _place(described, data_offset, alignment, cursor, whole)
    return GgufHeader(version, alignment, data_offset, metadata, tensors)


def _read_value(cursor: _Cursor, key: str) -> MetaValue:
    code = cursor.u32(f"type of {key}")
    if code == _STRING:
        return cursor.string(f"text of {key}", MAX_STRING_BYTES)
    if code == _ARRAY:
        return _read_array(cursor, key)
    if code not in _SCALARS:
        cursor.refuse(f"type of {key}", "0 to 12", code)
    value = cursor.unpack(_SCALAR_FORMATS[code], key)
    return bool(value) if _SCALARS[code][0] == "bool" else value


def _read_array(cursor: _Cursor, key: str) -> GgufArray:
    code = cursor.u32(f"element type of {key}")
    what = f"number of elements of {key}"
    if code == _STRING:
        n = cursor.count(what, MAX_ARRAY_STRINGS, 8)
        array = GgufArray(cursor.data, cursor.position, "string", n)
        cursor.skip_strings(n, key)
        return array
    if code not in _SCALARS:
        cursor.refuse(f"element type of {key}", "0 to 12 and no array of arrays", code)
    kind, dtype = _SCALARS[code]
    size = np.dtype(dtype).itemsize
    n = cursor.count(what, MAX_ARRAY_NUMBERS, size)
    array = GgufArray(cursor.data, cursor.position, kind, n)
    cursor.position += n * size
    return array


def _alignment(metadata: dict[str, MetaValue], path: str) -> int:
    value = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    good = isinstance(value, int) and not isinstance(value, bool) and 0 < value <= MAX_ALIGNMENT
    if not good or not isinstance(value, int) or value & (value - 1):
        refuse(path, "general.alignment", expected=f"a power of two up to {MAX_ALIGNMENT}", found=value, hint=DAMAGED)
    return value


def _read_tensor(cursor: _Cursor, index: int) -> tuple[str, int, tuple[int, ...], int, int]:
    """(name, type, ne, bytes, offset in the data) of one row of the tensor table."""
    name = cursor.string(f"name of tensor {index}", MAX_NAME_BYTES)
    what = f"tensor {name!r}"
    n_dims = cursor.u32(f"dimensions of {what}")
    if not 1 <= n_dims <= MAX_DIMS:
        cursor.refuse(f"dimensions of {what}", f"1 to {MAX_DIMS}", n_dims)
    ne = tuple(cursor.u64(f"shape of {what}") for _ in range(n_dims))
    n_values = 1
    for size in ne:
        n_values *= size
        if not 0 < n_values < 1 << 63:
            cursor.refuse(f"shape of {what}", "positive sizes with a product below 2^63", list(ne))
    type_id = cursor.u32(f"type of {what}")
    kind = TYPES.get(type_id)
    if kind is None:
        cursor.refuse(f"type of {what}", f"a type of ggml (0 to {max(TYPES)})", f"type {type_id}")
    if ne[0] % kind.block:
        cursor.refuse(f"rows of {what}", f"a multiple of {kind.block} values for {kind.name}", ne[0])
    return name, type_id, ne, n_values // kind.block * kind.size, cursor.u64(f"offset of {what}")


def _place(
    described: list[tuple[str, int, tuple[int, ...], int, int]],
    data_offset: int,
    alignment: int,
    cursor: _Cursor,
    whole: bool,
) -> tuple[TensorEntry, ...]:
    """Check that the tensors follow one another, aligned, without gap or overlap, inside the file if it is `whole`."""
    seen: set[str] = set()
    next_offset = 0
    entries = []
    for name, type_id, ne, nbytes, offset in described:
        if not name or name in seen:
            refuse(cursor.path, f"tensor {name!r}", expected="a name of its own", found="the name twice", hint=DAMAGED)
        seen.add(name)
        if offset != next_offset:
            refuse(
                cursor.path,
                f"offset of tensor {name!r}",
                expected=f"{next_offset} (aligned to {alignment}, right after the tensor before it)",
                found=offset,
                hint=DAMAGED,
            )
        if whole and data_offset + offset + nbytes > cursor.end:
            refuse(
                cursor.path,
                f"data of tensor {name!r}",
                expected=f"{nbytes} bytes from byte {data_offset + offset}",
                found=f"a file of {cursor.end} bytes",
                hint=DAMAGED,
            )
        entries.append(TensorEntry(name, type_id, ne, nbytes, data_offset + offset))
        next_offset = -(-(offset + nbytes) // alignment) * alignment
    return tuple(entries)
