"""Enums and structs of llama.h, field for field (tests/native compares them with the header)."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_bool, c_float, c_int, c_int8, c_int32, c_int64, c_size_t, c_uint32, c_void_p
from enum import IntEnum, IntFlag
from typing import Any, ClassVar

LLAMA_DEFAULT_SEED = 0xFFFFFFFF
LLAMA_TOKEN_NULL = -1


class VocabType(IntEnum):
    """enum llama_vocab_type"""

    NONE = 0
    SPM = 1
    BPE = 2
    WPM = 3
    UGM = 4
    RWKV = 5
    PLAMO2 = 6
    TEST = 7
    PLAMO3 = 8


class TokenAttr(IntFlag):
    """enum llama_token_attr"""

    UNDEFINED = 0
    UNKNOWN = 1 << 0
    UNUSED = 1 << 1
    NORMAL = 1 << 2
    CONTROL = 1 << 3
    USER_DEFINED = 1 << 4
    BYTE = 1 << 5
    NORMALIZED = 1 << 6
    LSTRIP = 1 << 7
    RSTRIP = 1 << 8
    SINGLE_WORD = 1 << 9


class FlashAttnType(IntEnum):
    """enum llama_flash_attn_type"""

    AUTO = -1
    DISABLED = 0
    ENABLED = 1


class LoadMode(IntEnum):
    """enum llama_load_mode"""

    AUTO = -1
    NONE = 0
    MMAP = 1
    MLOCK = 2
    MMAP_MLOCK = 3
    DIRECT_IO = 4


class LazyMode(IntEnum):
    """enum llama_lazy_mode"""

    OFF = 0
    AUTO = 1
    ON = 2


class llama_token_data(ctypes.Structure):
    id: int
    logit: float
    p: float
    _fields_: ClassVar = [("id", c_int32), ("logit", c_float), ("p", c_float)]


class llama_token_data_array(ctypes.Structure):
    data: Any
    size: int
    selected: int
    sorted: bool
    _fields_: ClassVar = [
        ("data", POINTER(llama_token_data)),
        ("size", c_size_t),
        ("selected", c_int64),
        ("sorted", c_bool),
    ]


class llama_batch(ctypes.Structure):
    n_tokens: int
    token: Any
    pos: Any
    n_seq_id: Any
    seq_id: Any
    logits: Any
    _fields_: ClassVar = [
        ("n_tokens", c_int32),
        ("token", POINTER(c_int32)),
        ("embd", POINTER(c_float)),
        ("pos", POINTER(c_int32)),
        ("n_seq_id", POINTER(c_int32)),
        ("seq_id", POINTER(POINTER(c_int32))),
        ("logits", POINTER(c_int8)),
    ]


class llama_model_params(ctypes.Structure):
    _fields_: ClassVar = [
        ("devices", c_void_p),
        ("tensor_buft_overrides", c_void_p),
        ("n_gpu_layers", c_int32),
        ("split_mode", c_int),
        ("load_mode", c_int),
        ("lazy_mode", c_int),
        ("main_gpu", c_int32),
        ("tensor_split", c_void_p),
        ("progress_callback", c_void_p),
        ("progress_callback_user_data", c_void_p),
        ("kv_overrides", c_void_p),
        ("vocab_only", c_bool),
        ("check_tensors", c_bool),
        ("use_extra_bufts", c_bool),
        ("no_host", c_bool),
        ("no_alloc", c_bool),
        ("load_mtp", c_bool),
    ]


class llama_context_params(ctypes.Structure):
    _fields_: ClassVar = [
        ("n_ctx", c_uint32),
        ("n_batch", c_uint32),
        ("n_ubatch", c_uint32),
        ("n_seq_max", c_uint32),
        ("n_rs_seq", c_uint32),
        ("n_outputs_max", c_uint32),
        ("n_outputs_max_per_seq", c_uint32),
        ("n_threads", c_int32),
        ("n_threads_batch", c_int32),
        ("ctx_type", c_int),
        ("rope_scaling_type", c_int),
        ("pooling_type", c_int),
        ("attention_type", c_int),
        ("flash_attn_type", c_int),
        ("rope_freq_base", c_float),
        ("rope_freq_scale", c_float),
        ("yarn_ext_factor", c_float),
        ("yarn_attn_factor", c_float),
        ("yarn_beta_fast", c_float),
        ("yarn_beta_slow", c_float),
        ("yarn_orig_ctx", c_uint32),
        ("defrag_thold", c_float),
        ("cb_eval", c_void_p),
        ("cb_eval_user_data", c_void_p),
        ("type_k", c_int),
        ("type_v", c_int),
        ("moe_cache_size", c_size_t),
        ("abort_callback", c_void_p),
        ("abort_callback_data", c_void_p),
        ("embeddings", c_bool),
        ("offload_kqv", c_bool),
        ("no_perf", c_bool),
        ("op_offload", c_bool),
        ("swa_full", c_bool),
        ("kv_unified", c_bool),
        ("samplers", c_void_p),
        ("n_samplers", c_size_t),
        ("ctx_other", c_void_p),
    ]


class llama_logit_bias(ctypes.Structure):
    token: int
    bias: float
    _fields_: ClassVar = [("token", c_int32), ("bias", c_float)]


class llama_sampler_chain_params(ctypes.Structure):
    no_perf: bool
    _fields_: ClassVar = [("no_perf", c_bool)]


PROGRESS_CALLBACK = ctypes.CFUNCTYPE(c_bool, c_float, c_void_p)
"""Prototype of llama_progress_callback: (progress 0.0 to 1.0, user data) -> continue loading?"""
