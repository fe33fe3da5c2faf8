"""Machine code to instructions, by the encoding tables in tinygrad (generated there from AMD's ISA documents)."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from functools import cache
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


def decode(code: bytes | bytearray, pc: int, arch: str) -> Instruction:
    """The instruction at ``pc``. UnknownInstruction when the tables have no encoding for it."""
    data = int.from_bytes(code[pc : pc + 16], "little")
    for form in _candidates(arch, data >> 23 & 0x1FF):
        if data & form.mask != form.value:
            continue
        found = [ops.get(data >> lo & mask) for _, lo, mask, ops in form.ops]
        if None not in found:
            return _build(form, found, data, pc)
    raise UnknownInstruction(f"{pc:#x}: no {arch} encoding for {code[pc : pc + 8].hex(' ', 4)}.")


def _build(form: _Form, ops: list[Any], data: int, pc: int) -> Instruction:
    values = {data >> lo & mask for lo, mask in form.sources}
    suffix, dpp = "", ""
    always = any("FMAMK" in op.name or "FMAAK" in op.name for op in ops)
    if always or LITERAL in values or form.cls_name.endswith("_LIT"):
        suffix = "_LIT"
    elif form.name.startswith("VOP") and DPP16 in values:
        suffix, dpp = "_DPP16", "dpp16"
    elif form.name.startswith("VOP") and (DPP8 in values or DPP8_FI in values):
        suffix, dpp = "_DPP8", "dpp8"
    full = form.variant(suffix) if suffix else form
    if full is None:
        raise UnknownInstruction(
            f"{pc:#x}: {ops[0].name.lower()} in form {form.cls_name}{suffix} is not in the tables."
        )
    fields = {name: ((data >> lo & mask) << shift) + added for name, lo, mask, shift, added in full.fields}
    if "vdst" in {name for name, *_ in form.fields} and form.cls_name.endswith("_SDST"):
        fields["vdst"] = next((data >> lo & mask) + added for name, lo, mask, _, added in form.fields if name == "vdst")
    literal = fields.pop("literal", None)
    if form.name == "VOPD":  # the second destination has the parity that the first has not
        fields["vdsty"] = 256 + ((fields["vdsty"] << 1) | ((fields["vdstx"] & 1) ^ 1))
        name = f"{plain_name(ops[0])} :: {plain_name(ops[1])}"
        return Instruction(pc, full.bytes, form.name, name, ops[0], fields, dpp, literal, ops[1])
    name = plain_name(ops[0])
    return Instruction(pc, full.bytes, form.name, name, ops[0], fields, dpp, literal)


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
