"""What a kernel takes of an AMD GPU, read from its code object, and the committed table of it.

Registers, LDS, scratch and spills stand in the code object's metadata note; matrix instructions are counted in the
disassembly. All of it comes from ``llvm-readelf --notes`` and ``llvm-objdump -d`` as text.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

from buildtools.report import BuildError

# wave32 on gfx11.5 and gfx12: vector registers a SIMD, given out in granules, for at most 16 waves
SIMD_VGPRS = 1536
VGPR_GRANULE = 24
MAX_WAVES = 16
# nothing but an end of program: what a kernel body compiled away to nothing leaves
EMPTY_INSTRUCTIONS = 3
# kernels that are pointless without matrix instructions: every instance must have them on every target
MATRIX_KERNELS = ("luce_mmb_tile_kernel", "luce_mmb_dense_kernel", "luce_attn_mma_kernel", "luce_attn_row_kernel")

_FIELDS = {
    "vgpr": ".vgpr_count",
    "sgpr": ".sgpr_count",
    "lds": ".group_segment_fixed_size",
    "scratch": ".private_segment_fixed_size",
    "vgpr_spills": ".vgpr_spill_count",
    "sgpr_spills": ".sgpr_spill_count",
}
_COLUMNS = ("vgpr", "sgpr", "lds", "scratch", "vgpr_spills", "sgpr_spills", "waves", "wmma")
_HEADING = "vgpr sgpr   lds scratch vspill sspill waves wmma  kernel"
_WIDTHS = (4, 4, 5, 7, 6, 6, 5, 4)


@dataclass(frozen=True)
class Kernel:
    """One kernel on one target. ``name`` is demangled and short; ``lds`` and ``scratch`` in bytes (scratch a lane)."""

    target: str
    source: str
    name: str
    vgpr: int
    sgpr: int
    lds: int
    scratch: int
    vgpr_spills: int
    sgpr_spills: int
    wmma: int
    instructions: int

    @property
    def waves(self) -> int:
        """Waves a SIMD by vector registers alone."""
        granules = max(1, -(-self.vgpr // VGPR_GRANULE))
        return min(MAX_WAVES, SIMD_VGPRS // (granules * VGPR_GRANULE))

    def row(self) -> str:
        """The kernel's line in the table."""
        values = [str(getattr(self, column)).rjust(width) for column, width in zip(_COLUMNS, _WIDTHS, strict=True)]
        return " ".join(values) + "  " + self.name

    def to_json(self) -> dict[str, object]:
        """For the cache; ``Kernel(**value)`` reads it."""
        return asdict(self)


def parse_notes(text: str) -> dict[str, dict[str, int]]:
    """Mangled kernel name -> the fields of ``Kernel``, from ``llvm-readelf --notes``.

    The note is printed as YAML: a list under ``amdhsa.kernels``, an item's own keys two columns right of its dash.
    """
    found: dict[str, dict[str, int]] = {}
    item: dict[str, str] = {}
    inside = False
    for line in [*text.splitlines(), "end:"]:
        if re.match(r"\S", line):
            _finish(item, found)
            item, inside = {}, line.startswith("amdhsa.kernels:")
        elif inside and (match := re.match(r"  (-| ) (\.\w+):\s*(.*)", line)):
            if match[1] == "-":
                _finish(item, found)
                item = {}
            item[match[2]] = match[3].strip().strip("'\"")
    return found


def _finish(item: Mapping[str, str], found: dict[str, dict[str, int]]) -> None:
    if not item:
        return
    missing = [key for key in (".name", *_FIELDS.values()) if not item.get(key)]
    if missing:
        raise BuildError(f"expected {', '.join(missing)} in a kernel's metadata note, found {sorted(item)}.")
    found[item[".name"]] = {field: int(item[key]) for field, key in _FIELDS.items()}


def parse_disassembly(text: str) -> dict[str, tuple[int, int]]:
    """Mangled symbol -> (instructions, matrix instructions), from ``llvm-objdump -d``; padding is not counted."""
    found: dict[str, tuple[int, int]] = {}
    symbol = ""
    for line in text.splitlines():
        if match := re.match(r"[0-9a-f]+ <(.*)>:", line):
            symbol = match[1]
            found.setdefault(symbol, (0, 0))
        elif symbol and (match := re.match(r"\s+([a-z]\w+)", line)) and match[1] != "s_code_end":
            total, matrix = found[symbol]
            found[symbol] = (total + 1, matrix + match[1].startswith(("v_wmma", "v_swmmac")))
    return found


def short_name(demangled: str, types: Mapping[int, str]) -> str:
    """A kernel's name without return type, parameters and anonymous namespaces; ggml's types by name."""
    name = re.sub(r"\(anonymous namespace\)::", "", demangled)
    name = re.sub(r"\(ggml_type\)(\d+)", lambda match: types.get(int(match[1]), match[0]), name)
    depth, end = 0, len(name)
    for i, char in enumerate(name):
        depth += {"<": 1, ">": -1}.get(char, 0)
        if char == "(" and depth == 0:
            end = i
            break
    return name[:end].removeprefix("void ").strip()


def ggml_types(header: str) -> dict[int, str]:
    """Number -> name of the tensor types in ``ggml.h``."""
    return {int(number): name for name, number in re.findall(r"GGML_TYPE_(\w+)\s*=\s*(\d+)", header)}


def faults(kernels: Sequence[Kernel], targets: Iterable[str]) -> list[str]:
    """What no table can allow: scratch, spilled vector registers, empty kernels, matrix kernels without their
    instructions."""
    found: list[str] = []
    for kernel in kernels:
        where = f"{kernel.target} {kernel.source}: {kernel.name}"
        if kernel.scratch or kernel.vgpr_spills:
            found.append(
                f"{where}: {kernel.scratch} bytes of scratch a lane, {kernel.vgpr_spills} vector registers spilled"
            )
        if kernel.instructions <= EMPTY_INSTRUCTIONS:
            found.append(f"{where}: an empty kernel; is its body guarded for another architecture?")
        if _base(kernel) in MATRIX_KERNELS and not kernel.wmma:
            found.append(f"{where}: expected matrix instructions (v_wmma), found none")
    for target in targets:
        present = {_base(kernel) for kernel in kernels if kernel.target == target}
        found += [f"{target}: expected the kernel {name}, found none" for name in MATRIX_KERNELS if name not in present]
    return found


def _base(kernel: Kernel) -> str:
    return kernel.name.partition("<")[0]


def format_table(kernels: Iterable[Kernel], compiler: str) -> str:
    """The whole table as text: sorted, so that equal code gives equal text."""
    lines = [
        "# What each kernel takes of an AMD GPU: written by `make amd-check UPDATE=1`, compared by `make amd-check`."
    ]
    lines += [
        "# lds: static bytes a workgroup; scratch: bytes a lane; vspill, sspill: registers spilled to scratch and to"
    ]
    lines += ["# lanes of vector registers; waves: a SIMD, by vector registers; wmma: matrix instructions in the code."]
    lines += [f"compiler: {compiler}"]
    place = ("", "")
    for kernel in sorted(kernels, key=lambda k: (k.target, k.source, k.name)):
        if place != (kernel.target, kernel.source):
            place = (kernel.target, kernel.source)
            lines += ["", f"{kernel.target} {kernel.source}", _HEADING]
        lines.append(kernel.row())
    return "\n".join(lines) + "\n"


def table_compiler(table: str) -> str:
    """The compiler that a table names, or nothing."""
    match = re.search(r"^compiler: (.*)$", table, re.M)
    return match[1] if match else ""


def table_changes(before: str, now: str, name: str) -> str:
    """A unified diff of two tables, empty when they are equal."""
    lines = difflib.unified_diff(before.splitlines(), now.splitlines(), name, "now", lineterm="", n=2)
    return "\n".join(lines)
