"""Products in row and chunk graphs, every weight type: float64 within a bound, and each row the same bits in any company."""

from __future__ import annotations

import numpy as np
import pytest

from pyluce.native.errors import UnsupportedOpError
from pyluce.native.luce import Phase
from pyluce.selftest.products import (
    CHUNK_COUNTS,
    OTHER_TYPES,
    REQUIRED_TYPES,
    ROW_COUNTS,
    Product,
    Shape,
    bound,
    relative_error,
    rows_that_differ,
)
from pyluce.weights.ggml_types import TYPES_BY_NAME
from tests.support.device import DEVICE, ON_GPU, load

COUNTS = {Phase.ROW: ROW_COUNTS, Phase.CHUNK: CHUNK_COUNTS}
PLAIN = (Shape(512, 96), Shape(768, 33))
EXPERTS = (Shape(512, 64, 8, 3), Shape(256, 48, 8, 3, shared_input=False))
REAL = (Shape(2560, 640), Shape(2560, 16, 512, 10), Shape(640, 256, 64, 10, shared_input=False))
"""The model's own widths; 640 is no multiple of a K-quant's 256."""


@pytest.fixture(autouse=True)
def _libraries() -> None:
    load()


def check(type_name: str, shape: Shape, phase: Phase, counts: tuple[int, ...] | None = None, seed: int = 0) -> None:
    counts = counts or COUNTS[phase]
    with Product(type_name, shape, phase, max(counts), DEVICE, seed) as product:
        whole = product.rows(0, max(counts))
        error = relative_error(whole, product.expected())
        assert error <= bound(type_name, phase, ON_GPU), f"{shape}: {error:.2e}"
        assert rows_that_differ(product, whole, counts) == [], str(shape)


@pytest.mark.parametrize("phase", [Phase.ROW, Phase.CHUNK], ids=lambda p: p.name)
@pytest.mark.parametrize("shape", [*PLAIN, *EXPERTS], ids=str)
@pytest.mark.parametrize("type_name", REQUIRED_TYPES)
def test_products(type_name: str, shape: Shape, phase: Phase) -> None:
    check(type_name, shape, phase)


@pytest.mark.parametrize("phase", [Phase.ROW, Phase.CHUNK], ids=lambda p: p.name)
@pytest.mark.parametrize("type_name", OTHER_TYPES)
def test_other_types_are_right_or_refused(type_name: str, phase: Phase) -> None:
    try:
        check(type_name, PLAIN[0], phase)
        check(type_name, EXPERTS[0], phase)
    except UnsupportedOpError as error:
        assert ON_GPU, "the CPU multiplies by every type"
        pytest.skip(str(error).splitlines()[0])


@pytest.mark.skipif(not ON_GPU, reason="large; the CPU's kernels see the same code in the small shapes")
@pytest.mark.parametrize("phase", [Phase.ROW, Phase.CHUNK], ids=lambda p: p.name)
@pytest.mark.parametrize("shape", REAL, ids=str)
@pytest.mark.parametrize("type_name", ["Q8_0", "IQ4_NL", "Q4_K"])
def test_the_widths_of_the_model(type_name: str, shape: Shape, phase: Phase) -> None:
    if shape.n_in % TYPES_BY_NAME[type_name].block:
        pytest.skip(f"{type_name} has no rows of {shape.n_in} values")
    check(type_name, shape, phase)


@pytest.mark.parametrize("phase", [Phase.ROW, Phase.CHUNK], ids=lambda p: p.name)
@pytest.mark.parametrize("type_name", REQUIRED_TYPES)
def test_random_shapes(type_name: str, phase: Phase) -> None:
    rng = np.random.default_rng(TYPES_BY_NAME[type_name].id)
    unit = max(32, TYPES_BY_NAME[type_name].block)
    for seed in range(4):
        n_in, n_out = unit * int(rng.integers(1, 1 + 1024 // unit)), int(rng.integers(1, 150))
        n_expert = int(rng.integers(2, 20)) if seed % 2 else 0
        shape = Shape(
            n_in, n_out, n_expert, int(rng.integers(1, min(6, n_expert) + 1)) if n_expert else 0, bool(rng.integers(2))
        )
        counts = (16, 32, 80) if phase is Phase.CHUNK else tuple(int(n) for n in rng.integers(1, 17, 3))
        check(type_name, shape, phase, counts, seed)


def test_control_upstreams_choice_by_the_number_of_rows_shows() -> None:
    """The comparison of bits sees a kernel that looks at the number of rows."""
    with Product("F32", Shape(512, 96), Phase.UPSTREAM, 16, DEVICE) as product:
        assert rows_that_differ(product, product.rows(0, 16), ROW_COUNTS)


@pytest.mark.skipif(ON_GPU, reason="the CPU's tiles of a row graph")
@pytest.mark.parametrize("shape", [Shape(32, 1024), Shape(64, 7), Shape(1024, 37), Shape(96, 3)], ids=str)
def test_tiles_of_rows_have_the_bits_of_upstreams_single_row(shape: Shape) -> None:
    """Upstream multiplies one row by its dot product; the tiles of a row graph do the same operations for several at once."""

    def product(phase: Phase, first: int, count: int) -> np.ndarray:
        with Product("Q8_0", shape, phase, 13, DEVICE) as made:
            return made.rows(first, count)

    expected = np.concatenate([product(Phase.UPSTREAM, i, 1) for i in range(13)])
    for count in (1, 2, 3, 4, 5, 8, 13):
        assert product(Phase.ROW, 0, count).tobytes() == expected[:count].tobytes(), count
