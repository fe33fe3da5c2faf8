"""Matrix products of row and chunk graphs by weight type: values against float64, and rows that do not see each other.

A row graph's kernels take a row as if it were alone, a chunk graph's take units of 16 rows; either way a row's values must be
the same bits whatever stands beside it and wherever it stands.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import numpy as np

from pyluce.native import luce
from pyluce.native.ggml import GGMLType, ggml_mul_mat, ggml_mul_mat_id, ggml_view_2d, ggml_view_3d
from pyluce.native.luce import Phase
from pyluce.selftest.bench import Array, OpBench, Weight

REQUIRED_TYPES: Final = ("F32", "F16", "BF16", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ3_S", "Q2_0")
"""What files of this model are made of; a device must multiply by all of them."""
OTHER_TYPES: Final = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "IQ4_XS", "IQ3_XXS")
"""What a file may hold besides; a device may refuse them."""

REPACKED_TYPES: Final = ("Q8_0", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL")
"""What a CPU may lay out anew, if it multiplies faster then."""

ROW_COUNTS: Final = (1, 2, 3, 4, 5, 8, 13, 16)
CHUNK_COUNTS: Final = (16, 48, 128, 512)

# Largest error over largest value. F32 products in F32: only the order of sums shows (on the CPU; a GPU's chunk kernels may
# round both operands to bf16). The CPU rounds activations to the weight's own type, 2^-11 for F16 and 2^-8 for BF16, or to
# blocks of 8 bits, half a step of which is 1/254 of the block's largest value; a GPU to 8 bits (rows) or to f16 or bf16
# (chunks): 2^-9 relative at worst for each operand. Errors of the terms have random signs, so their sum over the sum of the
# terms is about as large as one term's. 2e-2 is some four times that, and far below what a wrong term of a block does.
_EXACT: Final = {"F32": 1e-5, "F16": 3e-3, "BF16": 1e-2}
ROUNDED: Final = 2e-2


def bound(type_name: str, phase: Phase, on_gpu: bool) -> float:
    """The largest error over the largest value that is fine."""
    if on_gpu and phase is Phase.CHUNK:
        return ROUNDED
    if on_gpu and type_name == "F32":
        return 1e-4
    return _EXACT.get(type_name, ROUNDED)


@dataclass(frozen=True, slots=True)
class Shape:
    """`n_in` values in, `n_out` out. `n_expert` 0: a plain product; else `n_used` of the experts, `shared_input` or one each."""

    n_in: int
    n_out: int
    n_expert: int = 0
    n_used: int = 0
    shared_input: bool = True

    def __str__(self) -> str:
        if not self.n_expert:
            return f"{self.n_in}x{self.n_out}"
        return f"{self.n_in}x{self.n_out}x{self.n_expert} top {self.n_used}{'' if self.shared_input else ', an input each'}"


@lru_cache(maxsize=2)
def random_weight(type_name: str, shape: Shape, seed: int) -> Weight:
    """A weight of this type and shape: both phases multiply by the same, and quantising takes longer than multiplying."""
    rng = np.random.default_rng([seed, shape.n_in, shape.n_out, shape.n_expert])
    experts = (shape.n_expert,) if shape.n_expert else ()
    values = rng.standard_normal((*experts, shape.n_out, shape.n_in), np.float32) / np.float32(np.sqrt(shape.n_in))
    return Weight.of(GGMLType[type_name], values)


class Product:
    """One weight and `n_rows` rows of inputs on a device; parts of the rows are multiplied in graphs of their own."""

    def __init__(
        self,
        type_name: str,
        shape: Shape,
        phase: Phase,
        n_rows: int,
        device: str,
        seed: int = 0,
        n_threads: int = 1,
        weight_type: int | None = None,
    ) -> None:
        """`weight_type`: the buffer type where the weight lies, if not the device's own."""
        rng = np.random.default_rng([seed, shape.n_in, shape.n_out, shape.n_expert, n_rows])
        self.shape, self.phase = shape, phase
        self.weight = random_weight(type_name, shape, seed)
        self.inputs = 1 if shape.shared_input or not shape.n_expert else shape.n_used
        self.x = rng.standard_normal((n_rows, self.inputs, shape.n_in), np.float32)
        arrays: dict[str, Array | Weight] = {"weight": self.weight, "x": self.x}
        if shape.n_expert:
            order = rng.random((n_rows, shape.n_expert)).argsort(1)
            order[: n_rows // 4, 0] = 0  # an expert that many rows take; the others get few or none
            order[: n_rows // 4, 1:] = np.where(
                order[: n_rows // 4, 1:] == 0, shape.n_expert - 1, order[: n_rows // 4, 1:]
            )
            self.ids = np.ascontiguousarray(order[:, : shape.n_used], np.int32)
            arrays["ids"] = self.ids
        self.bench = OpBench(arrays, n_threads, device, weight_type)

    def rows(self, first: int, count: int) -> Array:
        """The product of `count` rows from `first` on, in a graph of their own: [count, n_out] or [count, n_used, n_out]."""

        def build(ctx: int, t: dict[str, int]) -> int:
            n_in, inputs = self.shape.n_in, self.inputs
            if not self.shape.n_expert:
                x = ggml_view_2d(ctx, t["x"], n_in, count, n_in * 4, first * n_in * 4)
                node = ggml_mul_mat(ctx, t["weight"], x)
            else:
                row = inputs * n_in * 4
                x = ggml_view_3d(ctx, t["x"], n_in, inputs, count, n_in * 4, row, first * row)
                used = self.shape.n_used
                ids = ggml_view_2d(ctx, t["ids"], used, count, used * 4, first * used * 4)
                node = ggml_mul_mat_id(ctx, t["weight"], x, ids)
            luce.ggml_luce_set_phase(node, self.phase)
            return node

        out = self.bench.run(build)
        return np.asarray(out[0] if self.shape.n_expert else out[0, 0])

    def expected(self) -> Array:
        """All rows in float64, from the weights as they are stored."""
        weight, x = self.weight.values, self.x.astype(np.float64)
        if not self.shape.n_expert:
            return np.asarray(x[:, 0] @ weight.T.astype(np.float64))
        out: Any = np.empty((len(x), self.shape.n_used, self.shape.n_out))
        for expert in range(self.shape.n_expert):
            row, place = np.nonzero(self.ids == expert)
            out[row, place] = x[row, place if self.inputs > 1 else 0] @ weight[expert].T.astype(np.float64)
        return np.asarray(out)

    def close(self) -> None:
        """Free the bench."""
        self.bench.close()

    def __enter__(self) -> Product:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def relative_error(found: Array, expected: Array) -> float:
    """Largest difference over largest expected value; infinite where a value is not finite."""
    if not np.isfinite(found).all():
        return float("inf")
    return float(np.abs(found - expected).max() / max(float(np.abs(expected).max()), 1e-30))


def rows_that_differ(product: Product, whole: Array, counts: tuple[int, ...]) -> list[str]:
    """Parts of the rows whose product is not, bit for bit, what the whole graph gave: empty when rows do not see each other."""
    n_rows, found = len(product.x), []
    for count in counts:
        for first in sorted({0, min(5, n_rows - count), n_rows - count}):
            if product.rows(first, count).tobytes() != whole[first : first + count].tobytes():
                found.append(f"rows {first} to {first + count - 1} alone")
    return found
