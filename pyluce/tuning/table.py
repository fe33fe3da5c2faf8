"""A table of choices as a file: which device, driver, libraries and model it was measured with, and what was chosen for each product."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from pyluce.native.structs import GGMLType
from pyluce.native.tune import TuneKind

FORMAT: Final = 1
_TEXTS: Final = ("device", "architecture", "libraries", "model")
_ENTRY_KEYS: Final = {"kind", "type", "k", "m", "n_used", "rows", "value", "microseconds"}


class TuneError(ValueError):
    """A table cannot be used; the message says which and why."""


@dataclass(frozen=True, slots=True, order=True)
class Entry:
    """One product's choice. rows: columns of a chunk, a power of two; 0 of a row product, whose choice must not depend on them.

    microseconds: what a candidate took, by `ROWS:VALUE`, for people to read.
    """

    kind: TuneKind
    type_id: int
    k: int
    m: int
    n_used: int
    rows: int
    value: int
    microseconds: Mapping[str, float] = field(default_factory=dict, compare=False)

    def __str__(self) -> str:
        experts = f", {self.n_used} picks" if self.n_used else ""
        columns = f", up to {self.rows} columns" if self.kind is TuneKind.CHUNK else ""
        return f"{self.kind.name.lower()} {GGMLType(self.type_id).name} [{self.k}, {self.m}]{experts}{columns}"


@dataclass(frozen=True, slots=True)
class TuneTable:
    """`libraries`: their stamp. `driver`: its version, which is recorded and decides nothing: kernels are compiled before."""

    device: str
    architecture: str
    driver: int
    libraries: str
    model: str
    entries: tuple[Entry, ...]

    @property
    def digest(self) -> str:
        """Of all that bits can depend on: two runs with equal digests compute the same. 16 hex digits."""
        chosen = [(int(e.kind), e.type_id, e.k, e.m, e.n_used, e.rows, e.value) for e in sorted(self.entries)]
        return hashlib.sha256(json.dumps([self.device, self.libraries, chosen]).encode()).hexdigest()[:16]

    def save(self, path: Path) -> None:
        """Write the file, whole or not at all."""
        text = json.dumps(self._plain(), indent=1) + "\n"
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            unfinished.write_text(text, encoding="utf-8")
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)

    def _plain(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            **{name: getattr(self, name) for name in _TEXTS},
            "driver": self.driver,
            "entries": [
                {
                    "kind": e.kind.name.lower(),
                    "type": GGMLType(e.type_id).name,
                    **{name: getattr(e, name) for name in ("k", "m", "n_used", "rows", "value")},
                    "microseconds": dict(e.microseconds),
                }
                for e in sorted(self.entries)
            ],
        }

    @classmethod
    def load(cls, path: Path) -> TuneTable:
        """Read a file. Raises TuneError naming it and what is wrong with it."""
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise TuneError(f"{path}: cannot be read: {error.strerror or error}") from error
        except ValueError as error:
            raise TuneError(f"{path}: expected JSON: {error}") from error
        try:
            return cls._read(found)
        except TuneError as error:
            raise TuneError(f"{path}: {error}") from None

    @classmethod
    def _read(cls, found: Any) -> TuneTable:
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            raise TuneError(f"expected a table of format {FORMAT} that `luce tune` wrote")
        unknown = set(found) - {"format", "driver", "entries", *_TEXTS}
        if unknown:
            raise TuneError(f"expected no key {sorted(unknown)[0]!r}")
        for name in _TEXTS:
            if not isinstance(found.get(name), str):
                raise TuneError(f"{name}: expected a text, found {found.get(name)!r}")
        entries = found.get("entries")
        if not isinstance(entries, list):
            raise TuneError(f"entries: expected a list, found {type(entries).__name__}")
        made = [_entry(number, raw) for number, raw in enumerate(entries, 1)]
        seen: set[tuple[object, ...]] = set()
        for number, e in enumerate(made, 1):
            key = (e.kind, e.type_id, e.k, e.m, e.n_used, e.rows)
            if key in seen:
                raise TuneError(f"entry {number}: expected each product once, found {e} again")
            seen.add(key)
        return cls(
            **{name: found[name] for name in _TEXTS}, driver=_whole("driver", found.get("driver")), entries=tuple(made)
        )


def _entry(number: int, raw: Any) -> Entry:
    where = f"entry {number}"
    if not isinstance(raw, dict) or set(raw) != _ENTRY_KEYS:
        raise TuneError(
            f"{where}: expected the keys {', '.join(sorted(_ENTRY_KEYS))}, found {sorted(raw) if isinstance(raw, dict) else raw!r}"
        )
    try:
        kind, type_id = TuneKind[str(raw["kind"]).upper()], GGMLType[str(raw["type"])]
    except KeyError as error:
        raise TuneError(f"{where}: expected a known kind and type, found {error.args[0]}") from None
    if raw["kind"] != kind.name.lower():
        raise TuneError(f"{where}: expected the kind {kind.name.lower()}, found {raw['kind']!r}")
    sizes = {name: _whole(f"{where}: {name}", raw[name]) for name in ("k", "m", "n_used", "rows", "value")}
    times = raw["microseconds"]
    if not isinstance(times, dict) or not all(isinstance(t, (int, float)) for t in times.values()):
        raise TuneError(f"{where}: microseconds: expected numbers by name, found {times!r}")
    return Entry(kind, int(type_id), **sizes, microseconds=times)


def _whole(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise TuneError(f"{name}: expected a whole number from 0 on, found {value!r}")
    return value
