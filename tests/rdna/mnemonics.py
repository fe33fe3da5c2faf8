"""Which instructions occur in code objects, how often, and whether the interpreter has a meaning for each.

    python -m tests.rdna.mnemonics FILE ...     code objects, or anything that has some inside

Every instruction of every kernel is decoded and translated; nothing is run. Exit status 1 when one is unknown.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.rdna.codeobject import CodeObject
from tests.rdna.decode import Instruction, decode, measure
from tests.rdna.errors import UnknownInstruction
from tests.rdna.program import ENDS, NOTHING, Program

AMDGPU = 224  # e_machine
Key = tuple[str, str, str]  # architecture, form, name


def inside(path: Path) -> list[CodeObject]:
    """The code objects in a file: itself, a bundle, an object file, a library."""
    data = path.read_bytes()
    found, at = [], data.find(b"\x7fELF")
    while at >= 0:
        if int.from_bytes(data[at + 18 : at + 20], "little") == AMDGPU:
            found.append(CodeObject(data[at:], path.name))
        at = data.find(b"\x7fELF", at + 4)
    return found


def survey(codes: Iterable[CodeObject]) -> tuple[Counter[Key], dict[Key, str]]:
    """How often each instruction form occurs, and what is missing for those that cannot be translated."""
    counts: Counter[Key] = Counter()
    unknown: dict[Key, str] = {}
    keys: dict[tuple[str, bytes], Key] = {}  # by encoding
    seen: set[Any] = set()
    for code in codes:
        program = Program(code.arch, code.image, 0, 0, code.name)
        for kernel in code.kernels.values():
            pc = kernel.descriptor.entry
            while pc < kernel.end:
                try:
                    size, _ = measure(code.image, pc, code.arch)
                except UnknownInstruction as error:
                    unknown[code.arch, "", kernel.demangled] = str(error)
                    break
                encoding = (code.arch, bytes(code.image[pc : pc + size]))
                if encoding not in keys:
                    keys[encoding] = _examine(program, decode(code.image, pc, code.arch), seen, unknown)
                counts[keys[encoding]] += 1
                pc += size
    return counts, unknown


def _examine(program: Program, i: Instruction, seen: set[Any], unknown: dict[Key, str]) -> Key:
    key = (program.arch, i.form + (f" {i.dpp}" if i.dpp else ""), i.name)
    shape = (key, i.literal is not None, *(_shape(n, v) for n, v in i.fields.items()))
    if shape not in seen:
        seen.add(shape)
        missing = _missing(program, i)
        if missing:
            unknown.setdefault(key, missing)
    return key


def _shape(name: str, value: int) -> int:
    """Which register it is makes no difference to whether an instruction is known; modifiers and kinds of operand do."""
    if name.startswith(
        ("src", "vsrc", "ssrc", "vdst", "sdst", "saddr", "addr", "vaddr", "data", "vdata", "sbase", "sdata")
    ):
        return 0 if value < 106 else 1 if value < 124 else 2 if 128 <= value <= 208 else 256 if value >= 256 else value
    return 0 if name in ("simm16", "offset", "ioffset", "offset0", "offset1") else value


def _missing(program: Program, i: Instruction) -> str:
    if i.name in ENDS or i.name in NOTHING or i.name == "s_barrier_signal":
        return ""
    try:
        program.translate(i)
    except UnknownInstruction as error:
        return str(error)
    return ""


def main(paths: list[str]) -> int:
    """Print the table of forms, most frequent first."""
    if not paths:
        sys.exit(__doc__)
    counts, unknown = survey(code for path in paths for code in inside(Path(path)))
    for (arch, form, name), count in counts.most_common():
        print(f"{count:8} {arch} {form:12} {name}{'   UNKNOWN' if (arch, form, name) in unknown else ''}")
    for text in unknown.values():
        print(f"unknown: {text}")
    print(f"{len(counts)} forms of {sum(counts.values())} instructions, {len(unknown)} unknown")
    return 1 if unknown else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
