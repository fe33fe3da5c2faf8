"""Reads C headers: prototypes, struct fields and enums, as (name, ctypes type) data. Enough C for ggml.h and llama.h."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from typing import Any

NUMBERS: dict[str, Any] = {
    "int": ctypes.c_int,
    "int8_t": ctypes.c_int8,
    "int16_t": ctypes.c_int16,
    "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
    "uint8_t": ctypes.c_uint8,
    "uint16_t": ctypes.c_uint16,
    "uint32_t": ctypes.c_uint32,
    "uint64_t": ctypes.c_uint64,
    "size_t": ctypes.c_size_t,
    "float": ctypes.c_float,
    "double": ctypes.c_double,
    "bool": ctypes.c_bool,
    "char": ctypes.c_char,
    "llama_token": ctypes.c_int32,
    "llama_pos": ctypes.c_int32,
    "llama_seq_id": ctypes.c_int32,
}
POINTER = "pointer"
TEXT = "text"


class Headers:
    """The declarations of several header files."""

    def __init__(self, paths: list[Path]) -> None:
        text = "\n".join(path.read_text(encoding="utf-8") for path in paths)
        self.constants = {
            name: int(value, 0)
            for name, value in re.findall(r"#\s*define\s+([A-Z_0-9]+)\s+(0[xX][0-9a-fA-F]+|\d+)", text)
        }
        text = re.sub(r"/\*.*?\*/", " ", text, flags=re.S)
        text = re.sub(r"//[^\n]*", " ", text)
        text = re.sub(r"^\s*#[^\n]*(?:\\\n[^\n]*)*", " ", text, flags=re.M)
        self.text = re.sub(r"\s+", " ", text)
        names = re.findall(r"typedef [^;{}]*?\( ?\* ?(\w+) ?\)", self.text)
        names += re.findall(r"typedef (?:struct )?\w+ ?\* ?(\w+) ?;", self.text)
        self.pointer_types = set(names)
        self.structs = {
            name: body
            for typedef_name, body, name in (
                (m.group(1), m.group(2), m.group(1) or m.group(3))
                for m in re.finditer(r"struct (\w*) ?\{((?:[^{}]|\{[^{}]*\})*)\} ?(\w*) ?;", self.text)
            )
        }
        self.enums = {
            m.group(1): self._enum(m.group(2)) for m in re.finditer(r"enum (\w+) ?\{([^{}]*)\} ?;", self.text)
        }

    def kind(self, declaration: str) -> Any:
        """ctypes number type, struct name, POINTER or TEXT (const char *) for a C type, with or without a name."""
        words = declaration.replace("*", " * ").split()
        if words.count("*") or "[" in declaration:
            return TEXT if words[:2] == ["const", "char"] and words.count("*") == 1 else POINTER
        if "enum" in words:
            return ctypes.c_int
        words = [w for w in words if w not in ("const", "struct")]
        first = words[0]
        if first in NUMBERS:
            return NUMBERS[first]
        if first in self.pointer_types:
            return POINTER
        if first in self.structs:
            return first
        if first == "void":
            return None
        raise ValueError(f"unknown C type in {declaration!r}")

    def prototype(self, name: str) -> tuple[Any, list[Any]] | None:
        """(result kind, argument kinds) of an exported function."""
        match = re.search(rf"(?:GGML_API|GGML_BACKEND_API|LLAMA_API) ([\w\s*]*?)\b{name} ?\(([^;]*?)\) ?;", self.text)
        if match is None:
            return None
        arguments = [part.strip() for part in match.group(2).split(",")]
        if arguments in ([""], ["void"]):
            arguments = []
        return self.kind(match.group(1)), [self.kind(argument) for argument in arguments]

    def fields(self, name: str) -> list[tuple[str, Any, int]]:
        """(field name, kind, array length or 0) of a struct."""
        found: list[tuple[str, Any, int]] = []
        for part in (p.strip() for p in self.structs[name].split(";")):
            if not part:
                continue
            array = re.search(r"(\w+) ?\[([^\]]+)\]$", part)
            if array:
                found.append((array.group(1), self.kind(part[: array.start()]), self._number(array.group(2))))
            else:
                field = re.search(r"(\w+)$", part)
                assert field is not None, part
                found.append((field.group(1), self.kind(part[: field.start()]), 0))
        return found

    def _enum(self, body: str) -> dict[str, int]:
        values: dict[str, int] = {}
        previous = -1
        for item in (part.strip() for part in body.split(",")):
            if not item:
                continue
            name, _, expression = (piece.strip() for piece in item.partition("="))
            previous = self._number(expression, values) if expression else previous + 1
            values[name] = previous
        return values

    def _number(self, expression: str, known: dict[str, int] | None = None) -> int:
        names = {**self.constants, **(known or {})}
        text = re.sub(r"sizeof ?\( ?int32_t ?\)", "4", expression)
        text = re.sub(r"[A-Za-z_]\w*", lambda m: str(names[m.group(0)]), text)
        if not re.fullmatch(r"[\d\s<|()/*+-]+", text):
            raise ValueError(f"cannot evaluate {expression!r}")
        return int(eval(text.replace("/", "//"), {"__builtins__": {}}))
