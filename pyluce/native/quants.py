"""Converting rows between float32 and the quantized types, with ggml's own routines."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pyluce.native import ggml
from pyluce.native.library import load_libraries
from pyluce.native.structs import CONVERT_ROWS, GGMLType, ggml_type_traits


@functools.cache
def to_float(type: int) -> Callable[[int, int, int], None]:
    """The C function (source address, float32 destination address, number of elements) of a type.

    Raises ValueError for a type without one (F32, integers).
    """
    load_libraries()
    traits = ggml_type_traits.from_address(ggml.ggml_get_type_traits(GGMLType(type)))
    if not traits.to_float:
        raise ValueError(f"expected a type that ggml converts to float32, found {GGMLType(type).name}")
    converted: Callable[[int, int, int], None] = CONVERT_ROWS(traits.to_float)
    return converted


def row_bytes(type: int, n_per_row: int) -> int:
    """Bytes of one row. Raises ValueError when ``n_per_row`` is no multiple of the type's block."""
    load_libraries()
    block = ggml.ggml_blck_size(GGMLType(type))
    if n_per_row <= 0 or n_per_row % block:
        raise ValueError(f"expected a multiple of {block} elements in a {GGMLType(type).name} row, found {n_per_row}")
    return ggml.ggml_row_size(type, n_per_row)


def dequantize(type: int, raw: NDArray[np.uint8], n_per_row: int) -> NDArray[np.float32]:
    """Rows of ``type`` as float32: raw bytes, numpy shape [..., row_bytes] -> [..., n_per_row]."""
    size = row_bytes(type, n_per_row)
    if raw.dtype != np.uint8 or raw.ndim < 1 or raw.shape[-1] != size:
        raise ValueError(f"expected uint8 rows of {size} bytes, found {raw.dtype}, numpy shape {raw.shape}")
    source = np.ascontiguousarray(raw)
    if type == GGMLType.F32:
        return np.array(source.view(np.float32), dtype=np.float32)
    target = np.empty((*raw.shape[:-1], n_per_row), dtype=np.float32)
    if target.size:
        to_float(type)(source.ctypes.data, target.ctypes.data, target.size)
    return target


def quantize(type: int, values: NDArray[Any]) -> NDArray[np.uint8]:
    """float32 rows, numpy shape [..., n_per_row], as raw rows of ``type``: [..., row_bytes].

    Raises ValueError for types that need an importance matrix.
    """
    n_per_row = values.shape[-1]
    size = row_bytes(type, n_per_row)
    if ggml.ggml_quantize_requires_imatrix(type):
        raise ValueError(f"expected a type that needs no importance matrix, found {GGMLType(type).name}")
    source = np.ascontiguousarray(values, dtype=np.float32)
    target = np.empty((*values.shape[:-1], size), dtype=np.uint8)
    n_rows = source.size // n_per_row
    if n_rows:
        written = ggml.ggml_quantize_chunk(type, source.ctypes.data, target.ctypes.data, 0, n_rows, n_per_row, None)
        if written != target.nbytes:
            raise ValueError(f"expected {target.nbytes} bytes from ggml_quantize_chunk, found {written}")
    return target
