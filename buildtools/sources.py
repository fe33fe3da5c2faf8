"""From the pin to a patched source tree: fetch, verify, unpack, patch, and write only files whose content changes."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TypedDict

from buildtools.report import BuildError, Report
from buildtools.unified_diff import apply_diff

MANIFEST_NAME = ".luce-tree.json"
TREE_DISK_BYTES = 200 << 20


class Manifest(TypedDict):
    """What the last sync left in ``vendor/src``: the tree's key, and for each file its size, mtime (ns) and digest."""

    key: dict[str, str]
    files: dict[str, list[int | str]]


@dataclass(frozen=True)
class Pin:
    """Which upstream source is built: ``vendor/pin.toml``."""

    package: str
    version: str
    sha256: str
    path: str
    parts: str
    tag: str
    licence: str

    @property
    def file_name(self) -> str:
        return f"{self.package}-{self.version}.tar.gz"


def load_pin(root: Path, stamp: ModuleType) -> Pin:
    """Read and check ``vendor/pin.toml``."""
    found = stamp.read_pin(root / "vendor" / "pin.toml")
    expected = set(Pin.__dataclass_fields__)
    if set(found) != expected:
        raise BuildError(f"vendor/pin.toml: expected the keys {sorted(expected)}, found {sorted(found)}.")
    return Pin(**found)


def verify(path: Path, pin: Pin) -> None:
    """BuildError unless the file's SHA-256 is the pinned one."""
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
    if digest.hexdigest() != pin.sha256:
        raise BuildError(
            f"{path}: the source archive is not the pinned one.\n"
            f"  expected SHA-256 {pin.sha256} (vendor/pin.toml, {pin.package} {pin.version})\n"
            f"  found    SHA-256 {digest.hexdigest()}\n"
            "  Delete the file and run again; if it differs again, do not build it: report it."
        )


def fetch(root: Path, pin: Pin, source: Path | None, report: Report) -> Path:
    """The verified source archive: ``source`` when given, else the cached one, else downloaded by the package's name."""
    if source is not None:
        if not source.is_file():
            raise BuildError(f"--source {source}: expected the file {pin.file_name}, found none.")
        verify(source, pin)
        return source
    cache = root / "vendor" / "cache"
    archive = cache / pin.file_name
    if not archive.is_file():
        report.line(f"fetch: {pin.package} {pin.version}, about 38 MB")
        cache.mkdir(parents=True, exist_ok=True)
        _download(cache, pin)
    verify(archive, pin)
    return archive


def _download(cache: Path, pin: Pin) -> None:
    """pip checks the hash before it looks inside the archive, so nothing unverified runs."""
    requirement = cache / "requirement.txt"
    requirement.write_text(f"{pin.package}=={pin.version} --hash=sha256:{pin.sha256}\n", encoding="utf-8")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--no-binary", pin.package, "--require-hashes", "-r", str(requirement), "-d", str(cache)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0 or not (cache / pin.file_name).is_file():
        tail = "\n".join("    " + line for line in (result.stdout + result.stderr).splitlines()[-15:])
        raise BuildError(
            f"pip could not fetch {pin.package} {pin.version}:\n{tail}\n"
            f"  Without a network, give the file: python build.py --source {pin.file_name}"
        )


def unpack(archive: Path, pin: Pin) -> dict[str, bytes]:
    """The pristine files below the pinned path (only the pinned parts), by their path in the source tree."""
    prefix = f"{pin.package}-{pin.version}/{pin.path}/"
    parts = set(pin.parts.split())
    files: dict[str, bytes] = {}
    try:
        with tarfile.open(archive) as tar:
            for member in tar:
                path = member.name.removeprefix(prefix)
                if path == member.name or path.partition("/")[0] not in parts or not member.isfile():
                    continue
                if ".." in path.split("/") or path.startswith("/"):
                    raise BuildError(f"{archive}: refused the path {member.name!r}, which leaves the source tree.")
                content = tar.extractfile(member)
                files[path] = content.read() if content else b""
    except (tarfile.TarError, EOFError, OSError) as error:
        raise BuildError(f"{archive}: expected a readable .tar.gz, found: {error}") from error
    if not files:
        raise BuildError(f"{archive}: expected files below {prefix}, found none. Check `path` in vendor/pin.toml.")
    return files


def patched(root: Path, pristine: dict[str, bytes], stamp: ModuleType) -> dict[str, bytes]:
    """The pristine files with ``patches/series`` applied and our own files of ``patches/src`` added."""
    patches = root / "patches"
    files = dict(pristine)
    for name in stamp.read_series(patches):
        if not (patches / name).is_file():
            raise BuildError(f"patches/series names {name}; expected the file patches/{name}, found none.")
        apply_diff(name, (patches / name).read_text(encoding="utf-8"), files)
    for source in stamp.own_sources(patches):
        path = source.relative_to(patches / "src").as_posix()
        if path in pristine:
            raise BuildError(f"patches/src/{path} would replace an upstream file. Make it a patch in patches/series.")
        files[path] = source.read_bytes()
    return files


def tree_key(root: Path, stamp: ModuleType) -> dict[str, str]:
    """What the source tree is made of: two digests of files in the repository."""
    return {"pin": stamp.pin_digest(root), "patches": stamp.patches_digest(root)}


def tree_differences(root: Path, stamp: ModuleType) -> list[str]:
    """Why ``vendor/src`` is not what the pin and the patches say; empty when it is. Looks at sizes and times only."""
    tree = root / "vendor" / "src"
    manifest = _read_manifest(tree)
    if manifest is None:
        return ["vendor/src: not unpacked"]
    has = manifest["key"]
    key = tree_key(root, stamp)
    stale = [name for name in key if has.get(name) != key[name]]
    found = [f"{name}: vendor/src has {has.get(name)}, the repository {key[name]}" for name in stale]
    return found + [f"vendor/src/{path}: {why}" for path, why in _touched(tree, manifest).items()]


def sync_tree(root: Path, wanted: dict[str, bytes], stamp: ModuleType, *, discard_edits: bool) -> int:
    """Make ``vendor/src`` hold ``wanted``; files with the right content are not written. Returns the number written.

    A file that somebody changed by hand is not overwritten unless ``discard_edits``.
    """
    tree = root / "vendor" / "src"
    manifest = _read_manifest(tree)
    old = manifest["files"] if manifest else {}
    touched = set(_touched(tree, manifest)) if manifest else set()
    present = _present(tree)
    write = [path for path, content in wanted.items() if not _holds(tree, path, content, old, touched, present)]
    remove = [path for path in present if path not in wanted]
    edited = sorted(touched & present & {*write, *remove})
    if edited and not discard_edits:
        raise BuildError(
            f"files in vendor/src were changed by hand: {', '.join(edited[:8])}{' ...' if len(edited) > 8 else ''}\n"
            "  vendor/src is generated from vendor/pin.toml and patches/. Move the change into patches/,\n"
            "  or drop it: python build.py --discard-edits"
        )
    _check_disk(root)
    (tree / MANIFEST_NAME).unlink(missing_ok=True)
    for path in remove:
        (tree / path).unlink()
    for path in write:
        _write(tree / path, wanted[path])
    entries = {path: [*_stat(tree / path), _digest(content)] for path, content in wanted.items()}
    text = json.dumps({"key": tree_key(root, stamp), "files": entries})
    _write(tree / MANIFEST_NAME, text.encode())
    return len(write)


def _holds(
    tree: Path, path: str, content: bytes, old: dict[str, list[int | str]], touched: set[str], present: set[str]
) -> bool:
    """Whether the file has this content: by the manifest when its size and time are as written, else by reading it."""
    if path not in present:
        return False
    if path in old and path not in touched:
        return old[path][2] == _digest(content)
    return (tree / path).read_bytes() == content


def _touched(tree: Path, manifest: Manifest) -> dict[str, str]:
    """Files whose size or time is not what the last sync left, missing files and files of nobody, with the reason."""
    files = manifest["files"]
    present = _present(tree)
    why = dict.fromkeys(present - files.keys(), "not written by build.py")
    for path, entry in files.items():
        if path not in present:
            why[path] = "missing"
        elif _stat(tree / path) != entry[:2]:
            why[path] = "changed since build.py wrote it"
    return why


def _present(tree: Path) -> set[str]:
    found: set[str] = set()
    for folder, _, names in os.walk(tree):
        below = os.path.relpath(folder, tree)
        found.update(name if below == "." else f"{below}/{name}" for name in names)
    return found - {MANIFEST_NAME}


def _read_manifest(tree: Path) -> Manifest | None:
    try:
        manifest = json.loads((tree / MANIFEST_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    is_whole = isinstance(manifest, dict) and {"key", "files"} <= manifest.keys()
    return Manifest(key=manifest["key"], files=manifest["files"]) if is_whole else None


def _stat(path: Path) -> list[int | str]:
    info = path.stat()
    return [info.st_size, info.st_mtime_ns]


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _check_disk(root: Path) -> None:
    free = shutil.disk_usage(root).free
    if free < TREE_DISK_BYTES:
        raise BuildError(f"{root}: expected {TREE_DISK_BYTES >> 20} MiB of free disk, found {free >> 20} MiB.")


def _write(path: Path, content: bytes) -> None:
    """Write through a neighbour and a rename, so that an interrupted run leaves the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(path.name + ".luce-new")
    try:
        new.write_bytes(content)
        new.replace(path)
    except OSError as error:
        new.unlink(missing_ok=True)
        raise BuildError(f"{path}: could not write {len(content)} bytes: {error}") from error
