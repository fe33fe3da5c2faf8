"""Float rows to any ggml type: the simple types in numpy, the others through ggml's own quantiser."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from pyluce.weights.ggml_types import TYPES_BY_NAME, GgmlType

ROOT: Final = Path(__file__).resolve().parents[2]


def find_library() -> Path | None:
    """libggml-base of this project's build, or None."""
    named = os.environ.get("LUCE_LIBRARY_DIR")
    folders = [Path(named)] if named else []
    folders += [ROOT / "pyluce/native/lib/cpu", ROOT / "build/cpu/bin", *sorted(ROOT.glob("build/*/bin"))]
    return next((found for folder in folders for found in sorted(folder.glob("libggml-base.*"))), None)


class Quantiser:
    """Converts rows. F32, F16, BF16 and Q8_0 need no library."""

    def __init__(self, library: Path | None = None) -> None:
        self._library = library
        self._function: Any = None

    def convert(self, rows: npt.NDArray[np.float32], name: str) -> npt.NDArray[np.uint8]:
        """Rows [n, width] as bytes [n, row_bytes]; width must be a multiple of the type's block."""
        kind = TYPES_BY_NAME[name]
        if rows.shape[1] % kind.block:
            raise ValueError(f"{name}: expected rows of a multiple of {kind.block} values, found {rows.shape[1]}")
        if name == "F32":
            return rows.view(np.uint8)
        if name == "F16":
            return rows.astype(np.float16).view(np.uint8)
        if name == "BF16":
            bits = rows.view(np.uint32).astype(np.uint64)
            rounded = (bits + 0x7FFF + ((bits >> np.uint64(16)) & np.uint64(1))) >> np.uint64(16)
            return np.asarray(rounded, np.uint16).view(np.uint8)
        if name == "Q8_0":
            return _q8_0(rows)
        return self._native(rows, kind)

    def _native(self, rows: npt.NDArray[np.float32], kind: GgmlType) -> npt.NDArray[np.uint8]:
        if self._function is None:
            library = self._library or find_library()
            if library is None:
                raise FileNotFoundError(f"{kind.name} needs libggml-base: run `python build.py --backend cpu` first")
            function = ctypes.CDLL(str(library)).ggml_quantize_chunk
            function.restype = ctypes.c_size_t
            integers = [ctypes.c_int64] * 3
            function.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, *integers, ctypes.c_void_p]
            self._function = function
        n, width = rows.shape
        source = np.ascontiguousarray(rows)
        out = np.empty((n, kind.row_bytes(width)), np.uint8)
        written = self._function(kind.id, source.ctypes.data, out.ctypes.data, 0, n, width, None)
        if written != out.nbytes:
            raise RuntimeError(f"ggml_quantize_chunk for {kind.name}: expected {out.nbytes} bytes, found {written}")
        return out


def _q8_0(rows: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    """Blocks of 32: an F16 scale (largest magnitude / 127) and 32 signed bytes, rounded half away from zero."""
    blocks = rows.reshape(-1, 32)
    scale = np.abs(blocks).max(axis=1, keepdims=True) / np.float32(127)
    inverse = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale > 0)
    scaled = blocks * inverse
    values = np.trunc(scaled + np.copysign(np.float32(0.5), scaled)).astype(np.int8)
    out = np.concatenate([scale.astype(np.float16).view(np.uint8), values.view(np.uint8)], axis=1)
    return out.reshape(len(rows), -1)
