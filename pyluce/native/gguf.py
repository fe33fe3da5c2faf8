# mypy: disable-error-code="empty-body"
"""Declarations of gguf.h: the read side."""

from __future__ import annotations

import ctypes
from ctypes import c_bool, c_void_p
from enum import IntEnum
from typing import ClassVar

from pyluce.native.declare import (
    F32,
    F64,
    I8,
    I16,
    I32,
    I64,
    U8,
    U16,
    U32,
    U64,
    Bool,
    Int,
    OptPtr,
    OptStr,
    Ptr,
    Size,
    Str,
    function,
)

BASE = "ggml-base"


class GGUFType(IntEnum):
    """enum gguf_type"""

    UINT8 = 0
    INT8 = 1
    UINT16 = 2
    INT16 = 3
    UINT32 = 4
    INT32 = 5
    FLOAT32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    UINT64 = 10
    INT64 = 11
    FLOAT64 = 12


class gguf_init_params(ctypes.Structure):
    _fields_: ClassVar = [("no_alloc", c_bool), ("ctx", c_void_p)]


@function(BASE)
def gguf_init_from_file(fname: Str, params: gguf_init_params) -> OptPtr: ...
@function(BASE)
def gguf_free(ctx: OptPtr) -> None: ...
@function(BASE)
def gguf_type_name(type: Int) -> OptStr: ...
@function(BASE)
def gguf_get_version(ctx: Ptr) -> U32: ...
@function(BASE)
def gguf_get_alignment(ctx: Ptr) -> Size: ...
@function(BASE)
def gguf_get_data_offset(ctx: Ptr) -> Size: ...
@function(BASE)
def gguf_get_n_kv(ctx: Ptr) -> I64: ...
@function(BASE)
def gguf_find_key(ctx: Ptr, key: Str) -> I64: ...
@function(BASE)
def gguf_get_key(ctx: Ptr, key_id: I64) -> Str: ...
@function(BASE)
def gguf_get_kv_type(ctx: Ptr, key_id: I64) -> Int: ...
@function(BASE)
def gguf_get_arr_type(ctx: Ptr, key_id: I64) -> Int: ...
@function(BASE)
def gguf_get_val_u8(ctx: Ptr, key_id: I64) -> U8: ...
@function(BASE)
def gguf_get_val_i8(ctx: Ptr, key_id: I64) -> I8: ...
@function(BASE)
def gguf_get_val_u16(ctx: Ptr, key_id: I64) -> U16: ...
@function(BASE)
def gguf_get_val_i16(ctx: Ptr, key_id: I64) -> I16: ...
@function(BASE)
def gguf_get_val_u32(ctx: Ptr, key_id: I64) -> U32: ...
@function(BASE)
def gguf_get_val_i32(ctx: Ptr, key_id: I64) -> I32: ...
@function(BASE)
def gguf_get_val_f32(ctx: Ptr, key_id: I64) -> F32: ...
@function(BASE)
def gguf_get_val_u64(ctx: Ptr, key_id: I64) -> U64: ...
@function(BASE)
def gguf_get_val_i64(ctx: Ptr, key_id: I64) -> I64: ...
@function(BASE)
def gguf_get_val_f64(ctx: Ptr, key_id: I64) -> F64: ...
@function(BASE)
def gguf_get_val_bool(ctx: Ptr, key_id: I64) -> Bool: ...
@function(BASE)
def gguf_get_val_str(ctx: Ptr, key_id: I64) -> Str: ...
@function(BASE)
def gguf_get_arr_n(ctx: Ptr, key_id: I64) -> Size: ...
@function(BASE)
def gguf_get_arr_data(ctx: Ptr, key_id: I64) -> OptPtr: ...
@function(BASE)
def gguf_get_arr_str(ctx: Ptr, key_id: I64, i: Size) -> Str: ...
@function(BASE)
def gguf_get_n_tensors(ctx: Ptr) -> I64: ...
@function(BASE)
def gguf_find_tensor(ctx: Ptr, name: Str) -> I64: ...
@function(BASE)
def gguf_get_tensor_name(ctx: Ptr, tensor_id: I64) -> Str: ...
@function(BASE)
def gguf_get_tensor_ne(ctx: Ptr, tensor_id: I64) -> Ptr: ...
@function(BASE)
def gguf_get_tensor_type(ctx: Ptr, tensor_id: I64) -> Int: ...
@function(BASE)
def gguf_get_tensor_offset(ctx: Ptr, tensor_id: I64) -> Size: ...
@function(BASE)
def gguf_get_tensor_size(ctx: Ptr, tensor_id: I64) -> Size: ...
