"""The tensor types of ggml that a file may hold: number, name, values in a block, bytes of a block.

The numbers are those of `enum ggml_type` in ggml.h; sizes follow the block structs of ggml-common.h.
Numbers that ggml has retired (4, 5, 31 to 33, 36 to 38) are absent, so they are refused like unknown ones.
"""

from __future__ import annotations

from typing import NamedTuple


class GgmlType(NamedTuple):
    """`n` values of this type take `n / block * size` bytes; a row is a whole number of blocks."""

    id: int
    name: str
    block: int
    size: int

    def row_bytes(self, width: int) -> int:
        """Bytes of a row of `width` values; `width` must be a multiple of `block`."""
        return width // self.block * self.size


_TABLE = (
    GgmlType(0, "F32", 1, 4),
    GgmlType(1, "F16", 1, 2),
    GgmlType(2, "Q4_0", 32, 18),
    GgmlType(3, "Q4_1", 32, 20),
    GgmlType(6, "Q5_0", 32, 22),
    GgmlType(7, "Q5_1", 32, 24),
    GgmlType(8, "Q8_0", 32, 34),
    GgmlType(9, "Q8_1", 32, 36),
    GgmlType(10, "Q2_K", 256, 84),
    GgmlType(11, "Q3_K", 256, 110),
    GgmlType(12, "Q4_K", 256, 144),
    GgmlType(13, "Q5_K", 256, 176),
    GgmlType(14, "Q6_K", 256, 210),
    GgmlType(15, "Q8_K", 256, 292),
    GgmlType(16, "IQ2_XXS", 256, 66),
    GgmlType(17, "IQ2_XS", 256, 74),
    GgmlType(18, "IQ3_XXS", 256, 98),
    GgmlType(19, "IQ1_S", 256, 50),
    GgmlType(20, "IQ4_NL", 32, 18),
    GgmlType(21, "IQ3_S", 256, 110),
    GgmlType(22, "IQ2_S", 256, 82),
    GgmlType(23, "IQ4_XS", 256, 136),
    GgmlType(24, "I8", 1, 1),
    GgmlType(25, "I16", 1, 2),
    GgmlType(26, "I32", 1, 4),
    GgmlType(27, "I64", 1, 8),
    GgmlType(28, "F64", 1, 8),
    GgmlType(29, "IQ1_M", 256, 56),
    GgmlType(30, "BF16", 1, 2),
    GgmlType(34, "TQ1_0", 256, 54),
    GgmlType(35, "TQ2_0", 256, 66),
    GgmlType(39, "MXFP4", 32, 17),
    GgmlType(40, "NVFP4", 64, 36),
    GgmlType(41, "Q1_0", 128, 18),
    GgmlType(42, "Q2_0", 64, 18),
)

TYPES: dict[int, GgmlType] = {t.id: t for t in _TABLE}
TYPES_BY_NAME: dict[str, GgmlType] = {t.name: t for t in _TABLE}

F32 = TYPES_BY_NAME["F32"].id
F16 = TYPES_BY_NAME["F16"].id
BF16 = TYPES_BY_NAME["BF16"].id
Q8_0 = TYPES_BY_NAME["Q8_0"].id

FLOAT_TYPES = frozenset({F32, F16, BF16})
"""Types that can be widened to F32 without loss."""

_NOT_WEIGHTS = {"I8", "I16", "I32", "I64", "F64", "Q8_1", "Q8_K"}
WEIGHT_TYPES = frozenset(t.id for t in _TABLE if t.name not in _NOT_WEIGHTS)
"""Types that a matrix of weights may have: ggml can multiply by them and read single rows of them.

Q8_1 and Q8_K are ggml's types for activations; the integers and F64 have no matrix product.
"""


def type_name(type_id: int) -> str:
    """`Q8_0`, or `type 99` for a number that ggml does not know."""
    known = TYPES.get(type_id)
    return known.name if known else f"type {type_id}"
