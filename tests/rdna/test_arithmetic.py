"""Rounding against exact rational arithmetic."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np

from tests.rdna import arithmetic as A

F32 = np.float32


def rounded(value: Fraction) -> np.float32:
    """The nearest float32, ties to even, by integer arithmetic alone."""
    if value == 0:
        return F32(0)
    size = abs(value)
    exponent = max(math.floor(math.log2(size)) - 1, -127)
    while size >= Fraction(2) ** (exponent + 1):
        exponent += 1
    unit = Fraction(2) ** (max(exponent, -126) - 23)
    whole = round(size / unit)  # Python rounds fractions half to even
    return (
        F32(math.copysign(float(whole * unit), value)) if whole * unit < 2**128 else F32(math.copysign(math.inf, value))
    )


def exact_fma(a: Any, b: Any, c: Any) -> np.float32:
    return rounded(Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c)))


def test_fma_is_rounded_once() -> None:
    """(1 + 2 ** -12) squared is 1 + 2 ** -11 + 2 ** -24, a tie: the sign of the smallest addend decides."""
    a = F32(1 + 2**-12)
    for c, expected in ((2.0**-100, 1 + 2**-11 + 2**-23), (-(2.0**-100), 1 + 2**-11), (0.0, 1 + 2**-11)):
        assert A.fma32(np.full(1, a), np.full(1, a), np.full(1, c, F32))[0] == F32(expected)
        assert exact_fma(a, a, c) == F32(expected)
    # what float64 and one conversion would have given
    assert (np.float64(a) * np.float64(a) + 2.0**-100).astype(F32) == F32(1 + 2**-11)


def test_fma_against_fractions() -> None:
    rng = np.random.default_rng(1)
    n = 3000
    a, b = ((rng.integers(1, 2**24, n) * 2.0 ** rng.integers(-90, -20, n)).astype(F32) for _ in range(2))
    product = a.astype(np.float64) * b
    c = np.where(rng.random(n) < 0.5, -product, product).astype(F32) * rng.choice([1, 2.0**-24, 2.0**-25, 2.0**-60], n)
    # few bits, so that ties are frequent; and results below the normal range
    a[::3], b[::3] = np.round(a[::3] * 2.0**60), F32(1.5)
    c[::5] = 2.0**-149
    got = A.fma32(a, b, c.astype(F32))
    expected = [exact_fma(*abc) for abc in zip(a, b, c.astype(F32), strict=True)]
    assert got.tolist() == np.array(expected).tolist()
    assert (np.abs(got) < 2.0**-126).sum() > 50


def test_conversions_saturate() -> None:
    x = np.array([np.nan, np.inf, -np.inf, 2147483648.0, -2147483904.0, -0.9, 2.9, 4294967296.0], F32)
    assert A.f32_to_i32(x).tolist() == [0, 2**31 - 1, -(2**31), 2**31 - 1, -(2**31), 0, 2, 2**31 - 1]
    assert A.f32_to_u32(x).tolist() == [0, 2**32 - 1, 0, 2**31, 0, 0, 2, 2**32 - 1]


def test_half_conversions() -> None:
    """65520 is half way between the greatest float16 and infinity; 2 ** -25 half way between 0 and the smallest."""
    x = np.array([65519.996, 65520.0, 2.0**-25, 2.0**-25 * 1.0001, 1 + 2**-11, 1 + 3 * 2**-11], F32)
    with np.errstate(over="ignore"):
        assert A.f32_to_f16(x).tolist() == [65504.0, math.inf, 0.0, 2.0**-24, 1.0, 1 + 2**-9]
    y = np.array([1 + 2**-8, 1 + 3 * 2**-8, -(1 + 2**-8 + 2**-20)], F32)
    assert A.bf16_to_f32(A.f32_to_bf16(y)).tolist() == [1.0, 1 + 2**-6, -(1 + 2**-7)]


def test_transcendental_functions_flush() -> None:
    """As documented: denormal arguments and results of the approximations are zero."""
    tiny = np.array([2.0**-130, -(2.0**-130)], F32)
    with np.errstate(divide="ignore"):
        assert A.rcp(tiny).tolist() == [math.inf, -math.inf]
        assert A.rsq(tiny[:1]).tolist() == [math.inf]
    assert A.exp2(np.array([-127.0, -126.0, 3.0], F32)).tolist() == [0.0, 2.0**-126, 8.0]
    assert A.log2(np.array([8.0, 0.125], F32)).tolist() == [3.0, -3.0]


def test_minimum_and_maximum() -> None:
    a, b = np.array([0.0, -0.0, np.nan, 1.0], F32), np.array([-0.0, 0.0, 2.0, np.nan], F32)
    assert [str(v) for v in A.fmax(a, b)] == ["0.0", "0.0", "2.0", "1.0"]
    assert [str(v) for v in A.fmin(a, b)] == ["-0.0", "-0.0", "2.0", "1.0"]
