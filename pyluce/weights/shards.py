"""The files of one model: names of shards, and one memory-mapped file each."""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Final

import numpy as np
import numpy.typing as npt

from pyluce.native.guard import ggml_luce_guard_add, ggml_luce_guard_faults, ggml_luce_guard_remove
from pyluce.weights.errors import ModelError, refuse
from pyluce.weights.gguf_reader import GgufHeader, MetaValue, read_header

_AGAIN: Final = "The results are discarded. Restore the file and start again"
_SHARD_NAME: Final = re.compile(r"^(?P<stem>.+)-(?P<index>\d{5})-of-(?P<count>\d{5})\.gguf$")


def shard_paths(path: Path) -> list[Path]:
    """All files of the model that `path` belongs to, in order; `path` may be any of them.

    `ModelError` names the first file that is missing.
    """
    match = _SHARD_NAME.match(path.name)
    if match is None:
        return [path]
    count = int(match["count"])
    if not 1 <= int(match["index"]) <= count:
        refuse(path, "name of the shard", expected=f"a number from 00001 to {count:05}", found=match["index"])
    paths = [path.with_name(f"{match['stem']}-{i:05}-of-{count:05}.gguf") for i in range(1, count + 1)]
    missing = [p for p in paths if not p.is_file()]
    if missing:
        found = f"no {missing[0].name}" + (f" (and {len(missing) - 1} more missing)" if missing[1:] else "")
        hint = "Download it into the same folder"
        refuse(path, "shards", expected=f"{count} files in one folder", found=found, hint=hint)
    return paths


class Shard:
    """One mapped GGUF file. Opening it reads the header only; `fd` stays open for reads of single rows.

    `whole` False: for looking at the header only; the file may end anywhere behind it.
    """

    def __init__(self, path: Path, *, whole: bool = True) -> None:
        self.path = path
        self._fd = -1
        self._map: mmap.mmap | None = None
        self._guarded = 0
        self._bytes: npt.NDArray[np.uint8] | None = None
        try:
            self._fd = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
            self._seen = os.fstat(self._fd)
            self.size_bytes = self._seen.st_size
            if self.size_bytes == 0:
                refuse(path, "size", expected="a GGUF file", found="an empty file", hint="Download it again")
            self._map = mmap.mmap(self._fd, 0, access=mmap.ACCESS_READ)
            self.header: GgufHeader = read_header(self._map, str(path), whole=whole)
            self._bytes = np.frombuffer(self._map, np.uint8)
        except OSError as error:
            self.close()
            raise ModelError(f"{path}: cannot be opened: {error.strerror or error}") from error
        except BaseException:
            self.close()
            raise

    @property
    def metadata(self) -> Mapping[str, MetaValue]:
        return self.header.metadata

    @property
    def fd(self) -> int:
        """The open file; `ValueError` after `close()`."""
        if self._fd < 0:
            raise ValueError(f"{self.path} is closed")
        return self._fd

    @property
    def mapped(self) -> npt.NDArray[np.uint8]:
        """The file's bytes. Whoever keeps this array keeps the file mapped: `close()` refuses until it is gone."""
        if self._bytes is None:
            raise ValueError(f"{self.path} is closed")
        return self._bytes

    @property
    def base_address(self) -> int:
        """Address of the file's first byte, page-aligned; valid until `close()`."""
        return int(self.mapped.ctypes.data)

    def guard(self) -> None:
        """From now on an access that the file cannot serve (it was truncated) is counted, instead of ending the process.

        The libraries must be loaded. What reads through the map must call `check_intact` before a result is used.
        """
        if not self._guarded and ggml_luce_guard_add(self.base_address, self.size_bytes):
            self._guarded = self.base_address

    def check_intact(self) -> None:
        """Raise `ModelError` when the map could not be read somewhere, or the file was written to since it was opened."""
        if self._guarded and ggml_luce_guard_faults(self._guarded):
            found = f"{os.fstat(self.fd).st_size}, or a disk that cannot read it"
            refuse(
                self.path, "size", expected=f"{self.size_bytes} bytes as when it was opened", found=found, hint=_AGAIN
            )
        now = os.fstat(self.fd)
        if (now.st_size, now.st_mtime_ns) != (self._seen.st_size, self._seen.st_mtime_ns):
            expected = f"{self._seen.st_size} bytes, unchanged since it was opened"
            refuse(self.path, "file", expected=expected, found=f"{now.st_size} bytes, written to since", hint=_AGAIN)

    def close(self) -> None:
        """Unmap and close. Addresses into the file are invalid afterwards. Idempotent.

        `ValueError` while something still uses the map (placed weights): nothing is closed then.
        """
        if self._map is not None:
            self._bytes = None
            try:
                self._map.close()
            except BufferError:
                self._bytes = np.frombuffer(self._map, np.uint8)
                raise ValueError(f"{self.path} is still in use: close the placed weights first") from None
            self._map = None
            if self._guarded:
                ggml_luce_guard_remove(self._guarded)
                self._guarded = 0
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Shard:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def check_split(shards: list[Shard]) -> None:
    """The shards belong together: number, count and total of tensors as their metadata say."""
    total = sum(len(s.header.tensors) for s in shards)
    for i, shard in enumerate(shards):
        count = _optional_integer(shard, "split.count")
        if len(shards) == 1:
            if count not in (None, 0, 1):
                hint = "Give all shards names that end in -00001-of-0000N.gguf"
                refuse(shard.path, "split.count", expected="1, by the file's name", found=count, hint=hint)
        elif (count is None and i == 0) or (count is not None and count != len(shards)):
            refuse(shard.path, "split.count", expected=f"{len(shards)} (as in its name)", found=count)
        number = _optional_integer(shard, "split.no")
        if number != i and not (number is None and len(shards) == 1):
            hint = "A shard was renamed or belongs to another model"
            refuse(shard.path, "split.no", expected=i, found="no such key" if number is None else number, hint=hint)
    for i, shard in enumerate(shards):
        tensors = _optional_integer(shard, "split.tensors.count")
        if tensors != total and not (tensors is None and (i > 0 or len(shards) == 1)):
            refuse(shard.path, "split.tensors.count", expected=f"{total} (tensors in all shards)", found=tensors)


def _optional_integer(shard: Shard, key: str) -> int | None:
    value = shard.metadata.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        refuse(shard.path, key, expected="an integer", found=value)
    return value
