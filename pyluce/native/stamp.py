"""What a native library was built from: one line of text, made by the build and checked by the loader.

This file uses the standard library only and imports nothing of pyluce, so that ``build.py`` can load it by path
(``importlib.util.spec_from_file_location``) before anything is installed. The stamp reads

    pin=<16 hex> patches=<16 hex> flags=<text> compiler=<text>

``build.py`` writes it into the library (``ggml_luce_stamp``) and into ``luce-build.json`` beside the library. ``pin``
and ``patches`` are digests of the project tree, so the loader can recompute both; ``flags`` and ``compiler`` are
information.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

STAMP_PARTS = ("pin", "patches", "flags", "compiler")
DIGEST_CHARS = 16
BUILD_INFO_NAME = "luce-build.json"

_PART = re.compile(r"(?:^| )(" + "|".join(STAMP_PARTS) + r")=")
_PIN_LINE = re.compile(r"""^([A-Za-z0-9_-]+)\s*=\s*(?:"([^"\\]*)"|'([^']*)'|(-?\d+))\s*(?:#.*)?$""")


def project_root() -> Path | None:
    """The project tree that this file belongs to, or None for an installed package."""
    root = Path(__file__).resolve().parents[2]
    return root if (root / "vendor" / "pin.toml").is_file() and (root / "patches" / "series").is_file() else None


def read_pin(path: Path) -> dict[str, str]:
    """Read ``vendor/pin.toml``: ``key = "text"`` or ``key = number`` lines, comments, ``[section]`` headings (ignored).

    Python 3.10 has no TOML reader; a line of any other form is a ValueError.
    """
    pin: dict[str, str] = {}
    for number, raw in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        line = raw.strip()
        if not line or line.startswith("#") or re.fullmatch(r"\[[A-Za-z0-9_.-]+\]", line):
            continue
        match = _PIN_LINE.match(line)
        if match is None:
            raise ValueError(f'{path}:{number}: expected `key = "text"` or `key = number`, found {raw!r}')
        key, double, single, integer = match.groups()
        pin[key] = next(value for value in (double, single, integer) if value is not None)
    return pin


def read_series(patches: Path) -> list[str]:
    """The patch file names of ``patches/series`` in order, comments (``#``) and blank lines left out."""
    series = patches / "series"
    lines = series.read_text(encoding="utf-8").splitlines() if series.is_file() else []
    return [name for name in (line.split("#", 1)[0].strip() for line in lines) if name]


def own_sources(patches: Path) -> list[Path]:
    """Our own files below ``patches/src``, sorted by their relative path."""
    source = patches / "src"
    return sorted((p for p in source.rglob("*") if p.is_file()), key=lambda p: p.relative_to(source).as_posix())


def pin_digest(root: Path) -> str:
    """Digest of the pin's keys and values (not of its comments or order)."""
    pin = read_pin(root / "vendor" / "pin.toml")
    return _digest([f"{key}={pin[key]}".encode() for key in sorted(pin)])


def patches_digest(root: Path) -> str:
    """Digest of the patches in series order and of our own source files, names and bytes."""
    patches = root / "patches"
    parts: list[bytes] = []
    for name in read_series(patches):
        parts += [name.encode(), (patches / name).read_bytes()]
    for path in own_sources(patches):
        parts += [path.relative_to(patches).as_posix().encode(), path.read_bytes()]
    return _digest(parts)


def format_stamp(pin: str, patches: str, flags: str, compiler: str) -> str:
    """The stamp line for the four parts, without what a C string literal cannot hold (quotes, backslashes)."""
    values = {"pin": pin, "patches": patches, "flags": flags, "compiler": compiler}
    return " ".join(f"{name}={_plain(values[name])}" for name in STAMP_PARTS)


def parse_stamp(text: str) -> dict[str, str]:
    """The parts of a stamp line; a part that is absent is absent from the result."""
    marks = list(_PART.finditer(text))
    ends = [*(mark.start() for mark in marks[1:]), len(text)]
    return {mark.group(1): text[mark.end() : end] for mark, end in zip(marks, ends, strict=False)}


def mismatch(found: str, root: Path) -> str | None:
    """Why a library with the stamp ``found`` does not belong to the project tree ``root``, or None when it does."""
    parts = parse_stamp(found)
    for name, expected in (("pin", pin_digest(root)), ("patches", patches_digest(root))):
        if parts.get(name) != expected:
            return f"{name}: expected {expected} (the project tree), found {parts.get(name, 'nothing')} (the library)"
    return None


def _plain(value: str) -> str:
    return re.sub(r'["\\\s]+', " ", value).strip()


def _digest(parts: list[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()[:DIGEST_CHARS]
