"""One state in one file: written whole or not at all, checked wherever it is read.

Layout: 8 bytes `MAGIC`, the header's length (uint32, little-endian), the header (JSON), its SHA-256, then the sections one after the other:

- `tokens` int32 [n_tokens], `ends` int32 [n_chunks] (where the chunks that computed them ended);
- `digests`: a SHA-256 of each page; `recurrent`, `logits`: bytes (`logits` may be empty);
- `pages`: the attention rows, page after page, from page `first_page` of the sequence on.

The header names every section's size and SHA-256 (the pages have `digests`), the parts that a page and the recurrent state are made of with
their bytes, what the state belongs to (`identity`), and the entry that holds the pages before `first_page` (`parent`, and the SHA-256 of its header).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

import numpy as np
import numpy.typing as npt

MAGIC: Final = b"LUCEST01"
PART_SUFFIX: Final = ".part"
MAX_HEADER: Final = 1 << 24
MAX_TOKENS: Final = 1 << 24
_HASH: Final = 32
_HEAD_SECTIONS: Final = ("tokens", "ends", "digests")
SECTIONS: Final = (*_HEAD_SECTIONS, "recurrent", "logits", "pages")

Bytes = npt.NDArray[np.uint8]
Parts = Sequence[tuple[str, int]]


class DamagedError(ValueError):
    """A file that cannot be used: not one of ours, cut off, or changed since it was written."""


@dataclass(frozen=True, slots=True)
class StateImage:
    """A sequence's state as plain bytes. `pages` [n_pages, page_bytes] are those from `first_page` on; see the module for the rest.

    `page_parts`, `recurrent_parts`: names and bytes of what a page and `recurrent` consist of, in order.
    """

    tokens: tuple[int, ...]
    ends: tuple[int, ...]
    first_page: int
    pages: Bytes
    page_parts: tuple[tuple[str, int], ...]
    recurrent: Bytes
    recurrent_parts: tuple[tuple[str, int], ...]
    logits: npt.NDArray[np.float32] | None

    @property
    def n_bytes(self) -> int:
        """Bytes of its arrays."""
        return self.pages.nbytes + self.recurrent.nbytes + (self.logits.nbytes if self.logits is not None else 0)


@dataclass(frozen=True, slots=True)
class EntryHead:
    """What a file says before its large sections. `digest`: SHA-256 of the header; `offsets`: where each section lies, and its bytes."""

    path: Path
    digest: bytes
    identity: Mapping[str, str]
    parent: bytes | None
    parent_digest: bytes | None
    tokens: npt.NDArray[np.int32]
    ends: npt.NDArray[np.int32]
    first_page: int
    n_pages: int
    page_parts: tuple[tuple[str, int], ...]
    recurrent_parts: tuple[tuple[str, int], ...]
    page_digests: bytes
    sums: Mapping[str, bytes]
    offsets: Mapping[str, tuple[int, int]]
    n_bytes: int

    @property
    def length(self) -> int:
        """Tokens in the state."""
        return len(self.tokens)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        return sum(size for _, size in self.page_parts)

    @property
    def has_logits(self) -> bool:
        """The logits that follow the last token are in it."""
        return self.offsets["logits"][1] > 0


def write_entry(
    path: Path,
    image: StateImage,
    identity: Mapping[str, str],
    parent: bytes | None = None,
    parent_digest: bytes | None = None,
) -> None:
    """Write a file so that it is there whole or not at all, also after a crash. Raises OSError with nothing left behind."""
    unfinished = path.with_name(path.name + PART_SUFFIX)
    sections = _sections(image)
    header = {
        "identity": dict(identity),
        "parent": parent.hex() if parent is not None else None,
        "parent_digest": parent_digest.hex() if parent_digest is not None else None,
        "first_page": image.first_page,
        "n_pages": len(image.pages),
        "page_parts": [list(part) for part in image.page_parts],
        "recurrent_parts": [list(part) for part in image.recurrent_parts],
        "sections": [
            [name, len(data), "" if name == "pages" else hashlib.sha256(data).hexdigest()]
            for name, data in sections.items()
        ],
    }
    text = json.dumps(header, separators=(",", ":"), sort_keys=True).encode()
    try:
        with open(unfinished, "wb") as file:
            file.write(MAGIC + struct.pack("<I", len(text)) + text + hashlib.sha256(text).digest())
            for data in sections.values():
                file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
        sync_folder(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise


def file_bytes(image: StateImage, identity: Mapping[str, str]) -> int:
    """About the size of its file, rather too much than too little."""
    names = sum(len(name) + 32 for name, _ in (*image.page_parts, *image.recurrent_parts, *identity.items()))
    return image.n_bytes + 4 * (len(image.tokens) + len(image.ends)) + _HASH * len(image.pages) + names + 2048


def sync_folder(folder: Path) -> None:
    """Make the names in a folder last. OSError."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sections(image: StateImage) -> dict[str, memoryview]:
    pages = np.ascontiguousarray(image.pages)
    digests = b"".join(hashlib.sha256(page.data).digest() for page in pages)
    logits = image.logits.astype("<f4", copy=False).tobytes() if image.logits is not None else b""
    return {
        "tokens": memoryview(np.asarray(image.tokens, "<i4").tobytes()),
        "ends": memoryview(np.asarray(image.ends, "<i4").tobytes()),
        "digests": memoryview(digests),
        "recurrent": np.ascontiguousarray(image.recurrent).reshape(-1).data,
        "logits": memoryview(logits),
        "pages": pages.reshape(-1).data,
    }


def read_head(path: Path) -> EntryHead:
    """Everything but the large sections. Raises DamagedError, or OSError when the file cannot be read."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        begin = file.read(len(MAGIC) + 4)
        if begin[: len(MAGIC)] != MAGIC or len(begin) < len(MAGIC) + 4:
            raise DamagedError(f"expected a file that begins with {MAGIC.decode()}, found {begin[: len(MAGIC)]!r}")
        (length,) = struct.unpack("<I", begin[len(MAGIC) :])
        if length > min(MAX_HEADER, size):
            raise DamagedError(f"expected a header within {size} bytes, found one of {length}")
        text, sum_ = file.read(length), file.read(_HASH)
        if hashlib.sha256(text).digest() != sum_:
            raise DamagedError("the header's checksum is wrong")
        try:
            return _parse(path, file, json.loads(text), len(begin) + length + _HASH, size, sum_)
        except (KeyError, TypeError, AttributeError, IndexError, OverflowError, json.JSONDecodeError) as error:
            raise DamagedError(f"the header cannot be understood: {type(error).__name__}: {error}") from error
        except ValueError as error:
            raise DamagedError(str(error)) from error


def _parse(path: Path, file: IO[bytes], header: dict[str, Any], start: int, size: int, digest: bytes) -> EntryHead:
    at, offsets, sums = start, {}, {}
    if tuple(name for name, _, _ in header["sections"]) != SECTIONS:
        raise DamagedError(f"expected the sections {', '.join(SECTIONS)}, found {header['sections']}")
    for name, n_bytes, sum_ in header["sections"]:
        if not isinstance(n_bytes, int) or n_bytes < 0:
            raise DamagedError(f"section {name}: expected a number of bytes, found {n_bytes!r}")
        offsets[name], sums[name] = (at, n_bytes), bytes.fromhex(sum_)
        at += n_bytes
    if at != size:
        raise DamagedError(f"expected {at} bytes, found {size}")
    if max(offsets["tokens"][1], offsets["ends"][1]) > 4 * MAX_TOKENS:
        raise DamagedError(f"expected at most {MAX_TOKENS} tokens, found {offsets['tokens'][1] // 4}")
    parts = {name: _checked(file, name, offsets[name], sums[name]) for name in _HEAD_SECTIONS}
    head = EntryHead(
        path=path,
        digest=digest,
        identity={str(key): str(value) for key, value in header["identity"].items()},
        parent=bytes.fromhex(header["parent"]) if header["parent"] is not None else None,
        parent_digest=bytes.fromhex(header["parent_digest"]) if header["parent_digest"] is not None else None,
        tokens=np.frombuffer(parts["tokens"], "<i4"),
        ends=np.frombuffer(parts["ends"], "<i4"),
        first_page=int(header["first_page"]),
        n_pages=int(header["n_pages"]),
        page_parts=tuple((str(name), int(n)) for name, n in header["page_parts"]),
        recurrent_parts=tuple((str(name), int(n)) for name, n in header["recurrent_parts"]),
        page_digests=parts["digests"],
        sums=sums,
        offsets=offsets,
        n_bytes=size,
    )
    for name, expected, found in (
        ("pages", head.n_pages * head.page_bytes, offsets["pages"][1]),
        ("digests", head.n_pages * _HASH, offsets["digests"][1]),
        ("recurrent", sum(n for _, n in head.recurrent_parts), offsets["recurrent"][1]),
    ):
        if expected != found:
            raise DamagedError(f"section {name}: expected {expected} bytes, found {found}")
    return head


def _checked(file: IO[bytes], name: str, place: tuple[int, int], expected: bytes) -> bytes:
    file.seek(place[0])
    data = file.read(place[1])
    if len(data) != place[1] or hashlib.sha256(data).digest() != expected:
        raise DamagedError(f"section {name}: its checksum is wrong")
    return data


def read_section(head: EntryHead, name: str) -> Bytes:
    """A section with a checksum of its own. Raises DamagedError or OSError."""
    with open(head.path, "rb") as file:
        return np.frombuffer(_checked(file, name, head.offsets[name], head.sums[name]), np.uint8)


def read_pages(head: EntryHead, out: Bytes, last: int) -> None:
    """Read the pages from the file's first one up to `last` (not included) into out [n, page_bytes]. DamagedError or OSError."""
    count = last - head.first_page
    if not 0 <= count <= head.n_pages:
        raise DamagedError(
            f"expected the pages {head.first_page} to {last}, found {head.n_pages} from {head.first_page}"
        )
    with open(head.path, "rb") as file:
        file.seek(head.offsets["pages"][0])
        for index in range(count):
            if file.readinto(out[index].data) != head.page_bytes:
                raise DamagedError(f"page {head.first_page + index}: the file ends before it does")
            if hashlib.sha256(out[index].data).digest() != head.page_digests[_HASH * index : _HASH * (index + 1)]:
                raise DamagedError(f"page {head.first_page + index}: its checksum is wrong")
