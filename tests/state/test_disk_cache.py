"""Files of kept states: written whole, checked wherever they are read, skipped with a reason when anything is wrong with them."""

from __future__ import annotations

import hashlib
import json
import os
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyluce.graph import RunnerOptions, TrunkRunner
from pyluce.state import SnapshotStore, StatePool
from pyluce.state.disk_cache import DiskCache
from pyluce.state.disk_folder import CacheDirError, FolderLock
from pyluce.state.entry_file import MAGIC, DamagedError, StateImage, read_head, write_entry
from pyluce.state.image import take_live_image
from pyluce.state.prefix_cache import prefix_keys
from tests.support.disk import quick_disk  # noqa: F401
from tests.support.models import TEST_SHAPE, ModelCache, model_cache  # noqa: F401
from tests.support.real_model import require_libraries

IDENTITY = {"model": "a", "options": "b"}
ROOT = Path(__file__).resolve().parents[2]
PROMPT = list(range(3, 203))


@pytest.fixture(scope="module")
def runner(model_cache: ModelCache) -> Iterator[TrunkRunner]:  # noqa: F811
    require_libraries()
    options = RunnerOptions(n_ctx=256, n_slots=2, chunk_tokens=64, prefix_cache_bytes=32 << 20)
    with TrunkRunner(model_cache.tiny("F32"), options) as runner:
        yield runner


class Open:
    """A folder, its lock, cache and a fresh store."""

    def __init__(self, runner: TrunkRunner, folder: Path, limit: int = 1 << 30, **options: Any) -> None:
        self.runner = runner
        self.lock = FolderLock(folder)
        self.disk = DiskCache(self.lock, limit, options.pop("identity", IDENTITY), **options)
        self.store = SnapshotStore(runner._pool, 32 << 20)
        self.store.attach(self.disk)

    def prefill(self, tokens: list[int], cuts: tuple[int, ...]) -> tuple[int, bytes]:
        """Start from what is kept, compute the rest, keep what is new: tokens that were kept, and the last logits."""
        state = self.runner.new_sequence()
        ends = sorted({*range(64, len(tokens), 64), *cuts, len(tokens)})
        start = self.store.start(state, tokens, set(ends))
        begin, logits = start.length, start.logits
        for end in (end for end in ends if end > start.length):
            logits = self.runner.prefill(state, tokens[begin:end], want="last" if end == len(tokens) else "none")
            self.store.offer(state, logits if end == len(tokens) else None)
            begin = end
        self.store.end(state)
        state.free()
        assert logits is not None
        return start.length, logits.tobytes()

    def close(self) -> None:
        self.store.clear()
        self.disk.close()
        self.lock.close()

    def __enter__(self) -> Open:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@pytest.fixture(scope="module")
def cold(runner: TrunkRunner) -> bytes:
    state = runner.new_sequence()
    logits = None
    for begin, end in ((0, 64), (64, 100), (100, 128), (128, 192), (192, 200)):
        logits = runner.prefill(state, PROMPT[begin:end])
    state.free()
    assert logits is not None
    return logits.tobytes()


def reseal(data: bytes, change: Callable[[dict[str, Any]], None]) -> bytes:
    """The file with its header changed, and a right checksum of it."""
    (length,) = struct.unpack("<I", data[8:12])
    header = json.loads(data[12 : 12 + length])
    change(header)
    text = json.dumps(header).encode()
    return MAGIC + struct.pack("<I", len(text)) + text + hashlib.sha256(text).digest() + data[12 + length + 32 :]


def flip(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def section(data: bytes, name: str) -> int:
    """Where a section begins."""
    (length,) = struct.unpack("<I", data[8:12])
    at = 12 + length + 32
    for found, size, _ in json.loads(data[12 : 12 + length])["sections"]:
        if found == name:
            break
        at += size
    return at


def wrong_sizes(header: dict[str, Any]) -> None:
    header["page_parts"][0][1] += 4


def wrong_end(header: dict[str, Any]) -> None:
    header["sections"][5][1] += 10**12


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "cut off in the header": lambda data: data[:50],
    "cut off in the data": lambda data: data[:-1],
    "longer than it says": lambda data: data + b"\0",
    "not one of ours": lambda data: b"GGUF" + data[4:],
    "of a later version": lambda data: b"LUCEST99" + data[8:],
    "random": lambda data: np.random.default_rng(0).bytes(len(data)),
    "all zero": lambda data: bytes(len(data)),
    "an enormous header": lambda data: data[:8] + b"\xff\xff\xff\xff" + data[12:],
    "a bit of the header": lambda data: flip(data, 40),
    "a bit of the tokens": lambda data: flip(data, section(data, "tokens") + 3),
    "a bit of the recurrent state": lambda data: flip(data, section(data, "recurrent") + 5000),
    "a bit of the logits": lambda data: flip(data, section(data, "logits") + 5),
    "a bit of a page": lambda data: flip(data, section(data, "pages") + 1000),
    "sizes that do not fit": lambda data: reseal(data, wrong_sizes),
    "data beyond the end": lambda data: reseal(data, wrong_end),
    "a header of other things": lambda data: reseal(data, dict.clear),
    "tokens of another file": lambda data: reseal(data, lambda header: header.update(first_page=1)),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_file_is_passed_over(
    runner: TrunkRunner, tmp_path: Path, cold: bytes, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    with Open(runner, tmp_path) as kept:
        kept.prefill(PROMPT, (100,))
    victim = max(tmp_path.glob("*.state"), key=lambda path: read_head(path).length)
    victim.write_bytes(DAMAGE[what](victim.read_bytes()))
    with Open(runner, tmp_path) as kept:
        start, logits = kept.prefill(PROMPT, (100,))
        assert logits == cold, "whatever is wrong with a file, nothing wrong is restored"
        assert start == 192
        said = [*kept.disk.warnings, *(record.getMessage() for record in caplog.records)]
        assert len(said) == 1 and victim.name in said[0] and "is skipped: " in said[0], said
        assert kept.prefill(PROMPT, (100,)) == (200, cold), "it was computed again, and kept again"
    with Open(runner, tmp_path) as kept:
        assert not kept.disk.warnings and kept.prefill(PROMPT, (100,)) == (200, cold), "the good file took its place"


def test_a_missing_or_changed_parent_takes_its_children_along(runner: TrunkRunner, tmp_path: Path, cold: bytes) -> None:
    with Open(runner, tmp_path / "a") as kept:
        kept.prefill(PROMPT, (100,))
    files = {read_head(path).length: path for path in (tmp_path / "a").glob("*.state")}
    assert sorted(files) == [64, 100, 128, 192, 200]
    files[100].unlink()
    with Open(runner, tmp_path / "a") as kept:
        assert kept.prefill(PROMPT, (100,)) == (64, cold)
        assert len(kept.disk.warnings) == 3
        assert all("the entry that it continues is missing" in text for text in kept.disk.warnings)
    with Open(runner, tmp_path / "a") as kept:
        assert kept.prefill(PROMPT, (100,)) == (200, cold), "all was written anew"


def test_remains_and_strangers(runner: TrunkRunner, tmp_path: Path) -> None:
    (tmp_path / "x.state.part").write_bytes(b"unfinished")
    (tmp_path / "7.live").write_bytes(b"of a process that is gone")
    (tmp_path / "notes.txt").write_text("not ours")
    (tmp_path / "folder.state").mkdir()
    with Open(runner, tmp_path) as kept:
        assert len(kept.disk.warnings) == 1 and "folder.state" in kept.disk.warnings[0]
        kept.prefill(PROMPT[:70], ())
    assert sorted(path.name for path in tmp_path.iterdir() if path.suffix not in (".state", "")) == ["notes.txt"]


def test_another_identity_is_foreign_and_takes_room(runner: TrunkRunner, tmp_path: Path, cold: bytes) -> None:
    with Open(runner, tmp_path, identity={**IDENTITY, "model": "another"}) as kept:
        kept.prefill(PROMPT, (100,))
        kept.disk.flush()
        size = kept.disk.report()["size_on_disk"] + 20_000  # room is reckoned a little high
    with Open(runner, tmp_path, limit=size) as kept:
        assert kept.disk.warnings == [f"5 cache files in {tmp_path} skipped: made with another setting of model"]
        assert kept.prefill(PROMPT, (100,)) == (0, cold)
        kept.disk.flush()
        report = kept.disk.report()
        assert report["size_on_disk"] <= size and report["evictions"] > 0 and report["written"] == 5
    with Open(runner, tmp_path, limit=size) as kept:
        assert kept.prefill(PROMPT, (100,)) == (200, cold)


def image(n_tokens: int, first: int = 0, tokens: list[int] | None = None, own: int = 100) -> StateImage:
    """An image with the right shape and no meaning."""
    ids = tuple(tokens or range(first, first + n_tokens))
    pages = np.zeros((-(-n_tokens // 64), 1000), np.uint8)
    return StateImage(ids, (n_tokens,), 0, pages, (("k", 1000),), np.zeros(own, np.uint8), (("gdn", own),), None)


def key(one: StateImage) -> bytes:
    return prefix_keys(one.tokens, [len(one.tokens)], one.ends[:-1])[len(one.tokens)]


def test_the_queue_has_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()

    def slow(*arguments: Any) -> None:
        go.wait(20)
        write_entry(*arguments)

    monkeypatch.setattr("pyluce.state.disk_cache.write_entry", slow)
    disk = DiskCache(FolderLock(tmp_path), 1 << 30, IDENTITY, queue_bytes=5000)
    put = 0
    for first in range(20):
        one = image(64, first)
        if disk.room_for(one.n_bytes):
            disk.put(key(one), one, None)
            put += 1
    assert put == 4 and disk.report()["dropped"] == 16
    go.set()
    disk.close()
    assert len(list(tmp_path.glob("*.state"))) == 4


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("fsync", "replace"):

        def fail(*_: Any) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(os, name, fail)
            with pytest.raises(OSError, match="No space left"):
                write_entry(tmp_path / "x.state", image(64), IDENTITY)
        assert list(tmp_path.iterdir()) == []


def test_leaves_go_first_and_the_oldest_of_them(tmp_path: Path) -> None:
    disk = DiskCache(FolderLock(tmp_path), 20_000, IDENTITY)
    root = image(64, tokens=list(range(64)))
    disk.put(key(root), root, None)
    for index in range(12):
        tokens = tuple(range(64)) + (1000 + index,) * 64
        child = StateImage(
            tokens,
            (64, 128),
            1,
            np.zeros((1, 1000), np.uint8),
            root.page_parts,
            root.recurrent,
            root.recurrent_parts,
            None,
        )
        parent = disk.parent_of(child.tokens, child.ends)
        assert parent == (key(root), 64)
        disk.put(key(child), child, parent[0])
        disk.flush()
    report = disk.report()
    assert report["size_on_disk"] <= 20_000 and report["evictions"] > 0
    assert disk.has(key(root)), "it is older than all, but others continue it"
    assert disk.find(tuple(range(64)) + (1011,) * 64 + (1,), {64, 128}, 0) is not None
    assert disk.find(tuple(range(64)) + (1000,) * 64 + (1,), {64, 128}, 64) is None
    disk.close()


def test_an_entry_beyond_the_limit_evicts_nothing(tmp_path: Path) -> None:
    disk = DiskCache(FolderLock(tmp_path), 5000, IDENTITY)
    small, large = image(64), image(64, first=500, own=10_000)
    disk.put(key(small), small, None)
    disk.put(key(large), large, None)
    disk.close()
    assert disk.has(key(small)) and not disk.has(key(large)) and disk.report()["refused"] == 1


def test_the_lock_holds_between_processes(tmp_path: Path) -> None:
    code = f"from pathlib import Path; from pyluce.state.disk_folder import FolderLock; FolderLock(Path({str(tmp_path)!r}))"
    lock = FolderLock(tmp_path)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and f"is in use by process {os.getpid()}" in done.stderr
    with pytest.raises(CacheDirError):
        FolderLock(tmp_path)
    lock.close()
    lock.close()
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_heads_that_cannot_be(tmp_path: Path) -> None:
    path = tmp_path / "x.state"
    for bad, match in (
        ({"tokens": None}, "cannot be understood"),
        ({"page_parts": "x"}, "cannot be understood|expected"),
        ({"n_pages": 10**9}, "section pages"),
        ({"n_pages": -1}, "section"),
        ({"parent": "zz"}, "hexadecimal|cannot be understood"),
        ({"sections": []}, "expected the sections"),
    ):
        write_entry(path, image(64), IDENTITY)

        def change(header: dict[str, Any], bad: dict[str, Any] = bad) -> None:
            header.update(bad)
            if bad.get("tokens", 0) is None:
                del header["identity"]

        path.write_bytes(reseal(path.read_bytes(), change))
        with pytest.raises(DamagedError, match=match):
            read_head(path)


@pytest.mark.parametrize("late_keys", [True, False])
def test_keys_of_the_draft_head_come_a_token_late(
    model_cache: ModelCache,  # noqa: F811
    tmp_path: Path,
    late_keys: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An entry that ends with a page does not have the head's last keys yet: what continues it must bring that page again."""
    model = model_cache.write("disk-mtp.gguf", replace(TEST_SHAPE, mtp=True), 20)
    options = RunnerOptions(n_ctx=256, n_slots=2, chunk_tokens=64, prefix_cache_bytes=32 << 20, mtp=True)
    if not late_keys:
        monkeypatch.setattr(StatePool, "settled_pages", lambda self, length: length // 64)
    with TrunkRunner(model, options) as runner:
        with Open(runner, tmp_path) as kept:
            state = runner.new_sequence()
            for begin, end in ((0, 64), (64, 94)):
                runner.prefill(state, PROMPT[begin:end])
                kept.store.offer(state)
            expected = take_live_image(runner._pool, state).pages[0].tobytes()
            state.free()
        runner.poison_free_state()
        with Open(runner, tmp_path) as kept:
            state = runner.new_sequence()
            assert kept.store.start(state, PROMPT[:100], {64, 94, 100}).length == 94
            found = take_live_image(runner._pool, state).pages[0].tobytes()
            kept.store.end(state)
            state.free()
    assert (found == expected) is late_keys
