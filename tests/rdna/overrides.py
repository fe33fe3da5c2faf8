"""Meanings that the tables have only as a formula, or that the compiled text would compute inexactly or slowly.

``test_overrides`` compares those that the text can be compiled for with the compiled text.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.rdna import arithmetic as A
from tests.rdna.pcode import Meaning

F32, U32, I32, U64, I64 = np.float32, np.uint32, np.int32, np.uint64, np.int64


def _unary32(function: Callable[[Any], Any]) -> Meaning:
    return Meaning(lambda S0: (function(S0.view(F32)).view(U32),), ("S0",), ("D0",))


def _binary32(function: Callable[[Any, Any], Any]) -> Meaning:
    return Meaning(lambda S0, S1: (function(S0.view(F32), S1.view(F32)).view(U32),), ("S0", "S1"), ("D0",))


def _ternary32(function: Callable[[Any, Any, Any], Any]) -> Meaning:
    def run(S0: Any, S1: Any, S2: Any) -> tuple[Any]:
        return (function(S0.view(F32), S1.view(F32), S2.view(F32)).view(U32),)

    return Meaning(run, ("S0", "S1", "S2"), ("D0",))


def _div_scale(S0: Any, S1: Any, S2: Any) -> tuple[Any, Any]:
    value, flag = A.div_scale32(S0.view(F32), S1.view(F32), S2.view(F32))
    return value.view(U32), flag


def _div_fmas(S0: Any, S1: Any, S2: Any, VCC: Any) -> tuple[Any]:
    return (A.div_fmas32(S0.view(F32), S1.view(F32), S2.view(F32), VCC).view(U32),)


def _mad_u64(S0: Any, S1: Any, S2: Any) -> tuple[Any, Any]:
    total = S0.astype(U64) * S1.astype(U64) + S2
    return total, total < S2


def _mad_i64(S0: Any, S1: Any, S2: Any) -> tuple[Any, Any]:
    """The flag is the carry of the 65-bit sum of the sign-extended terms: its bit 64."""
    product = S0.view(I32).astype(I64) * S1.view(I32).astype(I64)
    addend = S2.view(I64)
    total = product + addend
    carry = (product < 0) ^ (addend < 0) ^ (total.view(U64) < addend.view(U64))
    return total.view(U64), carry


def _mbcnt(S0: Any, S1: Any, laneId: Any) -> tuple[Any]:
    return (np.bitwise_count(S0 & ((U32(1) << laneId) - U32(1))).astype(U32) + S1,)


def _bcnt(S0: Any, S1: Any) -> tuple[Any]:
    return (np.bitwise_count(S0).astype(U32) + S1,)


def _cmp_class(S0: Any, S1: Any) -> tuple[Any]:
    bits = S0
    sign, exponent, fraction = bits >> 31, (bits >> 23) & 255, bits & 0x7FFFFF
    nan = (exponent == 255) & (fraction != 0)
    quiet = (bits >> 22) & 1 != 0
    kinds = [
        nan & ~quiet,
        nan & quiet,
        (bits == 0xFF800000),
        (sign == 1) & (exponent > 0) & (exponent < 255),
        (sign == 1) & (exponent == 0) & (fraction != 0),
        (bits == 0x80000000),
        (bits == 0),
        (sign == 0) & (exponent == 0) & (fraction != 0),
        (sign == 0) & (exponent > 0) & (exponent < 255),
        (bits == 0x7F800000),
    ]
    result = False
    for at, is_kind in enumerate(kinds):
        result = result | (is_kind & ((S1 >> at) & 1 != 0))
    return (result,)


def _frexp_exp(x: Any) -> Any:
    """Exponent of a fraction in [0.5, 1); 0 for infinities and NaN."""
    return np.where(np.isfinite(x), np.frexp(x)[1], 0).astype(I32).view(U32)


def _frexp_mant32(x: Any) -> Any:
    return np.where(np.isfinite(x), np.frexp(x)[0], x)


def _count_trailing(S0: Any) -> tuple[Any]:
    lowest = S0 & (~S0 + U32(1))
    return (np.where(S0 == 0, U32(0xFFFFFFFF), np.bitwise_count(lowest - U32(1)).astype(U32)),)


def _count_leading(S0: Any) -> tuple[Any]:
    x = S0
    for shift in (1, 2, 4, 8, 16):
        x = x | (x >> shift)
    return (np.where(S0 == 0, U32(0xFFFFFFFF), U32(32) - np.bitwise_count(x).astype(U32)),)


def _pack_rtz(S0: Any, S1: Any) -> tuple[Any]:
    low, high = (A.f32_to_f16_toward_zero(x.view(F32)) for x in (S0, S1))
    return (low | high << U32(16),)


def _count_trailing64(S0: Any) -> tuple[Any]:
    low, high = S0.astype(U32), (S0 >> U64(32)).astype(U32)
    (a,), (b,) = _count_trailing(low), _count_trailing(high)
    return (np.where(low != 0, a, np.where(high != 0, b + U32(32), U32(0xFFFFFFFF))),)


def _count_leading64(S0: Any) -> tuple[Any]:
    low, high = S0.astype(U32), (S0 >> U64(32)).astype(U32)
    (a,), (b,) = _count_leading(low), _count_leading(high)
    return (np.where(high != 0, b, np.where(low != 0, a + U32(32), U32(0xFFFFFFFF))),)


def _bit_set(S0: Any, D0: Any) -> tuple[Any]:
    return (D0 | U32(1) << (S0 & U32(31)),)


def _bit_clear(S0: Any, D0: Any) -> tuple[Any]:
    return (D0 & ~(U32(1) << (S0 & U32(31))),)


def _reversed(x: Any) -> Any:
    for shift, mask in ((1, 0x55555555), (2, 0x33333333), (4, 0x0F0F0F0F), (8, 0x00FF00FF)):
        x = ((x >> shift) & mask) | ((x & mask) << shift)
    return (x >> 16) | (x << 16)


MEANINGS: dict[str, Meaning] = {
    "v_exp_f32": _unary32(A.exp2),
    "v_log_f32": _unary32(A.log2),
    "v_rcp_f32": _unary32(A.rcp),
    "v_rcp_iflag_f32": _unary32(A.rcp),
    "v_rsq_f32": _unary32(A.rsq),
    "v_sqrt_f32": _unary32(A.sqrt_flushed),
    "v_sin_f32": _unary32(A.sin_turns),
    "v_cos_f32": _unary32(A.cos_turns),
    "v_rndne_f32": _unary32(np.rint),
    "v_floor_f32": _unary32(np.floor),
    "v_ceil_f32": _unary32(np.ceil),
    "v_trunc_f32": _unary32(np.trunc),
    "v_frexp_mant_f32": _unary32(_frexp_mant32),
    "v_frexp_exp_i32_f32": Meaning(lambda S0: (_frexp_exp(S0.view(F32)),), ("S0",), ("D0",)),
    "v_frexp_exp_i32_f64": Meaning(lambda S0: (_frexp_exp(S0.view(np.float64)),), ("S0",), ("D0",)),
    "v_div_scale_f32": Meaning(_div_scale, ("S0", "S1", "S2"), ("D0", "VCC")),
    "v_div_fmas_f32": Meaning(_div_fmas, ("S0", "S1", "S2", "VCC"), ("D0",)),
    "v_div_fixup_f32": _ternary32(A.div_fixup32),
    "v_perm_b32": Meaning(lambda S0, S1, S2: (A.permute_bytes(S0, S1, S2),), ("S0", "S1", "S2"), ("D0",)),
    "v_mbcnt_lo_u32_b32": Meaning(_mbcnt, ("S0", "S1", "laneId"), ("D0",)),
    "v_mbcnt_hi_u32_b32": Meaning(lambda S0, S1: (S1,), ("S0", "S1"), ("D0",)),  # lanes 32 to 63: none
    "v_bcnt_u32_b32": Meaning(_bcnt, ("S0", "S1"), ("D0",)),
    "v_bfrev_b32": Meaning(lambda S0: (_reversed(S0),), ("S0",), ("D0",)),
    "v_clz_i32_u32": Meaning(_count_leading, ("S0",), ("D0",)),
    "v_ctz_i32_b32": Meaning(_count_trailing, ("S0",), ("D0",)),
    "v_cmp_class_f32": Meaning(_cmp_class, ("S0", "S1"), ("LANE",)),
    "v_cmpx_class_f32": Meaning(_cmp_class, ("S0", "S1"), ("EXEC",)),
    "s_ctz_i32_b32": Meaning(_count_trailing, ("S0",), ("D0",)),
    "s_clz_i32_u32": Meaning(_count_leading, ("S0",), ("D0",)),
    "s_brev_b32": Meaning(lambda S0: (_reversed(S0),), ("S0",), ("D0",)),
    "s_rndne_f32": _unary32(np.rint),
    "s_ctz_i32_b64": Meaning(_count_trailing64, ("S0",), ("D0",)),
    "s_clz_i32_u64": Meaning(_count_leading64, ("S0",), ("D0",)),
    "s_bitset1_b32": Meaning(_bit_set, ("S0", "D0"), ("D0",)),
    "s_bitset0_b32": Meaning(_bit_clear, ("S0", "D0"), ("D0",)),
    "v_cvt_pk_rtz_f16_f32": Meaning(_pack_rtz, ("S0", "S1"), ("D0",)),
    "s_cvt_pk_rtz_f16_f32": Meaning(_pack_rtz, ("S0", "S1"), ("D0",)),
}
for _kind, _function in (("max", A.fmax), ("min", A.fmin)):
    for _suffix in ("", "_num"):
        MEANINGS[f"v_{_kind}{_suffix}_f32"] = MEANINGS[f"s_{_kind}{_suffix}_f32"] = _binary32(_function)
for _name in ("exp", "log", "rcp", "rsq", "sqrt"):
    MEANINGS[f"v_s_{_name}_f32"] = MEANINGS[f"v_{_name}_f32"]
for _name in ("v_mad_u64_u32", "v_mad_co_u64_u32"):
    MEANINGS[_name] = Meaning(_mad_u64, ("S0", "S1", "S2"), ("D0", "VCC"))
for _name in ("v_mad_i64_i32", "v_mad_co_i64_i32"):
    MEANINGS[_name] = Meaning(_mad_i64, ("S0", "S1", "S2"), ("D0", "VCC"))
