"""Matrix instructions (WMMA, 16x16x16, waves of 32) of RDNA3 and RDNA4.

Products of float16 and bfloat16 are exact; their sum with C is made in float64, k from 0 to 15, and rounded once. AMD does
not document the hardware's order and intermediate precision, so results agree with hardware within rounding, not bit for
bit. Integers are exact, modulo 2 ** 32 or limited to int32 as the clamp bit says.

Fragments: A holds row ``lane % 16``, B column ``lane % 16``. RDNA3: all 16 k in every lane, the upper 16 lanes must hold
copies (a difference stops the run); C and D: register i is row 2 i + lane / 16. RDNA4: k = 8 (lane / 16) + j; register i of
C and D is row 8 (lane / 16) + i. Column of C and D: ``lane % 16``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.rdna import arithmetic as A
from tests.rdna.decode import Instruction
from tests.rdna.errors import RdnaError, UnknownInstruction
from tests.rdna.operands import constant
from tests.rdna.waves import LANES, Waves

Step = Callable[[Waves], None]
NAME = re.compile(r"v_wmma_(f32|f16|bf16|i32)_16x16x16_(f16|bf16|iu8|iu4)$")
LANE = np.arange(LANES)


def _registers(w: Waves, first: int, count: int) -> np.ndarray:
    """[n, 32, count] of uint32."""
    return np.stack(w.v[first : first + count], axis=2)


def _elements(words: np.ndarray, kind: str, signed: bool) -> np.ndarray:
    """Packed elements of each lane, in order of k: float64 or int32."""
    words = np.ascontiguousarray(words)
    if kind == "f16":
        return words.view(np.float16).astype(np.float64)
    if kind == "bf16":
        return A.bf16_to_f32(words.view(np.uint16)).astype(np.float64)
    if kind == "iu8":
        return words.view(np.int8 if signed else np.uint8).astype(np.int32)
    octets = words.view(np.uint8)
    nibbles = np.stack([octets & 15, octets >> 4], axis=-1).reshape(*octets.shape[:-1], -1).astype(np.int32)
    return np.where(nibbles > 7, nibbles - 16, nibbles) if signed else nibbles


def _operand(w: Waves, arch: str, i: Instruction, at: int, kind: str) -> np.ndarray:
    """[n, 16 rows or columns, 16 k]."""
    bits = {"f16": 16, "bf16": 16, "iu8": 8, "iu4": 4}[kind]
    lane_elements = 16 if arch == "rdna3" else 8
    code = i[f"src{at}"]
    if code < 256:
        raise UnknownInstruction(f"{i}: a matrix operand that is no vector register.")
    words = _registers(w, code - 256, lane_elements * bits // 32)
    if arch == "rdna3":
        if not np.array_equal(words[:, :16], words[:, 16:]):
            raise RdnaError(
                f"{i}: lanes 0 to 15 and 16 to 31 hold different fragments of operand {at}; RDNA3 wants copies."
            )
        return _elements(words[:, :16], kind, bool(i["neg"] >> at & 1))
    values = _elements(words, kind, bool(i["neg"] >> at & 1))
    return np.concatenate([values[:, :16], values[:, 16:]], axis=2)


def _rows(arch: str, count: int) -> np.ndarray:
    """Row of element e of a lane's C and D: [32, count]."""
    e = np.arange(count)
    return 2 * e + LANE[:, None] // 16 if arch == "rdna3" else 8 * (LANE[:, None] // 16) + e


def wmma(arch: str, i: Instruction) -> Step:
    match = NAME.match(i.name)
    if not match:
        raise UnknownInstruction(f"{i}: no meaning for this matrix instruction.")
    result, kind = match.groups()
    floats = kind in ("f16", "bf16")
    if (floats and i["clmp"]) or (floats and (i["neg"] & 3 or i["neg_hi"])) or i["neg"] >> 2 or i["neg_hi"] >> 2:
        raise UnknownInstruction(f"{i}: clamp or sign modifiers.")
    d, rows, columns = i["vdst"] - 256, _rows(arch, 8), LANE[:, None] % 16
    narrow = result in ("f16", "bf16")
    fixed = constant(i["src2"], 32, "F32" if not narrow else result.upper(), i.literal)

    def read_c(w: Waves) -> np.ndarray:
        """[n, 16, 16]"""
        if fixed is not None:
            words = np.full((w.n, LANES, 8), fixed, np.uint32)
        elif narrow and arch == "rdna4":
            words = np.ascontiguousarray(_registers(w, i["src2"] - 256, 4)).view(np.uint16).astype(np.uint32)
        else:
            words = _registers(w, i["src2"] - 256, 8)
            if narrow and i["opsel"] >> 2 & 1:
                words = words >> 16
        if result == "i32":
            values: Any = words.view(np.int32).astype(np.int64)
        elif result == "f32":
            values = words.view(np.float32).astype(np.float64)
        elif result == "f16":
            values = words.astype(np.uint16).view(np.float16).astype(np.float64)
        else:
            values = A.bf16_to_f32(words & 0xFFFF).astype(np.float64)
        c = np.empty((w.n, 16, 16), values.dtype)
        c[:, rows, columns] = values
        return c

    def step(w: Waves) -> None:
        if not w.full:
            raise RdnaError(f"{i}: some lanes are switched off; a matrix instruction wants all.")
        a, b, total = _operand(w, arch, i, 0, kind), _operand(w, arch, i, 1, kind), read_c(w)
        for k in range(16):
            total = total + a[:, :, k, None] * b[:, None, :, k]
        values = total[:, rows, columns]  # [n, 32, 8]
        if result == "i32":
            if i["clmp"]:
                values = np.clip(values, -(2**31), 2**31 - 1)
            words = values.astype(np.int32).view(np.uint32)
        elif result == "f32":
            words = values.astype(np.float32).view(np.uint32)
        elif result == "f16":
            words = values.astype(np.float16).view(np.uint16).astype(np.uint32)
        else:
            words = A.f32_to_bf16(values.astype(np.float32)).astype(np.uint32)
        if narrow and arch == "rdna4":
            packed = words[:, :, 0::2] | words[:, :, 1::2] << 16
            for k in range(4):
                w.v[d + k][...] = packed[:, :, k]
        elif narrow:
            high = i["opsel"] >> 2 & 1
            for k in range(8):
                old = w.v[d + k]
                w.v[d + k][...] = (old & 0xFFFF) | words[:, :, k] << 16 if high else (old & 0xFFFF0000) | words[:, :, k]
        else:
            for k in range(8):
                w.v[d + k][...] = words[:, :, k]

    return step
