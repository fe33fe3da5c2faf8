"""Writes GGUF files: typed metadata, tensors whose bytes are produced when they are written, one file or shards."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
import numpy.typing as npt

from pyluce.weights.ggml_types import TYPES

ALIGNMENT: Final = 32
VERSION: Final = 3

_CODES: Final[dict[str, tuple[int, str]]] = {
    "u8": (0, "<B"), "i8": (1, "<b"), "u16": (2, "<H"), "i16": (3, "<h"), "u32": (4, "<I"), "i32": (5, "<i"),
    "f32": (6, "<f"), "bool": (7, "<?"), "string": (8, ""), "u64": (10, "<Q"), "i64": (11, "<q"), "f64": (12, "<d"),
}  # fmt: skip
_ARRAY: Final = 9


@dataclass(frozen=True, slots=True)
class Value:
    """A value of metadata with its type in the file; a list is written as an array of `kind`."""

    kind: str
    value: Any


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor to write. `ne`: fastest axis first; `data()` yields its bytes, in order, each time it is called."""

    name: str
    ne: tuple[int, ...]
    type_id: int
    data: Callable[[], Iterable[npt.NDArray[Any]]]

    @property
    def nbytes(self) -> int:
        kind = TYPES[self.type_id]
        return kind.row_bytes(self.ne[0]) * int(np.prod(self.ne[1:], dtype=np.int64))


def write_gguf(path: Path, metadata: Mapping[str, Value], tensors: Sequence[Tensor]) -> None:
    """Write one file. `ValueError` if a tensor yields another number of bytes than its shape and type say."""
    with path.open("wb") as out:
        out.write(header_bytes(metadata, tensors))
        for tensor in tensors:
            out.write(b"\0" * (-out.tell() % ALIGNMENT))
            _write_tensor(out, tensor)


def write_shards(
    folder: Path, stem: str, count: int, metadata: Mapping[str, Value], tensors: Sequence[Tensor]
) -> list[Path]:
    """Write `stem-0000i-of-0000N.gguf`; the metadata go into the first, the tensors in order into all of them."""
    paths = [folder / f"{stem}-{i + 1:05}-of-{count:05}.gguf" for i in range(count)]
    for i, path in enumerate(paths):
        split = {
            "split.no": Value("u16", i),
            "split.count": Value("u16", count),
            "split.tensors.count": Value("i32", len(tensors)),
        }
        part = tensors[len(tensors) * i // count : len(tensors) * (i + 1) // count]
        write_gguf(path, {**metadata, **split} if i == 0 else split, part)
    return paths


def header_bytes(metadata: Mapping[str, Value], tensors: Sequence[Tensor]) -> bytes:
    """Everything before the data of the first tensor, without the padding."""
    out = [b"GGUF", struct.pack("<IQQ", VERSION, len(tensors), len(metadata))]
    for key, value in metadata.items():
        out += [_string(key), _typed(value)]
    offset = 0
    for tensor in tensors:
        out.append(_string(tensor.name))
        out.append(struct.pack(f"<I{len(tensor.ne)}QIQ", len(tensor.ne), *tensor.ne, tensor.type_id, offset))
        offset += tensor.nbytes + -tensor.nbytes % ALIGNMENT
    return b"".join(out)


def _string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _typed(value: Value) -> bytes:
    code, fmt = _CODES[value.kind]
    if not isinstance(value.value, list | tuple):
        body = _string(value.value) if value.kind == "string" else struct.pack(fmt, value.value)
        return struct.pack("<I", code) + body
    items = value.value
    if value.kind == "string":
        body = b"".join(_string(text) for text in items)
    else:
        body = struct.pack(f"<{len(items)}{fmt[1:]}", *items)
    return struct.pack("<IIQ", _ARRAY, code, len(items)) + body


def _write_tensor(out: BinaryIO, tensor: Tensor) -> None:
    written = 0
    for chunk in tensor.data():
        contiguous = np.ascontiguousarray(chunk)
        out.write(contiguous.data)
        written += contiguous.nbytes
    if written != tensor.nbytes:
        raise ValueError(f"{tensor.name}: expected {tensor.nbytes} bytes, found {written}")
