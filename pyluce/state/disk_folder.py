"""The folder of a disk cache: one process's at a time, and read with suspicion."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from pyluce.state.entry_file import PART_SUFFIX, DamagedError, EntryHead, read_head
from pyluce.state.pages import PAGE_TOKENS, pages_for
from pyluce.state.prefix_cache import prefix_keys

SUFFIX: Final = ".state"
LIVE_SUFFIX: Final = ".live"
"""Running sequences of a parked model; they end with their process."""
LOCK_NAME: Final = "lock"
SHOWN: Final = 5  # damaged files that are named one by one


class CacheDirError(ValueError):
    """The folder cannot be used."""


@dataclass(slots=True)
class Stored:
    """One file. `head` None: it cannot be read. `usable` False: it only takes room; `damaged`: nobody can use it.

    `pins`: readers that need it to stay.
    """

    path: Path
    n_bytes: int
    last_use: float
    head: EntryHead | None = None
    parent: bytes | None = None
    usable: bool = False
    damaged: bool = False
    pins: int = 0

    @property
    def n_pages(self) -> int:
        """Pages that it takes in memory."""
        return pages_for(self.head.length) if self.head is not None else 0

    @property
    def own_bytes(self) -> int:
        """Bytes beside the pages that it takes in memory."""
        return sum(self.head.offsets[name][1] for name in ("recurrent", "logits")) if self.head is not None else 0


class FolderLock:
    """An exclusive lock on a folder, which ends with the process at the latest."""

    def __init__(self, folder: Path) -> None:
        """Make the folder and take the lock. Raises CacheDirError."""
        self.folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = open(folder / LOCK_NAME, "a+", encoding="ascii")  # noqa: SIM115  (held until close)
        except OSError as error:
            raise CacheDirError(
                f"expected a folder that can be written, found {folder}: {error.strerror or error}"
            ) from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._file.seek(0)
            owner = self._file.read().strip() or "another one"
            self._file.close()
            raise CacheDirError(
                f"{folder} is in use by process {owner}; give every server a folder of its own, or stop that one"
            ) from error
        with contextlib.suppress(OSError):  # the number is for people; a full disk is no reason to stop
            self._file.truncate(0)
            self._file.write(str(os.getpid()))
            self._file.flush()

    def close(self) -> None:
        """Let go. Idempotent."""
        with contextlib.suppress(OSError):
            self._file.close()


def read_folder(folder: Path, identity: Mapping[str, str]) -> tuple[dict[bytes, Stored], list[str]]:
    """Every entry file by its key, and what to tell the user about those that are skipped. Remains of unfinished writes are removed. OSError."""
    files: dict[bytes, Stored] = {}
    bad: dict[str, str] = {}
    foreign: Counter[str] = Counter()
    for path in sorted(folder.iterdir()):
        if path.name.endswith(
            (SUFFIX + PART_SUFFIX, LIVE_SUFFIX, LIVE_SUFFIX + PART_SUFFIX)
        ):  # of a process that is gone
            with contextlib.suppress(OSError):
                path.unlink()
        if not path.name.endswith(SUFFIX):
            continue
        try:
            status = path.stat()
            stored = Stored(path, status.st_size, status.st_mtime)
        except OSError as error:
            bad[path.name] = str(error.strerror or error)
            continue
        files[path.name.encode()] = stored  # a name of its own, until its content gives a better one
        try:
            head = read_head(path)
            key = _check(head, path)
        except (OSError, DamagedError) as error:
            bad[path.name] = str(error)
            stored.damaged = True
            continue
        del files[path.name.encode()]
        stored.head, stored.parent = head, head.parent
        differing = sorted(
            name for name in {*identity, *head.identity} if identity.get(name) != head.identity.get(name)
        )
        if differing:
            foreign[", ".join(differing)] += 1
            theirs = salt(head.identity)
            stored.parent = head.parent + theirs if head.parent is not None else None
            files[key + theirs] = stored
        else:
            stored.usable = True
            files[key] = stored
    _check_parents(files, bad)
    return files, _warnings(folder, bad, foreign)


def salt(identity: Mapping[str, str]) -> bytes:
    """8 bytes that tell identities apart, in file names."""
    return hashlib.sha256(json.dumps(dict(identity), sort_keys=True).encode()).digest()[:8]


def file_name(key: bytes, identity: Mapping[str, str]) -> str:
    """The name of an entry's file."""
    return f"{key.hex()}-{salt(identity).hex()}{SUFFIX}"


def _check(head: EntryHead, path: Path) -> bytes:
    """The key of a file whose parts fit each other. Raises DamagedError."""
    ends = head.ends
    if not len(ends) or ends[0] < 1 or ends[-1] != head.length or np.any(np.diff(ends) < 1):
        raise DamagedError(f"expected the ends of chunks up to {head.length}, found {ends.tolist()[:8]}")
    if head.first_page + head.n_pages != pages_for(head.length) or head.first_page < 0:
        raise DamagedError(
            f"expected pages up to {pages_for(head.length)}, found {head.n_pages} from {head.first_page}"
        )
    if (head.parent is None) != (head.first_page == 0 and head.parent_digest is None):
        raise DamagedError("expected the file that it continues, or all pages")
    key = entry_key(head)
    if path.name != file_name(key, head.identity):
        raise DamagedError("its name belongs to other tokens")
    return key


def entry_key(head: EntryHead) -> bytes:
    """SHA-256 of tokens and cuts, by which an entry is found."""
    return prefix_keys(head.tokens.tolist(), [head.length], head.ends[:-1].tolist())[head.length]


def _check_parents(files: dict[bytes, Stored], bad: dict[str, str]) -> None:
    """Give up what continues an entry that is not there as it was."""
    for stored in sorted(
        (s for s in files.values() if s.usable and s.head), key=lambda s: len(s.head.tokens) if s.head else 0
    ):
        head = stored.head
        if head is None or head.parent is None:
            continue
        parent = files.get(head.parent)
        before = parent.head if parent is not None and parent.usable else None
        if before is None:
            stored.usable, stored.damaged = False, True
            bad[stored.path.name] = "the entry that it continues is missing"
        elif before.digest != head.parent_digest or not _continues(head, before):
            stored.usable, stored.damaged = False, True
            bad[stored.path.name] = "the entry that it continues is another one"


def _continues(head: EntryHead, before: EntryHead) -> bool:
    return (
        before.length < head.length
        and np.array_equal(before.tokens, head.tokens[: before.length])
        and np.array_equal(before.ends, head.ends[: len(before.ends)])
        and before.first_page <= head.first_page <= before.length // PAGE_TOKENS
        and before.page_parts == head.page_parts
    )


def _warnings(folder: Path, bad: Mapping[str, str], foreign: Mapping[str, int]) -> list[str]:
    out = [f"cache file {folder / name} is skipped: {reason}" for name, reason in list(bad.items())[:SHOWN]]
    if len(bad) > SHOWN:
        out.append(f"{len(bad) - SHOWN} more damaged cache files in {folder} are skipped")
    for differing, count in foreign.items():
        files = "1 cache file" if count == 1 else f"{count} cache files"
        out.append(f"{files} in {folder} skipped: made with another setting of {differing}")
    return out
