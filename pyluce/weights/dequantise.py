"""Rows of any ggml type to float32, by ggml's own function where the native library is loaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from pyluce.native.errors import NativeError
from pyluce.native.ggml import ggml_get_type_traits
from pyluce.native.structs import CONVERT_ROWS, ggml_type_traits
from pyluce.weights.errors import ModelError
from pyluce.weights.ggml_types import BF16, F16, F32, Q8_0, TYPES, type_name

Floats: TypeAlias = npt.NDArray[np.float32]
ToFloat: TypeAlias = Callable[[npt.NDArray[np.uint8], int], Floats]
"""(rows as bytes [n, row_bytes], width) -> float32 [n, width]"""


def row_decoder(type_id: int) -> ToFloat:
    """The conversion for `type_id`: ggml's own, else numpy for the simple types, else the `gguf` package's.

    `ModelError` if none of them knows the type. All of them compute the same values.
    """
    simple = {F32: _from_f32, F16: _from_f16, BF16: _from_bf16}.get(type_id)
    if simple is not None:
        return simple
    native = _native_decoder(type_id)
    if native is not None:
        return native
    if type_id == Q8_0:
        return _from_q8_0
    return _package_decoder(type_id)


def _from_f32(raw: npt.NDArray[np.uint8], width: int) -> Floats:
    return raw.view("<f4").astype(np.float32, copy=False)


def _from_f16(raw: npt.NDArray[np.uint8], width: int) -> Floats:
    return raw.view("<f2").astype(np.float32)


def _from_bf16(raw: npt.NDArray[np.uint8], width: int) -> Floats:
    bits = raw.view("<u2").astype(np.uint32) << np.uint32(16)
    return np.asarray(bits).view(np.float32)


def _from_q8_0(raw: npt.NDArray[np.uint8], width: int) -> Floats:
    blocks = raw.reshape(-1, 34)
    scale = np.ascontiguousarray(blocks[:, :2]).view("<f2").astype(np.float32)
    return (blocks[:, 2:].view(np.int8).astype(np.float32) * scale).reshape(len(raw), width)


def _native_decoder(type_id: int) -> ToFloat | None:
    """ggml's `to_float` of the type, or None while the native libraries are not loaded."""
    try:
        address = ggml_get_type_traits(type_id)
    except NativeError:
        return None
    pointer = ggml_type_traits.from_address(address).to_float
    if not pointer:
        return None
    convert = CONVERT_ROWS(pointer)

    def decode(raw: npt.NDArray[np.uint8], width: int) -> Floats:
        contiguous = np.ascontiguousarray(raw)
        out = np.empty((len(raw), width), np.float32)
        if out.size:
            convert(contiguous.ctypes.data, out.ctypes.data, out.size)
        return out

    return decode


def _package_decoder(type_id: int) -> ToFloat:
    hint = "build the native library (python build.py --backend cpu) or install the package gguf"
    try:
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize
    except ImportError:
        raise ModelError(
            f"rows of type {type_name(type_id)} cannot be read without the native library: {hint}"
        ) from None

    def decode(raw: npt.NDArray[np.uint8], width: int) -> Floats:
        if not len(raw):
            return np.empty((0, width), np.float32)
        return np.asarray(dequantize(raw, GGMLQuantizationType(type_id)), np.float32)

    try:
        decode(np.zeros((1, TYPES[type_id].size), np.uint8), TYPES[type_id].block)
    except (NotImplementedError, ValueError):
        raise ModelError(
            f"rows of type {type_name(type_id)} cannot be read without the native library: {hint}"
        ) from None
    return decode
