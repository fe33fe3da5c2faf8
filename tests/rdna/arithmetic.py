"""Arithmetic on arrays, bit for bit what the instruction set asks for where it says so.

Exact (correctly rounded to nearest even, denormals kept): addition, multiplication, fused multiply-add, conversions,
``ldexp``. Of documented accuracy only, computed here in float64 and rounded once: ``v_exp_f32``, ``v_log_f32``,
``v_rcp_f32``, ``v_rsq_f32``, ``v_sqrt_f32`` (1 ulp in the manual, denormals flushed) and ``v_sin_f32``, ``v_cos_f32``;
hardware may differ from them in the last bit. NaNs are quiet, their payload and sign are the host's.
"""

from __future__ import annotations

from typing import Any

import numpy as np

U16, U32, U64, I32, I64 = np.uint16, np.uint32, np.uint64, np.int32, np.int64
F16, F32, F64 = np.float16, np.float32, np.float64
MIN_NORMAL = F32(2.0**-126)


def low16(x: Any) -> Any:
    return x.astype(U16)


def bf16_to_f32(x: Any) -> Any:
    return (x.astype(U32) << 16).view(F32)


def f32_to_bf16(x: Any) -> Any:
    """Nearest even, as a bit pattern in uint32."""
    bits = x.view(U32)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    return np.where(np.isnan(x), (bits >> 16) | 0x40, rounded)


def fma32(a: Any, b: Any, c: Any) -> Any:
    """a * b + c in float32, rounded once.

    The product is exact in float64. The sum is rounded to 53 bits, then to 24: wrong only when the first rounding made
    a tie or, below the normal range, whenever fewer bits are left; those lanes are done again from a sum rounded to odd.
    """
    wide_a, wide_b, wide_c = F64(a), F64(b), F64(c)
    product = wide_a * wide_b
    total = product + wide_c
    result = total.astype(F32)
    suspects = (total.view(U64) & U64(0x1FFFFFFF)) == U64(0x10000000)
    suspects |= np.abs(total) < 2.0**-125
    if suspects.any():
        product, wide_c, total = np.broadcast_arrays(product, wide_c, total)
        result = np.array(result)
        result[suspects] = _odd_sum(product[suspects], wide_c[suspects], total[suspects]).astype(F32)
    return result


def _odd_sum(p: Any, q: Any, total: Any) -> Any:
    """p + q in float64 rounded to odd: the last bit is set where the exact sum has more bits."""
    back = total - p
    error = (p - (total - back)) + (q - back)
    bits = np.ascontiguousarray(total).view(I64)
    odd = (error != 0) & ((bits & 1) == 0) & np.isfinite(total)
    step = np.where((error > 0) == (total > 0), 1, -1)
    return np.where(odd & (total != 0), bits + step, bits).view(F64)


def fma16(a: Any, b: Any, c: Any) -> Any:
    """In float16, rounded once: product and sum are exact in float64 wherever the result is finite."""
    return (F64(a) * F64(b) + F64(c)).astype(F16)


def divide(a: Any, b: Any) -> Any:
    return np.divide(a, b)


def power_of_two(n: Any) -> Any:
    return np.asarray(n, I32)


def scale(x: Any, n: Any) -> Any:
    return ldexp(x, n)


def ldexp(x: Any, n: Any) -> Any:
    """x * 2 ** n, rounded once (through float64, whose exponents are wide enough)."""
    n = np.clip(np.asarray(n).astype(I32), -400, 400)
    if x.dtype == F64:
        return np.ldexp(x, n)
    return np.ldexp(F64(x), n).astype(x.dtype)


def sign(x: Any) -> Any:
    return np.signbit(x).astype(U32)


def exponent(x: Any) -> Any:
    """The biased exponent field."""
    if x.dtype == F16:
        return ((x.view(U16) >> 10) & 31).astype(I32)
    if x.dtype == F32:
        return ((x.view(U32) >> 23) & 255).astype(I32)
    return ((x.view(U64) >> 52) & 2047).astype(I32)


def isNAN(x: Any) -> Any:
    return np.isnan(x)


def isSignalNAN(x: Any) -> Any:
    """Seen after a conversion to float64, which makes NaNs quiet: always false here (see the module's first lines)."""
    return np.zeros(np.shape(x), bool)


def isQuietNAN(x: Any) -> Any:
    return np.isnan(x)


def cvtToQuietNAN(x: Any) -> Any:
    return x


def isEven(x: Any) -> Any:
    return np.remainder(x, 2) == 0


abs = np.abs
floor = np.floor
trunc = np.trunc


def fract(x: Any) -> Any:
    return x - np.floor(x)


def sqrt(x: Any) -> Any:
    return np.sqrt(x)


def sign_extend(x: Any, bits: Any) -> Any:
    """The low ``bits`` bits as a signed number (0 bits: 0)."""
    width = 64 if x.dtype in (np.dtype(I64), np.dtype(U64)) else 32
    kind = I64 if width == 64 else I32
    x = x.view(kind) if x.dtype.itemsize * 8 == width else x.astype(kind)
    shift = (width - np.asarray(bits).astype(kind)) & (width * 2 - 1)
    shift = np.clip(shift, 0, width)
    return np.where(shift >= width, kind(0), (x << np.minimum(shift, width - 1)) >> np.minimum(shift, width - 1))


def u32_to_f32(x: Any) -> Any:
    return x.astype(F32)


i32_to_f32 = u32_to_f32
f16_to_f32 = u32_to_f32
f64_to_f32 = u32_to_f32


def f32_to_f64(x: Any) -> Any:
    return x.astype(F64)


i32_to_f64 = u32_to_f64 = f32_to_f64


def f32_to_f16(x: Any) -> Any:
    return x.astype(F16)


u16_to_f16 = i16_to_f16 = f32_to_f16


def _saturated(x: Any, low: int, high: int, kind: Any) -> Any:
    wide = np.trunc(np.where(np.isnan(x), F64(0), F64(x)))
    return np.clip(wide, low, high).astype(I64).astype(kind)


def f32_to_i32(x: Any) -> Any:
    """Toward zero; NaN is 0, what does not fit is the nearest limit."""
    return _saturated(x, -(2**31), 2**31 - 1, I32)


def f32_to_u32(x: Any) -> Any:
    return _saturated(x, 0, 2**32 - 1, U32)


f64_to_i32, f64_to_u32 = f32_to_i32, f32_to_u32


def f16_to_i16(x: Any) -> Any:
    return _saturated(x, -(2**15), 2**15 - 1, I32)


def f16_to_u16(x: Any) -> Any:
    return _saturated(x, 0, 2**16 - 1, U32)


def i32_to_i16(x: Any) -> Any:
    return np.clip(x, -(2**15), 2**15 - 1)


def u32_to_u16(x: Any) -> Any:
    return np.minimum(x, U32(0xFFFF))


def f32_to_f16_toward_zero(x: Any) -> Any:
    """As a bit pattern in uint32; what is too large becomes 65504, infinities stay."""
    near = x.astype(F16)
    bits = near.view(U16).astype(U32)
    return np.where(np.abs(F64(near)) > np.abs(F64(x)), bits - U32(1), bits)


def u8_to_u32(x: Any) -> Any:
    return x.astype(U32)


u4_to_u32 = u8_to_u32


def fmax(a: Any, b: Any) -> Any:
    """The greater; a number before a NaN; +0 above -0."""
    result = np.fmax(a, b)
    zero = result == 0
    if zero.any():
        result = np.where(zero & (a == 0) & (b == 0), np.where(np.signbit(a), b, a), result)
    return result


def fmin(a: Any, b: Any) -> Any:
    """The smaller; a number before a NaN; -0 below +0."""
    result = np.fmin(a, b)
    zero = result == 0
    if zero.any():
        result = np.where(zero & (a == 0) & (b == 0), np.where(np.signbit(a), a, b), result)
    return result


def flush(x: Any) -> Any:
    """Denormals to zero of their sign."""
    return np.where(np.abs(x) < MIN_NORMAL, np.copysign(F32(0), x), x)


def exp2(x: Any) -> Any:
    return flush(np.exp2(F64(flush(x))).astype(F32))


def log2(x: Any) -> Any:
    return flush(np.log2(F64(flush(x))).astype(F32))


def rcp(x: Any) -> Any:
    return flush((1.0 / F64(flush(x))).astype(F32))


def rsq(x: Any) -> Any:
    return flush((1.0 / np.sqrt(F64(flush(x)))).astype(F32))


def sqrt_flushed(x: Any) -> Any:
    return np.sqrt(F64(flush(x))).astype(F32)


def sin_turns(x: Any) -> Any:
    """Sine of x turns (the instruction's argument is in units of 2 pi)."""
    return np.sin(np.remainder(F64(x), 1.0) * (2 * np.pi)).astype(F32)


def cos_turns(x: Any) -> Any:
    return np.cos(np.remainder(F64(x), 1.0) * (2 * np.pi)).astype(F32)


def dot4(a: Any, b: Any, c: Any, signed_a: bool, signed_b: bool) -> Any:
    """c + the four products of bytes, modulo 2 ** 32 (as uint32)."""
    total = c.view(I32)
    for shift in (24, 16, 8, 0):
        x = (a << shift).view(I32) >> 24 if signed_a else ((a << shift) >> 24).view(I32)
        y = (b << shift).view(I32) >> 24 if signed_b else ((b << shift) >> 24).view(I32)
        total = total + x * y
    return total.view(U32)


def permute_bytes(s0: Any, s1: Any, selector: Any) -> Any:
    """v_perm_b32: bytes 0 to 3 of s1, 4 to 7 of s0, 8 to 11 the sign of bytes 1, 3, 5, 7, 12 is 0, more is 255."""
    data = (s0.astype(U64) << U64(32)) | s1.astype(U64)
    result = 0
    for at in (0, 8, 16, 24):
        sel = (selector >> at) & 255
        plain = (data >> ((sel & 7).astype(U64) << U64(3))).astype(U32) & 255
        sign_at = (sel.astype(U64) & U64(3)) * U64(16) + U64(15)
        signs = ((data >> sign_at) & U64(1)).astype(U32) * U32(255)
        value = np.where(sel < 8, plain, np.where(sel < 12, signs, np.where(sel == 12, U32(0), U32(255))))
        result = result | (value << at)
    return result


def div_scale32(s0: Any, s1: Any, s2: Any) -> tuple[Any, Any]:
    """v_div_scale_f32: the operand s0 (the denominator s1 or the numerator s2) scaled for the division, and whether
    v_div_fmas has to scale back.

    The manual's text cannot be meant in two places: it scales a denominator above 2 ** 126 up when the quotient is tiny
    (to infinity), and asks for reciprocals that are denormal in float64 (none is). Here such a denominator goes down, and
    the reciprocal is looked at in float32, as the flushing v_rcp_f32 needs it. With this the compiler's sequence gives the
    IEEE quotient for every kind of operand, as it does on hardware.
    """
    s0, s1, s2 = np.broadcast_arrays(s0, s1, s2)
    with np.errstate(all="ignore"):
        tiny = lambda x: (np.abs(x) < MIN_NORMAL) & (x != 0)  # noqa: E731
        inverse_tiny = np.abs(s1) > F32(2.0**126)
        quotient = (F64(s2) / F64(s1)).astype(F32)
        quotient_tiny = tiny(quotient) | ((quotient == 0) & (s2 != 0))
    up, down = ldexp(s0, 64), ldexp(s0, -64)
    invalid = (s1 == 0) | (s2 == 0)
    far = exponent(s2) - exponent(s1) >= 96
    same1, same2 = s0 == s1, s0 == s2
    result = np.where(exponent(s2) <= 23, up, s0)
    result = np.where(quotient_tiny, np.where(same2, up, s0), result)
    result = np.where(inverse_tiny, down, result)
    result = np.where(inverse_tiny & quotient_tiny, np.where(same1, down, s0), result)
    result = np.where(tiny(s1), up, result)
    result = np.where(far, np.where(same1, up, s0), result)
    result = np.where(invalid, F32(np.nan), result)
    flag = ~invalid & (far | (~tiny(s1) & quotient_tiny))
    return result, flag


def div_fmas32(a: Any, b: Any, c: Any, scaled: Any) -> Any:
    """fma, and where ``scaled`` the scaling of v_div_scale undone: times 2 ** 64 for a large quotient c, 2 ** -64 for a
    small one (the manual's text has 2 ** 32, which undoes neither). One rounding: the fused sum is scaled before it."""
    result = fma32(a, b, c)
    if not scaled.any():
        return result
    product, wide_c = np.broadcast_arrays(F64(a) * F64(b), F64(c))
    exact = _odd_sum(product, wide_c, product + wide_c)
    return np.where(scaled, np.ldexp(exact, np.where(exponent(c) > 127, 64, -64)).astype(F32), result)


def div_fixup32(quotient: Any, denominator: Any, numerator: Any) -> Any:
    """v_div_fixup_f32: the quotient with its sign, or the special value that the operands ask for.

    The manual's condition for an overflow, "exponent(S1) == 255", was dealt with before it; it is taken to mean S0, the
    quotient, which is infinite or NaN after the compiler's sequence exactly when the result overflows.
    """
    q, d, n = np.broadcast_arrays(quotient, denominator, numerator)
    negative = np.signbit(d) ^ np.signbit(n)
    result = np.copysign(np.abs(q), np.where(negative, F32(-1), F32(1)))
    signed = lambda x: np.where(negative, F32(-x), F32(x))  # noqa: E731
    # overflow and underflow of the rounding mode "to nearest"
    result = np.where(exponent(q) == 255, signed(np.inf), result)
    result = np.where(exponent(n) - exponent(d) < -150, signed(0.0), result)
    infinite_d, infinite_n = np.isinf(d), np.isinf(n)
    result = np.where(infinite_d | (n == 0), signed(0.0), result)
    result = np.where((d == 0) | infinite_n, signed(np.inf), result)
    result = np.where(((d == 0) & (n == 0)) | (infinite_d & infinite_n), F32(np.nan), result)
    return np.where(np.isnan(n), n, np.where(np.isnan(d), d, result))
