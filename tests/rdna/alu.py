"""Vector and scalar arithmetic: an instruction to a function that executes it on ``Waves``."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from tests.rdna import arithmetic as A
from tests.rdna.decode import Instruction, meaning, operand_bits, plain_name
from tests.rdna.errors import UnknownInstruction
from tests.rdna.operands import Read, dpp_source, put_scalar, put_vector, scalar_source, vector_source
from tests.rdna.overrides import MEANINGS
from tests.rdna.pcode import Meaning, compile_text
from tests.rdna.waves import EXEC, LANES, VCC, Waves

Step = Callable[[Waves], None]
LANE_IDS = np.arange(LANES, dtype=np.uint32)[None, :]
# VOPD opcodes that the tables name otherwise than the instruction they stand for
VOPD_NAMES = {"v_dual_dot2acc_f32_f16": "v_dot2acc_f32_f16", "v_dual_dot2acc_f32_bf16": "v_dot2acc_f32_bf16"}


@cache
def meaning_of(arch: str, op: Any) -> Meaning:
    """The compiled or handwritten meaning of an opcode."""
    name = plain_name(op)
    if name in MEANINGS:
        return MEANINGS[name]
    bits = {k: b for k, (_, b) in operand_bits(arch, op).items()}
    width = {f"S{i}": bits.get(f"src{i}", 32) for i in range(3)}
    width["D0"] = bits.get("vdst", bits.get("sdst", 32))
    text = meaning(arch, op)
    if text is None:
        raise UnknownInstruction(f"{name} ({arch}): the tables have no meaning.")
    return compile_text(name, text, width, name.startswith("s_"))


def modified_source(read: Read, bits: int, negate: bool, absolute: bool) -> Read:
    if not negate and not absolute:
        return read
    kind = np.uint64 if bits == 64 else np.uint32
    top = kind(1 << (bits - 1))
    rest = kind(top - 1)

    def modified(w: Waves) -> Any:
        value = read(w)
        if absolute:
            value = value & rest
        return value ^ top if negate else value

    return modified


def _output_modifiers(i: Instruction, kind: str, bits: int) -> Callable[[Any], Any] | None:
    omod, clamp = i.fields.get("omod", 0), i.fields.get("clmp", 0)
    if not omod and not clamp:
        return None
    view = {("F32", 32): np.float32, ("F64", 64): np.float64}.get((kind, bits))
    if view is None and (kind, bits) != ("F16", 16):
        raise UnknownInstruction(f"{i}: clamp or output modifier on a result of format {kind}.")
    factor = (1.0, 2.0, 4.0, 0.5)[omod]

    def apply(value: Any) -> Any:
        x = value.view(view) if view else value.astype(np.uint16).view(np.float16)
        x = x * x.dtype.type(factor)
        if clamp:
            x = np.where(np.isnan(x), x.dtype.type(0), np.clip(x, x.dtype.type(0), x.dtype.type(1)))
        return x.view(value.dtype) if view else x.view(np.uint16).astype(np.uint32)

    return apply


def _half(code: int, bits: int, opsel: int, at: int, short: bool) -> tuple[int, bool]:
    """Register and half of a 16-bit operand: VOP3 has a bit for it, the short forms the register number's bit 7."""
    if bits != 16:
        return code, False
    if short:
        return (code - 128, True) if code >= 256 + 128 else (code, False)
    return code, bool(opsel >> at & 1)


def vector(arch: str, i: Instruction) -> Step:
    """VOP1, VOP2, VOP3, VOP3SD and VOPC."""
    m = meaning_of(arch, i.op)
    table = operand_bits(arch, i.op)
    short = i.form in ("VOP1", "VOP2", "VOPC")
    neg, absolute, opsel = i.fields.get("neg", 0), i.fields.get("abs", 0), i.fields.get("opsel", 0)
    written = None
    reads: list[Read] = []
    for name in m.inputs:
        if name in ("S0", "S1", "S2"):
            at = int(name[1])
            kind, bits = table.get(f"src{at}", ("ANY", 32))
            code = i.fields.get(f"src{at}", i.fields.get(f"vsrc{at}"))
            if at == 0 and i.dpp:
                code = i.fields["vsrc0"]
            if code is None:
                raise UnknownInstruction(f"{i}: source {at} is missing.")
            code, high = _half(code, bits, opsel, at, short)
            read = vector_source(code, bits, kind, i.literal, high)
            if at == 0 and i.dpp:
                read, written = dpp_source(i.fields, i.dpp, read)
                reads.append(
                    modified_source(read, bits, bool(i.fields.get("src0_neg")), bool(i.fields.get("src0_abs")))
                )
                continue
            dpp_neg, dpp_abs = i.fields.get(f"src{at}_neg", 0), i.fields.get(f"src{at}_abs", 0)
            reads.append(
                modified_source(read, bits, bool(neg >> at & 1 or dpp_neg), bool(absolute >> at & 1 or dpp_abs))
            )
        elif name == "D0":
            kind, bits = table.get("vdst", ("ANY", 32))
            code, high = _half(i["vdst"], bits, opsel, 3, short)
            reads.append(vector_source(code, bits, kind, None, high))
        elif name == "VCC":
            register = i.fields.get("src2", VCC) if i.form in ("VOP3", "VOP3SD") and "div_fmas" not in i.name else VCC
            reads.append(lambda w, r=register: w.bits(r))
        elif name == "laneId":
            reads.append(lambda w: LANE_IDS)
        elif name == "SIMM32":
            array = np.full((1, 1), i.literal, np.uint32)
            reads.append(lambda w, a=array: a)
        else:
            raise UnknownInstruction(f"{i}: reads {name}.")
    writes: list[Any] = []
    for name in m.outputs:
        if name == "D0":
            kind, bits = table["vdst"]
            code, high = _half(i["vdst"], bits, opsel, 3, short)
            put = put_vector(code - 256, bits, high)
            after = _output_modifiers(i, kind, bits)
            writes.append(put if after is None else lambda w, x, put=put, after=after: put(w, after(x)))
        elif name == "VCC":
            register = i.fields.get("sdst", VCC)
            writes.append(lambda w, x, r=register: w.put_lanes(r, x))
        elif name == "LANE":
            register = i.fields.get("vdst", VCC)
            writes.append(lambda w, x, r=register: w.put_lanes(r, x))
        elif name == "EXEC":
            writes.append(lambda w, x: w.put_lanes(EXEC, x))
        else:
            raise UnknownInstruction(f"{i}: writes {name}.")
    return _limited(_assembled(m.function, reads, writes), written)


def _assembled(function: Callable[..., tuple[Any, ...]], reads: list[Read], writes: list[Any]) -> Step:
    if len(writes) == 1 and len(reads) in (1, 2, 3):
        put = writes[0]
        if len(reads) == 1:
            (a,) = reads
            return lambda w: put(w, function(a(w))[0])
        if len(reads) == 2:
            a, b = reads
            return lambda w: put(w, function(a(w), b(w))[0])
        a, b, c = reads
        return lambda w: put(w, function(a(w), b(w), c(w))[0])

    def step(w: Waves) -> None:
        for put, value in zip(writes, function(*[read(w) for read in reads]), strict=True):
            put(w, value)

    return step


def _limited(step: Step, written: Callable[[Waves], Any] | None) -> Step:
    """Run with the execution mask reduced to the lanes that a DPP instruction writes."""
    if written is None:
        return step

    def limited(w: Waves) -> None:
        saved_full, saved_mask, lanes = w.full, w._mask, written(w)
        w.full, w._mask = bool(lanes.all()), np.broadcast_to(lanes, (w.n, LANES))
        step(w)
        w.full, w._mask = saved_full, saved_mask

    return limited


def packed(arch: str, i: Instruction) -> Step:
    """VOP3P but for the matrix instructions: two halves, or the mixed-precision and dot product forms."""
    opsel, opsel_hi = i["opsel"], i["opsel_hi"] | i["opsel_hi2"] << 2
    neg, neg_hi = i["neg"], i["neg_hi"]
    table = operand_bits(arch, i.op)
    if i.dpp:
        raise UnknownInstruction(f"{i}: DPP on a packed instruction.")
    if i.name.startswith("v_fma_mix"):
        return _fma_mix(i, table)
    if i.name in ("v_dot4_i32_iu8", "v_dot4_u32_u8"):
        if i["clmp"]:
            raise UnknownInstruction(f"{i}: clamp.")
        a, b, c = (vector_source(i[f"src{k}"], 32, "I32", i.literal) for k in range(3))
        signed_a, signed_b = bool(neg & 1), bool(neg & 2)
        if i.name.endswith("u8") and not i.name.endswith("iu8"):
            signed_a = signed_b = False
        put = put_vector(i["vdst"] - 256, 32)
        return lambda w: put(w, A.dot4(a(w), b(w), c(w), signed_a, signed_b))
    m = meaning_of(arch, i.op)
    floats = any(table.get(f"src{k}", ("", 0))[0] == "PK2_F16" for k in range(3))
    reads: list[Read] = []
    for name in m.inputs:
        if name not in ("S0", "S1", "S2"):
            raise UnknownInstruction(f"{i}: reads {name}.")
        at = int(name[1])
        kind, bits = table[f"src{at}"]
        read = vector_source(i[f"src{at}"], bits, kind, i.literal)
        if kind.startswith("PK2") and "F32" not in kind:
            flip = (neg >> at & 1) << 15 | (neg_hi >> at & 1) << 31 if floats else 0
            reads.append(_halves(read, opsel >> at & 1, opsel_hi >> at & 1, flip))
        else:
            if kind == "F32":
                read = modified_source(read, 32, bool(neg >> at & 1), bool(neg_hi >> at & 1))
            elif neg >> at & 1 or neg_hi >> at & 1:
                raise UnknownInstruction(f"{i}: sign of source {at}, format {kind}.")
            reads.append(read)
    if i["clmp"] or m.outputs != ("D0",):
        raise UnknownInstruction(f"{i}: clamp, or a result that is not one register.")
    return _assembled(m.function, reads, [put_vector(i["vdst"] - 256, table["vdst"][1])])


def _halves(read: Read, low: int, high: int, flip: int) -> Read:
    """The two halves of a packed operand, each from the half that it asks for."""
    if (low, high) == (0, 1):
        return read if not flip else lambda w: read(w) ^ np.uint32(flip)

    def halves(w: Waves) -> Any:
        value = read(w)
        a = value >> 16 if low else value & 0xFFFF
        b = value & np.uint32(0xFFFF0000) if high else value << 16
        return (a | b) ^ np.uint32(flip)

    return halves


def _fma_mix(i: Instruction, table: dict[str, tuple[str, int]]) -> Step:
    """v_fma_mix_f32, v_fma_mixlo_f16, v_fma_mixhi_f16: each source is a float32, or half of a register as float16."""
    opsel, opsel_hi = i["opsel"], i["opsel_hi"] | i["opsel_hi2"] << 2
    reads = []
    for at in range(3):
        code = i[f"src{at}"]
        half = bool(opsel_hi >> at & 1)
        if half and 240 <= code <= 248:
            raise UnknownInstruction(f"{i}: an inline float as float16.")
        reads.append(_mixed(vector_source(code, 32, "F32", i.literal), half, opsel >> at & 1, i, at))
    a, b, c = reads
    d = i["vdst"] - 256
    if i["clmp"]:
        raise UnknownInstruction(f"{i}: clamp.")
    if i.name == "v_fma_mix_f32":
        return lambda w: w.put(d, A.fma32(a(w), b(w), c(w)).view(np.uint32))
    put = put_vector(d, 16, high="mixhi" in i.name)
    return lambda w: put(w, A.fma32(a(w), b(w), c(w)).astype(np.float16).view(np.uint16).astype(np.uint32))


def _mixed(read: Read, half: bool, high: int, i: Instruction, at: int) -> Read:
    negate, absolute = i["neg"] >> at & 1, i["neg_hi"] >> at & 1

    def mixed(w: Waves) -> Any:
        value = read(w)
        x = (value >> 16 if high else value).astype(np.uint16).view(np.float16).astype(np.float32) if half else None
        x = value.view(np.float32) if x is None else x
        if absolute:
            x = np.abs(x)
        return -x if negate else x

    return mixed


def dual(arch: str, i: Instruction) -> Step:
    """VOPD: both halves read their sources before either writes."""
    functions, puts = [], []
    for op, x in ((i.op, "x"), (i.second, "y")):
        name = plain_name(op)
        m = _dual_meaning(arch, VOPD_NAMES.get(name, name.replace("v_dual_", "v_")))
        reads: list[Read] = []
        for source in m.inputs:
            if source == "S0":
                reads.append(vector_source(i[f"src{x}0"], 32, "F32", i.literal))
            elif source == "S1":
                reads.append(vector_source(i[f"vsrc{x}1"], 32, "F32", i.literal))
            elif source == "D0":
                reads.append(vector_source(i[f"vdst{x}"], 32, "F32"))
            elif source == "VCC":
                reads.append(lambda w: w.bits(VCC))
            elif source == "SIMM32":
                array = np.full((1, 1), i.literal, np.uint32)
                reads.append(lambda w, a=array: a)
            else:
                raise UnknownInstruction(f"{i}: reads {source}.")
        functions.append(_reader(m.function, reads))
        puts.append(i[f"vdst{x}"] - 256)
    (fx, fy), (dx, dy) = functions, puts

    def step(w: Waves) -> None:
        y = fy(w)
        w.put(dx, fx(w))
        w.put(dy, y)

    # the second result must not be a view of a register that the first write changes
    copied = "v_dual_mov_b32" in i.name.split(" :: ")[1]

    def step_copied(w: Waves) -> None:
        y = np.array(fy(w))
        w.put(dx, fx(w))
        w.put(dy, y)

    return step_copied if copied else step


def _reader(function: Callable[..., tuple[Any, ...]], reads: list[Read]) -> Read:
    return lambda w: function(*[read(w) for read in reads])[0]


@cache
def _dual_meaning(arch: str, name: str) -> Meaning:
    """The meaning of a VOPD half is that of the vector instruction of its name."""
    import importlib

    enums = importlib.import_module(f"tinygrad.runtime.autogen.amd.{arch}.enum")
    for table in ("VOP2Op", "VOP1Op", "VOP3Op"):
        for op in getattr(enums, table):
            if plain_name(op) == name:
                return meaning_of(arch, op)
    raise UnknownInstruction(f"{name} ({arch}): half of a dual instruction without a meaning.")


def scalar(arch: str, i: Instruction) -> Step:
    """SOP1, SOP2, SOPC and SOPK (not branches, barriers, waits)."""
    m = meaning_of(arch, i.op)
    table = operand_bits(arch, i.op)
    reads: list[Read] = []
    for name in m.inputs:
        if name in ("S0", "S1", "S2"):
            field = f"ssrc{name[1]}"
            kind, bits = table.get(f"src{name[1]}", table.get("sdst", ("ANY", 32)))
            if i.form == "SOPK" and arch == "rdna4":  # there the text calls the immediate S0
                if name != "S0" or "SIMM16" in m.inputs:
                    raise UnknownInstruction(f"{i}: reads {name}.")
                immediate = np.full(1, i["simm16"], np.uint32)
                reads.append(lambda w, a=immediate: a)
                continue
            code = i.fields.get(field, i.fields.get("sdst"))
            assert code is not None
            reads.append(scalar_source(code, bits, kind, i.literal))
        elif name == "D0":
            kind, bits = table["sdst"]
            reads.append(scalar_source(i["sdst"], bits, kind))
        elif name == "SCC":
            reads.append(lambda w: w.scc)
        elif name == "EXEC":
            reads.append(lambda w: w.s[EXEC].copy())
        elif name in ("SIMM16", "SIMM32"):
            array = np.full(1, i.literal if name == "SIMM32" else i["simm16"], np.uint32)
            reads.append(lambda w, a=array: a)
        else:
            raise UnknownInstruction(f"{i}: reads {name}.")
    writes: list[Any] = []
    for name in m.outputs:
        if name == "D0":
            writes.append(put_scalar(i["sdst"], max(32, table["sdst"][1])))
        elif name == "SCC":
            writes.append(_put_scc)
        elif name == "EXEC":
            writes.append(lambda w, x: w.put_scalar(EXEC, x))
        else:
            raise UnknownInstruction(f"{i}: writes {name}.")
    return _assembled(m.function, reads, writes)


def _put_scc(w: Waves, value: Any) -> None:
    w.scc[...] = value
