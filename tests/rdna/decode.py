"""Machine code to instructions, by the encoding tables in tinygrad (generated there from AMD's ISA documents)."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

from tests.rdna.errors import UnknownInstruction

# specific encodings before general ones
FORMS = {
    "rdna3": """VOPD VOP3P VINTERP VOP3SD VOP3_SDST VOP3 DS GLOBAL SCRATCH FLAT MUBUF SMEM SOP1 SOP1_LIT SOPC SOPC_LIT
        SOPP SOPK SOPK_LIT SOP2 SOP2_LIT VOPC VOP1_SDST VOP1 VOP1_LIT VOP2 VOP2_LIT""".split(),
    "rdna4": """VOPD VOP3P VINTERP VOP3SD VOP3_SDST VOP3 DS VGLOBAL VSCRATCH VFLAT VBUFFER SMEM SOP1 SOP1_LIT SOPC
        SOPC_LIT SOPP SOPK SOPK_LIT SOP2 SOP2_LIT VOPC VOP1_SDST VOP1 VOP1_LIT VOP2 VOP2_LIT""".split(),
}
RENAMED = {"VGLOBAL": "GLOBAL", "VSCRATCH": "SCRATCH", "VFLAT": "FLAT", "VBUFFER": "MUBUF"}
LITERAL, DPP16, DPP8, DPP8_FI = 255, 250, 233, 234


@dataclass(slots=True, frozen=True)
class Instruction:
    """One instruction at ``pc`` (address in the code object). ``fields`` are operand numbers in the unified encoding of
    sources (0 to 127 scalar registers, 128 to 255 constants, 256 and up vector registers) and plain numbers."""

    pc: int
    size: int
    form: str  # VOP3, SOP2, GLOBAL, ...: without the suffix for literals and DPP
    name: str  # v_add_f32
    op: Any  # tinygrad's opcode, the key of its tables of meanings and operands
    fields: dict[str, int]
    dpp: str  # "", "dpp16" or "dpp8"
    literal: int | None
    second: Any = None  # VOPD: the opcode of the second half (op is that of the first)

    def __getitem__(self, name: str) -> int:
        return self.fields[name]

    def __str__(self) -> str:
        fields = " ".join(f"{k}={v}" for k, v in self.fields.items())
        literal = "" if self.literal is None else f" literal={self.literal:#x}"
        return f"{self.pc:#x}: {self.name} ({self.form}{' ' + self.dpp if self.dpp else ''}) {fields}{literal}"


class _Form:
    """One encoding class of tinygrad's, reduced to masks and shifts."""

    def __init__(self, module: Any, name: str) -> None:
        from tinygrad.renderer.amd import dsl

        cls = getattr(module, name)
        self.module, self.cls_name = module, name
        self.name = RENAMED.get(name, name).removesuffix("_LIT").removesuffix("_DPP16").removesuffix("_DPP8")
        self.bytes: int = cls._base_size
        self.mask = self.value = 0
        self.ops: list[tuple[str, int, int, dict[int, Any]]] = []
        self.fields: list[tuple[str, int, int, int, int]] = []  # name, low bit, mask, shift left, added
        self.sources: list[tuple[int, int]] = []
        for field_name, f in cls._fields:
            if isinstance(f, dsl.FixedBitField):
                self.mask |= f.mask << f.lo
                self.value |= f.default << f.lo
            elif isinstance(f, dsl.EnumBitField):
                allowed = f.allowed if f.allowed is not None else list(f._enum)
                self.ops.append((field_name, f.lo, f.mask, {op.value: op for op in allowed}))
            elif isinstance(f, dsl.AlignedSGPRField):
                self.fields.append((field_name, f.lo, f.mask, f._align.bit_length() - 1, 0))
            elif isinstance(f, dsl.SrcField):
                self.fields.append((field_name, f.lo, f.mask, 0, f._valid_range[0]))
                if f._valid_range in ((0, 511), (0, 255)):
                    self.sources.append((f.lo, f.mask))
            else:
                self.fields.append((field_name, f.lo, f.mask, 0, 0))

        self.literal_ops = {
            op for _, _, _, ops in self.ops for op in ops.values() if "FMAMK" in op.name or "FMAAK" in op.name
        }
        self.always = name.endswith("_LIT")
        self.vector = self.name.startswith("VOP")
        self.sdst = name.endswith("_SDST")

    def match(self, data: int) -> tuple[Any, ...] | None:
        """The opcodes when ``data`` is of this form."""
        if data & self.mask != self.value:
            return None
        if len(self.ops) == 1:
            _, lo, mask, ops = self.ops[0]
            op = ops.get(data >> lo & mask)
            return None if op is None else (op,)
        found = tuple(ops.get(data >> lo & mask) for _, lo, mask, ops in self.ops)
        return None if None in found else found

    def suffix(self, data: int, ops: tuple[Any, ...]) -> str:
        """Which variant of the form the instruction is: with a literal, with DPP, or plain."""
        values = [data >> lo & mask for lo, mask in self.sources]
        if self.always or LITERAL in values or (self.literal_ops and not self.literal_ops.isdisjoint(ops)):
            return "_LIT"
        if self.vector:
            if DPP16 in values:
                return "_DPP16"
            if DPP8 in values or DPP8_FI in values:
                return "_DPP8"
        return ""

    @cached_property
    def variants(self) -> dict[str, _Form | None]:
        return {"": self} | {suffix: self.variant(suffix) for suffix in ("_LIT", "_DPP16", "_DPP8")}

    def variant(self, suffix: str) -> _Form | None:
        if self.cls_name.endswith(suffix):
            return self
        base = self.cls_name.removesuffix("_SDST") if suffix != "_LIT" else self.cls_name
        name = f"{base}{suffix}"
        return _form(self.module, name) if hasattr(self.module, name) else None


@cache
def _form(module: Any, name: str) -> _Form:
    return _Form(module, name)


@cache
def _forms(arch: str) -> list[_Form]:
    module = importlib.import_module(f"tinygrad.runtime.autogen.amd.{arch}.ins")
    return [_form(module, name) for name in FORMS[arch]]


@cache
def _candidates(arch: str, top: int) -> list[_Form]:
    """The encodings that the 9 highest bits of the first word leave possible."""
    word, care = top << 23, 0x1FF << 23
    return [f for f in _forms(arch) if (word & care & f.mask) == (f.value & care & 0xFFFFFFFF)]


def _found(code: bytes | bytearray, pc: int, arch: str) -> tuple[int, _Form, _Form, tuple[Any, ...], str]:
    """The word there, its form without and with the variant, its opcodes, the variant's suffix."""
    data = int.from_bytes(code[pc : pc + 16], "little")
    for form in _candidates(arch, data >> 23 & 0x1FF):
        ops = form.match(data)
        if ops is None:
            continue
        suffix = form.suffix(data, ops)
        full = form.variants[suffix]
        if full is None:
            raise UnknownInstruction(f"{pc:#x}: {plain_name(ops[0])} in form {form.name}{suffix} is not in the tables.")
        return data, form, full, ops, suffix
    raise UnknownInstruction(f"{pc:#x}: no {arch} encoding for {code[pc : pc + 8].hex(' ', 4)}.")


def measure(code: bytes | bytearray, pc: int, arch: str) -> tuple[int, str]:
    """Bytes and opcode name (with the form's ending, as in V_ADD_F32_E64) of the instruction at ``pc``; fast."""
    _, _, full, ops, _ = _found(code, pc, arch)
    return full.bytes, ops[0]._name_


def decode(code: bytes | bytearray, pc: int, arch: str) -> Instruction:
    """The instruction at ``pc``. UnknownInstruction when the tables have no encoding for it."""
    data, form, full, ops, suffix = _found(code, pc, arch)
    fields = {name: ((data >> lo & mask) << shift) + added for name, lo, mask, shift, added in full.fields}
    if form.sdst and suffix:
        fields["vdst"] = next((data >> lo & mask) + added for name, lo, mask, _, added in form.fields if name == "vdst")
    literal = fields.pop("literal", None)
    dpp = suffix[1:].lower() if suffix.startswith("_DPP") else ""
    if form.name == "VOPD":  # the second destination has the parity that the first has not
        fields["vdsty"] = 256 + ((fields["vdsty"] << 1) | ((fields["vdstx"] & 1) ^ 1))
        name = f"{plain_name(ops[0])} :: {plain_name(ops[1])}"
        return Instruction(pc, full.bytes, form.name, name, ops[0], fields, dpp, literal, ops[1])
    return Instruction(pc, full.bytes, form.name, plain_name(ops[0]), ops[0], fields, dpp, literal)


@cache
def plain_name(op: Any) -> str:
    """v_add_f32 for V_ADD_F32_E64."""
    return str(op.name.lower().removesuffix("_e32").removesuffix("_e64"))


@cache
def meaning(arch: str, op: Any) -> str | None:
    """AMD's pseudocode for the opcode, or None when the tables have none."""
    module = importlib.import_module(f"tinygrad.runtime.autogen.amd.{arch}.str_pcode")
    text: str | None = module.PCODE.get(op)
    return text


@cache
def operand_bits(arch: str, op: Any) -> dict[str, tuple[str, int]]:
    """Operand -> (number format such as "F32", bits). Names as in the fields, without the v or s before src."""
    module = importlib.import_module(f"tinygrad.runtime.autogen.amd.{arch}.operands")
    found: dict[str, tuple[str, int]] = {}
    for name, (fmt, bits, _) in module.OPERANDS.get(op, {}).items():
        short = name[1:] if name[1:].startswith("src") else name
        found[short] = (fmt.name.removeprefix("FMT_").removeprefix("NUM_"), bits)
    return found
