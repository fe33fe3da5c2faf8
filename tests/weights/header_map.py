"""Where the fields of a GGUF header lie, so that tests can damage one of them.

A straightforward parser of its own, which trusts the file.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}


@dataclass(frozen=True, slots=True)
class Field:
    """`kind`: what the bytes are; `owner`: the key or tensor they belong to."""

    kind: str
    owner: str
    offset: int
    size: int


class _Walker:
    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0
        self.fields: list[Field] = []

    def number(self, kind: str, owner: str, size: int) -> int:
        value = int.from_bytes(self.data[self.at : self.at + size], "little")
        self.fields.append(Field(kind, owner, self.at, size))
        self.at += size
        return value

    def text(self, kind: str, owner: str) -> str:
        (size,) = struct.unpack_from("<Q", self.data, self.at)
        raw = self.data[self.at + 8 : self.at + 8 + size].decode()
        self.number(f"{kind} length", owner or raw, 8)
        self.fields.append(Field(kind, owner or raw, self.at, size))
        self.at += size
        return raw

    def value(self, key: str) -> None:
        code = self.number("value type", key, 4)
        if code == 8:
            self.text("string", key)
        elif code != 9:
            self.number("value", key, SIZES[code])
        else:
            element = self.number("element type", key, 4)
            count = self.number("element count", key, 8)
            for _ in range(count):
                if element == 8:
                    self.text("element", key)
                else:
                    self.number("element", key, SIZES[element])


def header_fields(path: Path) -> list[Field]:
    """All fields in file order."""
    walker = _Walker(path.read_bytes())
    walker.number("magic", "", 4)
    walker.number("version", "", 4)
    n_tensors = walker.number("tensor count", "", 8)
    n_keys = walker.number("key count", "", 8)
    for _ in range(n_keys):
        walker.value(walker.text("key", ""))
    for _ in range(n_tensors):
        name = walker.text("tensor name", "")
        n_dims = walker.number("dimension count", name, 4)
        for _ in range(n_dims):
            walker.number("dimension", name, 8)
        walker.number("tensor type", name, 4)
        walker.number("tensor offset", name, 8)
    return walker.fields
