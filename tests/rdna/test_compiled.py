"""Kernels from the HIP compiler with results known without it, and planted faults that must be caught."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.rdna import CodeObject, Memory, OutOfBounds, RaceError, RdnaError, run

Compiled = Callable[[str], CodeObject]


@pytest.fixture(scope="module")
def code(compiled: Compiled) -> CodeObject:
    return compiled("checks.hip")


def launch(
    code: CodeObject, name: str, inputs: list[Any], outputs: list[tuple[Any, int]], **how: Any
) -> list[np.ndarray]:
    """Run with buffers for ``inputs`` (arrays; numbers as they are) and new ones for ``outputs`` (type, count)."""
    memory = Memory()
    scalars = [x for x in inputs if not isinstance(x, np.ndarray)]
    args: list[Any] = [memory.alloc(x, f"input {k}") for k, x in enumerate(inputs) if isinstance(x, np.ndarray)]
    results = [memory.alloc(np.zeros(n, t), f"output {k}") for k, (t, n) in enumerate(outputs)]
    options = {"grid": (1, 1, 1), "block": (256, 1, 1), **how}
    run(code.kernels[name], memory, args=[*args, *results, *scalars], **options)
    return [memory.read(at, t, n) for at, (t, n) in zip(results, outputs, strict=True)]


def floats(rng: np.random.Generator, n: int) -> np.ndarray:
    """Every kind of float32: any bit pattern, and small whole numbers."""
    values = rng.integers(0, 2**32, n, dtype=np.uint64).astype(np.uint32).view(np.float32)
    values[::3] = rng.integers(-50, 50, len(values[::3]))
    values[1::7] = (rng.standard_normal(len(values[1::7])) * 2.0**-130).astype(np.float32)
    values[:8] = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, 3.4028235e38, 1.0]
    return values


def test_division_is_ieee(code: CodeObject) -> None:
    """The compiler's sequence of scale, reciprocal, six fused steps and fix-up rounds as one division does."""
    rng = np.random.default_rng(1)
    a, b = floats(rng, 4096), floats(rng, 4096)
    b[8:72] = np.tile(a[:8], 8)
    (c,) = launch(code, "divide", [a, b, 4096], [(np.float32, 4096)], grid=(16, 1, 1))
    with np.errstate(all="ignore"):
        expected = a / b
    nan = np.isnan(expected)
    assert np.array_equal(np.isnan(c), nan)
    assert np.array_equal(c.view(np.uint32)[~nan], expected.view(np.uint32)[~nan])


def test_square_root_is_ieee(code: CodeObject) -> None:
    a = np.abs(floats(np.random.default_rng(2), 2048))
    (c,) = launch(code, "square_root", [a, 2048], [(np.float32, 2048)], grid=(8, 1, 1))
    expected = np.sqrt(a)
    nan = np.isnan(expected)
    assert np.array_equal(c.view(np.uint32)[~nan], expected.view(np.uint32)[~nan]) and np.isnan(c[nan]).all()


def test_integers(code: CodeObject) -> None:
    rng = np.random.default_rng(3)
    a, b = (rng.integers(-(2**31), 2**31, 512).astype(np.int32) >> rng.integers(0, 31, 512) for _ in range(2))
    (c,) = launch(
        code, "integers", [a.astype(np.int32), b.astype(np.int32), 512], [(np.int64, 512 * 5)], grid=(2, 1, 1)
    )
    for x, y, got in zip(a.tolist(), b.tolist(), c.reshape(512, 5).tolist(), strict=True):
        ux, uy = x & 0xFFFFFFFF, y & 0xFFFFFFFF
        short = ((y | 1) & 0xFFFF ^ 0x8000) - 0x8000
        remainder = abs(x) % abs(short) * (-1 if x < 0 else 1)
        first_set = (ux & -ux).bit_length()
        counts = ux.bit_count() * 1000 + (32 - uy.bit_length()) * 100 + first_set
        assert got == [ux // uy if y else 0, x * y + (x << 20), counts, remainder if y else 0, (x * y) >> (y & 31)], (
            x,
            y,
        )


def test_halves(code: CodeObject) -> None:
    rng = np.random.default_rng(4)
    a, b = ((rng.standard_normal(512) * 10.0 ** rng.integers(-6, 3, 512)).astype(np.float16) for _ in range(2))
    c, d = launch(code, "halves", [a, b, 512], [(np.float32, 512), (np.float16, 512)], grid=(2, 1, 1))
    wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
    assert np.array_equal(c, (wide_a * wide_b + 0.5).astype(np.float32))
    with np.errstate(over="ignore"):
        assert np.array_equal(d, (wide_a * wide_b + wide_a).astype(np.float16))


def test_barriers_and_lds(code: CodeObject) -> None:
    a = np.arange(1024, dtype=np.float32)
    (c,) = launch(code, "sum_right", [a], [(np.float32, 4)], grid=(4, 1, 1))
    assert c.tolist() == a.reshape(4, 256).sum(axis=1).tolist()


def test_a_missing_barrier_is_a_race(code: CodeObject) -> None:
    """The report has both instructions, a load and a store of LDS."""
    with pytest.raises(RaceError, match=r"LDS \+ \d+, waves \d+ and \d+(.|\n)*ds_(load|store)(.|\n)*ds_(load|store)"):
        launch(code, "sum_racing", [np.ones(256, np.float32)], [(np.float32, 1)])


def test_a_race_in_global_memory(code: CodeObject) -> None:
    def go(barrier: int) -> np.ndarray:
        (a,) = launch(code, "neighbours", [barrier], [(np.int32, 256)])
        return a

    assert np.array_equal(go(1), np.arange(256) ^ 32)
    with pytest.raises(RaceError, match="global_"):
        go(0)


def test_a_read_past_the_buffer(code: CodeObject) -> None:
    """The message has the instruction, and which buffer ends where."""
    a = np.ones(64, np.float32)
    launch(code, "reads_past_the_end", [a, 63], [(np.float32, 64)], block=(64, 1, 1))
    with pytest.raises(OutOfBounds, match="global_load_b32.*nearest is input 0 .*4 bytes behind"):
        launch(code, "reads_past_the_end", [a, 64], [(np.float32, 64)], block=(64, 1, 1))


def test_atomics(code: CodeObject) -> None:
    values = np.random.default_rng(5).integers(0, 1000, 1000).astype(np.int32)
    counts, total = launch(code, "histogram", [values, 1000], [(np.int32, 16), (np.float32, 1)], grid=(3, 1, 1))
    assert np.array_equal(counts, 3 * np.bincount(values & 15, minlength=16))
    assert total[0] == 3000


def test_lanes_leave_a_loop_at_different_times(code: CodeObject) -> None:
    def steps(x: int) -> int:
        return 0 if x == 1 else 1 + steps(3 * x + 1 if x % 2 else x // 2)

    (c,) = launch(code, "collatz", [300], [(np.int32, 320)], grid=(5, 1, 1), block=(64, 1, 1))
    assert c.tolist() == [steps(i + 1) for i in range(300)] + [0] * 20


def test_scratch(code: CodeObject) -> None:
    order = np.random.default_rng(6).permutation(24).astype(np.int32)
    (c,) = launch(code, "scratch", [order], [(np.int32, 64 * 24)], block=(64, 1, 1))
    position = np.argsort(order)
    expected = [[position[(k + t) % 24] * 100 + t for k in range(24)] for t in range(64)]
    assert np.array_equal(c.reshape(64, 24), expected)


def test_lanes(code: CodeObject) -> None:
    a = np.random.default_rng(7).integers(0, 10**6, 64).astype(np.int32)
    (c,) = launch(code, "lanes", [a], [(np.int32, 8 * 64)], block=(64, 1, 1))
    t = np.arange(64)
    wave, lane = t & 32, t & 31
    assert np.array_equal(c[0:64], a[t ^ 5])
    assert np.array_equal(c[64:128], np.where(lane >= 3, a[np.maximum(t - 3, 0)], a))
    assert np.array_equal(c[128:192], a[wave | (lane * 7 & 31)])
    assert np.array_equal(c[192:256], np.repeat((a.reshape(2, 32) & 1).sum(axis=1), 32))
    assert np.array_equal(c[256:320], a[wave])
    assert np.array_equal(c[320:384], np.where(t % 16 > 0, a[t - 1], 0))
    assert np.array_equal(c[384:448], a[t ^ 7])
    assert np.array_equal(c[448:512], a[t ^ 1])


def test_matrix_layout(code: CodeObject) -> None:
    """The target's layout gives the product, the other target's does not."""
    rng = np.random.default_rng(8)
    a, b = (rng.integers(-8, 8, (16, 16)).astype(np.float16) for _ in range(2))
    product = a.astype(np.float32) @ b.astype(np.float32)
    (right,) = launch(code, "multiply_right", [a, b], [(np.float32, 256)], block=(32, 1, 1))
    (wrong,) = launch(code, "multiply_wrong", [a, b], [(np.float32, 256)], block=(32, 1, 1))
    assert np.array_equal(right.reshape(16, 16), product)
    assert not np.array_equal(wrong.reshape(16, 16), product)


def test_half_a_fragment_is_refused(code: CodeObject) -> None:
    if code.arch != "rdna3":
        pytest.skip("only RDNA3 has the fragments twice")
    with pytest.raises(RdnaError, match="hold different fragments"):
        launch(code, "half_fragment", [np.ones((16, 16), np.float16)], [(np.float32, 32)], block=(32, 1, 1))


def test_wrong_arguments(code: CodeObject) -> None:
    memory = Memory()
    with pytest.raises(RdnaError, match="expected 4 arguments, found 1"):
        run(code.kernels["divide"], memory, (1, 1, 1), (32, 1, 1), [0])
    with pytest.raises(RdnaError, match="argument 3: expected 4 bytes, found 8"):
        run(code.kernels["divide"], memory, (1, 1, 1), (32, 1, 1), [0, 0, 0, np.int64(1)])
    with pytest.raises(RdnaError, match="blocks of 1 to 1024 threads"):
        run(code.kernels["divide"], memory, (1, 1, 1), (2048, 1, 1), [0, 0, 0, 1])
