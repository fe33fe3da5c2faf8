"""Reading a GGUF file's header through ggml: metadata and tensor infos, no tensor data.

This is ggml's own reader, for tools and as a cross-check; ``pyluce.weights`` reads and validates models itself.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pyluce.native import gguf
from pyluce.native.gguf import GGUFType
from pyluce.native.library import load_libraries
from pyluce.native.owner import Owner
from pyluce.native.structs import GGML_MAX_DIMS

_SCALARS: dict[int, tuple[Callable[[int, int], Any], Any]] = {
    GGUFType.UINT8: (gguf.gguf_get_val_u8, ctypes.c_uint8),
    GGUFType.INT8: (gguf.gguf_get_val_i8, ctypes.c_int8),
    GGUFType.UINT16: (gguf.gguf_get_val_u16, ctypes.c_uint16),
    GGUFType.INT16: (gguf.gguf_get_val_i16, ctypes.c_int16),
    GGUFType.UINT32: (gguf.gguf_get_val_u32, ctypes.c_uint32),
    GGUFType.INT32: (gguf.gguf_get_val_i32, ctypes.c_int32),
    GGUFType.FLOAT32: (gguf.gguf_get_val_f32, ctypes.c_float),
    GGUFType.BOOL: (gguf.gguf_get_val_bool, ctypes.c_bool),
    GGUFType.UINT64: (gguf.gguf_get_val_u64, ctypes.c_uint64),
    GGUFType.INT64: (gguf.gguf_get_val_i64, ctypes.c_int64),
    GGUFType.FLOAT64: (gguf.gguf_get_val_f64, ctypes.c_double),
}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor of the file: ggml type id, ne (4 axes, fastest first), bytes, offset from the data section's start."""

    name: str
    type: int
    ne: tuple[int, ...]
    n_bytes: int
    offset: int


class GgufFile(Owner):
    """An open GGUF header. Raises FileNotFoundError, or NativeError with the log tail for a file ggml cannot read."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__()
        load_libraries()
        self.path = os.fspath(path)
        if not os.path.isfile(self.path):
            raise FileNotFoundError(f"expected a GGUF file, found nothing at {self.path}")
        params = gguf.gguf_init_params(True, None)
        pointer = gguf.gguf_init_from_file(os.fsencode(self.path), params)
        failure = f"expected a GGUF file, ggml cannot read {self.path}"
        self._own("gguf_init_from_file", pointer, gguf.gguf_free, failure=failure)

    @property
    def version(self) -> int:
        """The format version."""
        return gguf.gguf_get_version(self.ptr)

    @property
    def alignment(self) -> int:
        """Alignment of the tensors' offsets in bytes."""
        return gguf.gguf_get_alignment(self.ptr)

    @property
    def data_offset(self) -> int:
        """Where the data section starts in the file, in bytes."""
        return gguf.gguf_get_data_offset(self.ptr)

    def keys(self) -> list[str]:
        """The metadata keys in file order."""
        ctx = self.ptr
        return [gguf.gguf_get_key(ctx, i).decode("utf-8", "replace") for i in range(gguf.gguf_get_n_kv(ctx))]

    def get(self, key: str, default: Any = None) -> Any:
        """A metadata value: int, float, bool, str or a list of those; ``default`` when the key is absent.

        Strings that are not UTF-8 come back with surrogate escapes.
        """
        ctx = self.ptr
        key_id = gguf.gguf_find_key(ctx, key.encode())
        return default if key_id < 0 else _value(ctx, key_id)

    def metadata(self) -> dict[str, Any]:
        """Every metadata value by key."""
        ctx = self.ptr
        return {key: _value(ctx, index) for index, key in enumerate(self.keys())}

    def tensors(self) -> list[GgufTensor]:
        """The tensor infos in file order."""
        ctx = self.ptr
        return [_tensor(ctx, i) for i in range(gguf.gguf_get_n_tensors(ctx))]


def _value(ctx: int, key_id: int) -> Any:
    kind = gguf.gguf_get_kv_type(ctx, key_id)
    if kind == GGUFType.STRING:
        return gguf.gguf_get_val_str(ctx, key_id).decode("utf-8", "surrogateescape")
    if kind != GGUFType.ARRAY:
        read, _ = _SCALARS[kind]
        return read(ctx, key_id)
    length = gguf.gguf_get_arr_n(ctx, key_id)
    element = gguf.gguf_get_arr_type(ctx, key_id)
    if element == GGUFType.STRING:
        return [gguf.gguf_get_arr_str(ctx, key_id, i).decode("utf-8", "surrogateescape") for i in range(length)]
    address = gguf.gguf_get_arr_data(ctx, key_id)
    if not address or not length:
        return []
    _, ctype = _SCALARS[element]
    return list((ctype * length).from_address(address))


def _tensor(ctx: int, index: int) -> GgufTensor:
    ne = (ctypes.c_int64 * GGML_MAX_DIMS).from_address(gguf.gguf_get_tensor_ne(ctx, index))
    return GgufTensor(
        name=gguf.gguf_get_tensor_name(ctx, index).decode("utf-8", "surrogateescape"),
        type=gguf.gguf_get_tensor_type(ctx, index),
        ne=tuple(ne),
        n_bytes=gguf.gguf_get_tensor_size(ctx, index),
        offset=gguf.gguf_get_tensor_offset(ctx, index),
    )
