"""Code objects of the AMD toolchain: kernels, their descriptors and metadata, and the constant data beside them.

Layout of the kernel descriptor: LLVM's "User Guide for AMDGPU Backend", Code Object V3 Kernel Descriptor.
"""

from __future__ import annotations

import io
import shutil
import struct
import subprocess
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import msgpack
from elftools.elf.elffile import ELFFile

from tests.rdna.errors import RdnaError

# ELF flags of the targets -> tinygrad's name of the instruction tables
ARCHITECTURES = {"gfx1100": "rdna3", "gfx1101": "rdna3", "gfx1102": "rdna3", "gfx1150": "rdna3", "gfx1151": "rdna3"}
ARCHITECTURES |= {"gfx1152": "rdna3", "gfx1200": "rdna4", "gfx1201": "rdna4"}
NT_AMDGPU_METADATA = 32
R_AMDGPU_ABS64, R_AMDGPU_RELATIVE64 = 3, 13


@dataclass(frozen=True)
class Descriptor:
    """The 64 bytes at ``NAME.kd``."""

    lds_bytes: int
    scratch_bytes: int
    kernarg_bytes: int
    entry: int  # address of the first instruction in the code object
    rsrc1: int
    rsrc2: int
    properties: int

    @property
    def vgprs(self) -> int:
        """Vector registers that the kernel may name (granules of 8 in wave32)."""
        return ((self.rsrc1 & 63) + 1) * 8

    @property
    def user_sgprs(self) -> int:
        return self.rsrc2 >> 1 & 31

    def float_mode(self) -> tuple[int, int, int, int]:
        """Rounding of f32, rounding of f16 and f64 (0: to nearest even), denormals of f32, of f16 and f64 (3: kept)."""
        r = self.rsrc1
        return r >> 12 & 3, r >> 14 & 3, r >> 16 & 3, r >> 18 & 3


@dataclass(frozen=True)
class Argument:
    """One kernel argument as the metadata describes it."""

    offset: int
    size: int
    kind: str  # global_buffer, by_value, hidden_block_count_x, ...

    @property
    def hidden(self) -> bool:
        return self.kind.startswith("hidden_")


@dataclass
class Kernel:
    """One entry point of a code object."""

    name: str
    code: CodeObject = field(repr=False)
    descriptor: Descriptor
    arguments: list[Argument]
    end: int  # address behind its last instruction
    max_block: int
    cache: dict[Any, Any] = field(default_factory=dict, repr=False)  # translated code, by options

    @property
    def demangled(self) -> str:
        return self.code.demangled[self.name]


class CodeObject:
    """An ELF shared object for one GPU, mapped at ``base``: address in the object + base = address at run time."""

    def __init__(self, data: bytes, name: str = "code object") -> None:
        self.name = name
        elf = ELFFile(io.BytesIO(data))
        if elf["e_machine"] != "EM_AMDGPU":
            raise RdnaError(f"{name}: expected an AMD code object, found ELF for {elf['e_machine']}.")
        notes = self._metadata(elf)
        self.target = notes["amdhsa.target"].split("--")[-1]
        gfx = self.target.split(":")[0]
        if gfx not in ARCHITECTURES:
            raise RdnaError(f"{name}: made for {self.target}; the interpreter knows {', '.join(ARCHITECTURES)}.")
        self.arch = ARCHITECTURES[gfx]
        self.image = self._image(elf)
        self.writable = [
            (s["p_vaddr"], s["p_memsz"]) for s in elf.iter_segments("PT_LOAD") if s["p_flags"] & 2 and s["p_memsz"]
        ]
        self.symbols: dict[str, tuple[int, int]] = {}
        for section in (".symtab", ".dynsym"):
            table = elf.get_section_by_name(section)
            for symbol in table.iter_symbols() if table else ():
                self.symbols.setdefault(symbol.name, (symbol["st_value"], symbol["st_size"]))
        self.relocations = [
            (r["r_offset"], r["r_info_type"], r["r_addend"], table.get_symbol(r["r_info_sym"])["st_value"])
            for section in elf.iter_sections()
            if section["sh_type"] == "SHT_RELA"
            for table in [elf.get_section(section["sh_link"])]
            for r in section.iter_relocations()
        ]
        self.kernels = {entry[".name"]: self._kernel(entry) for entry in notes["amdhsa.kernels"]}

    @classmethod
    def load(cls, source: str | Path | bytes) -> CodeObject:
        """From a file or its bytes. RdnaError for anything but a code object of a known target."""
        if isinstance(source, bytes):
            return cls(source)
        return cls(Path(source).read_bytes(), Path(source).name)

    @cached_property
    def demangled(self) -> dict[str, str]:
        """Mangled -> readable, with the toolchain's or binutils' c++filt; without one, the names as they are."""
        program = shutil.which("c++filt") or shutil.which("llvm-cxxfilt")
        names = list(self.kernels)
        if program is None or not names:
            return {name: name for name in names}
        done = subprocess.run([program, *names], capture_output=True, text=True, check=True)
        return dict(zip(names, done.stdout.splitlines(), strict=True))

    def find(self, text: str) -> Kernel:
        """The one kernel whose mangled or readable name has ``text`` in it; RdnaError for none or several."""
        if text in self.kernels:
            return self.kernels[text]
        found = [name for name in self.kernels if text in name or text in self.demangled[name]]
        if len(found) != 1:
            names = "\n  ".join(self.demangled[name] for name in found or self.kernels)
            raise RdnaError(
                f"{self.name}: expected one kernel with {text!r} in its name, found {len(found)}:\n  {names}"
            )
        return self.kernels[found[0]]

    def _metadata(self, elf: Any) -> dict[str, Any]:
        for segment in elf.iter_segments("PT_NOTE"):
            for note in segment.iter_notes():
                if note["n_name"] == "AMDGPU" and note["n_type"] in (NT_AMDGPU_METADATA, "NT_AMDGPU_METADATA"):
                    value: dict[str, Any] = msgpack.unpackb(note["n_descdata"])
                    return value
        raise RdnaError(
            f"{self.name}: expected AMDGPU metadata, found none. Compile with code object version 4 or later."
        )

    @staticmethod
    def _image(elf: Any) -> bytearray:
        segments = list(elf.iter_segments("PT_LOAD"))
        image = bytearray(max(s["p_vaddr"] + s["p_memsz"] for s in segments))
        for s in segments:
            image[s["p_vaddr"] : s["p_vaddr"] + s["p_filesz"]] = s.data()
        return image

    def relocate(self, base: int) -> bytearray:
        """The image as it lies in memory at ``base``."""
        image = bytearray(self.image)
        for offset, kind, addend, value in self.relocations:
            if kind not in (R_AMDGPU_ABS64, R_AMDGPU_RELATIVE64):
                raise RdnaError(f"{self.name}: relocation type {kind} at {offset:#x} is not known.")
            target = base + addend + (value if kind == R_AMDGPU_ABS64 else 0)
            struct.pack_into("<Q", image, offset, target)
        return image

    def _kernel(self, entry: dict[str, Any]) -> Kernel:
        at, _ = self.symbols[entry[".symbol"]]
        lds, scratch, kernarg = struct.unpack_from("<3I", self.image, at)
        (offset,) = struct.unpack_from("<q", self.image, at + 16)
        rsrc1, rsrc2, properties = struct.unpack_from("<IIH", self.image, at + 48)
        start = at + offset
        name = entry[".name"]
        address, size = self.symbols[name]
        if address != start or size == 0:
            raise RdnaError(f"{self.name}: {name} starts at {start:#x}, its symbol says {address:#x} + {size}.")
        if not properties >> 10 & 1:
            raise RdnaError(f"{self.name}: {name} is for waves of 64 lanes; the interpreter runs waves of 32.")
        arguments = [Argument(a[".offset"], a[".size"], a[".value_kind"]) for a in entry.get(".args", [])]
        descriptor = Descriptor(lds, scratch, kernarg, start, rsrc1, rsrc2, properties)
        return Kernel(name, self, descriptor, arguments, start + size, entry[".max_flat_workgroup_size"])
