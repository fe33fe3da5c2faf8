"""From an operand's number to a function that reads it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.rdna.errors import UnknownInstruction
from tests.rdna.waves import EXEC, LANES, NULL, VCC, Waves

Read = Callable[[Waves], Any]
LITERAL, SCC = 255, 253
INLINE_FLOATS = {240: 0.5, 241: -0.5, 242: 1.0, 243: -1.0, 244: 2.0, 245: -2.0, 246: 4.0, 247: -4.0}
INLINE_FLOATS[248] = 0.15915494309189535  # 1 / (2 pi)
# high halves of the flat addresses at which LDS and scratch appear; any value that no buffer has will do
LDS_APERTURE, SCRATCH_APERTURE = 0x0001_0000, 0x0002_0000
APERTURES = {235: LDS_APERTURE, 236: LDS_APERTURE, 237: SCRATCH_APERTURE, 238: SCRATCH_APERTURE}


def constant(code: int, bits: int, kind: str, literal: int | None) -> int | None:
    """The bit pattern of a constant operand, None for a register. ``kind``: number format of the operand (F16, I32...)."""
    if code == LITERAL:
        assert literal is not None
        if bits == 64:
            if kind == "F64":
                return literal << 32
            if kind.startswith("I") and literal >> 31:
                return literal | 0xFFFFFFFF_00000000
        return literal
    if 128 <= code <= 208:
        value = code - 128 if code <= 192 else 192 - code
        return value & ((1 << max(bits, 32)) - 1)
    if code in INLINE_FLOATS:
        value = INLINE_FLOATS[code]
        if kind in ("BF16", "PK2_BF16"):
            return int(np.array(value, np.float32).view(np.uint32)) >> 16
        if bits == 16 or kind == "PK2_F16":
            return int(np.array(value, np.float16).view(np.uint16))
        if bits == 64:
            return int(np.array(value, np.float64).view(np.uint64))
        return int(np.array(value, np.float32).view(np.uint32))
    if code == NULL:
        return 0
    if code in APERTURES:
        if bits == 64:
            return APERTURES[code] << 32
        raise UnknownInstruction(f"operand {code} (an aperture) read as {bits} bits")
    return None


def vector_source(code: int, bits: int, kind: str, literal: int | None = None, high: bool = False) -> Read:
    """Reads [n, 32], [n, 1] or [1, 1] of uint32 (uint64 for 64 bits). ``high``: the upper half of a 16-bit operand."""
    value = constant(code, bits, kind, literal)
    if value is not None:
        array = np.full((1, 1), value >> 16 if high else value, np.uint64 if bits == 64 else np.uint32)
        return lambda w: array
    if code >= 256:
        r = code - 256
        if bits == 64:
            return lambda w: w.v[r] | (w.v[r + 1].astype(np.uint64) << 32)
        if high:
            return lambda w: w.v[r] >> 16
        return lambda w: w.v[r]
    if bits == 64 and code < 128:
        return lambda w: w.c[code] | (w.c[code + 1].astype(np.uint64) << 32)
    column = scalar_source(code, bits, kind, literal)
    if high:
        return lambda w: column(w)[:, None] >> 16
    if code < 128:
        return lambda w: w.c[code]
    return lambda w: column(w)[:, None]


def scalar_source(code: int, bits: int, kind: str, literal: int | None = None) -> Read:
    """Reads [n] or [1] of uint32 (uint64 for 64 bits)."""
    value = constant(code, bits, kind, literal)
    if value is not None:
        array = np.full(1, value, np.uint64 if bits == 64 else np.uint32)
        return lambda w: array
    if code < 128:
        if bits == 64:
            return lambda w: w.s[code] | (w.s[code + 1].astype(np.uint64) << 32)
        return lambda w: w.s[code]
    if bits <= 32 and code == SCC:
        return lambda w: w.scc.astype(np.uint32)
    if bits <= 32 and code == 251:
        return lambda w: (w.s[VCC] == 0).astype(np.uint32)
    if bits <= 32 and code == 252:
        return lambda w: (w.s[EXEC] == 0).astype(np.uint32)
    raise UnknownInstruction(f"operand {code} of {bits} bits")


def put_vector(register: int, bits: int, high: bool = False) -> Callable[[Waves, Any], None]:
    """Writes a vector destination of 16, 32 or 64 bits in the active lanes."""
    if bits == 64:

        def put64(w: Waves, value: Any) -> None:
            w.put(register, value.astype(np.uint32))
            w.put(register + 1, (value >> 32).astype(np.uint32))

        return put64
    if bits == 16:
        keep, shift = (0x0000FFFF, 16) if high else (0xFFFF0000, 0)

        def put16(w: Waves, value: Any) -> None:
            w.put(register, (w.v[register] & keep) | ((value & 0xFFFF) << shift))

        return put16
    return lambda w, value: w.put(register, value)


def put_scalar(register: int, bits: int) -> Callable[[Waves, Any], None]:
    """Writes a scalar destination of 32 or 64 bits."""
    if register == NULL:
        return lambda w, value: None
    if bits == 64:

        def put64(w: Waves, value: Any) -> None:
            w.s[register][...] = value.astype(np.uint32)
            w.s[register + 1][...] = value >> 32
            if register == EXEC:
                w.exec_changed()

        return put64
    return lambda w, value: w.put_scalar(register, value)


def dpp_source(fields: dict[str, int], kind: str, read: Read) -> tuple[Read, Callable[[Waves], Any] | None]:
    """``read`` moved between lanes as data-parallel primitives say; and the lanes that are written (None: as exec)."""
    lane = np.arange(LANES)
    if kind == "dpp8":
        select = np.array([fields[f"lane_sel_{i}"] for i in range(8)])
        source = (lane & ~7) | select[lane & 7]
        valid = np.ones(LANES, bool)
        bound, inactive = True, bool(fields.get("fi", 0))
        written = np.ones(LANES, bool)
    else:
        source, valid = _dpp16(fields["dpp"], lane)
        bound, inactive = bool(fields["bc"]), bool(fields["fi"])
        written = (fields["row_mask"] >> (lane // 16) & 1).astype(bool) & (
            fields["bank_mask"] >> (lane // 4 % 4) & 1 > 0
        )

    def moved(w: Waves) -> Any:
        value = np.broadcast_to(read(w), (w.n, LANES))[:, source]
        ok = valid if inactive or w.full else valid & w.mask[:, source]
        return np.where(ok, value, value.dtype.type(0))

    if bound and written.all():
        return moved, None

    def lanes(w: Waves) -> Any:
        if bound:
            return w.mask & written
        ok = valid if inactive or w.full else valid & w.mask[:, source]
        return w.mask & written & ok

    return moved, lanes


def _dpp16(control: int, lane: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Source lane of each lane and whether it exists."""
    row, at = lane & ~15, lane & 15
    always = np.ones(LANES, bool)
    if control <= 0xFF:
        quad = np.array([control >> 2 * i & 3 for i in range(4)])
        return (lane & ~3) | quad[lane & 3], always
    kind, amount = control & 0x1F0, control & 15
    if kind == 0x100 and amount:
        return row | (at + amount & 15), at + amount < 16
    if kind == 0x110 and amount:
        return row | (at - amount & 15), at - amount >= 0
    if kind == 0x120 and amount:
        return row | (at - amount & 15), always
    if control == 0x140:
        return row | (15 - at), always
    if control == 0x141:
        return (lane & ~7) | (7 - (lane & 7)), always
    if kind == 0x150:
        return row | amount, always
    if kind == 0x160:
        return row | (at ^ amount), always
    raise UnknownInstruction(f"DPP control {control:#x}")
