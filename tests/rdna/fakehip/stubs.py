"""Writes assembly that defines every function which objects need and nothing defines: each prints its name and ends the process."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path


def symbols(nm: str, files: list[str], *options: str) -> set[str]:
    """Names that ``nm`` prints for the files, without versions."""
    text = subprocess.run(
        [nm, "--format=just-symbols", *options, *files], capture_output=True, text=True, check=True
    ).stdout
    return {line.split("@")[0] for line in text.splitlines() if line and not line.endswith(":")}


def assembly(names: list[str]) -> str:
    """A function for each name."""
    parts = ["\t.text"]
    for number, name in enumerate(names):
        parts.append(f"\t.globl {name}\n\t.type {name}, @function\n{name}:")
        parts.append(f"\tsubq $8, %rsp\n\tleaq .Lname{number}(%rip), %rdi\n\tjmp .Lmissing")
    parts.append(".Lmissing:\n\tcall puts@PLT\n\txorl %edi, %edi\n\tcall fflush@PLT\n\tcall abort@PLT")
    parts.append("\t.section .rodata")
    for number, name in enumerate(names):
        parts.append(f'.Lname{number}:\n\t.string "fakehip: {name} was left out of this build"')
    parts.append('\t.section .note.GNU-stack,"",@progbits')
    return "\n".join(parts) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nm", required=True)
    parser.add_argument("--cxx", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--objects", nargs="+", required=True)
    parser.add_argument("--libraries", nargs="+", required=True)
    arguments = parser.parse_args()
    system = []
    for name in ("libstdc++.so.6", "libgcc_s.so.1", "libc.so.6", "libm.so.6"):
        found = subprocess.run([arguments.cxx, f"-print-file-name={name}"], capture_output=True, text=True, check=True)
        system.append(found.stdout.strip())
    needed = symbols(arguments.nm, arguments.objects, "--undefined-only", "--no-weak")
    given = symbols(arguments.nm, arguments.objects, "--defined-only", "--extern-only")
    given |= symbols(arguments.nm, [*arguments.libraries, *system], "--dynamic", "--defined-only")
    # the linker's own, and what C libraries put into a static archive beside libc.so
    missing = sorted(needed - given - {"_GLOBAL_OFFSET_TABLE_", "__dso_handle", "atexit", "at_quick_exit"})
    arguments.out.write_text(assembly(missing), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
