"""libllama's MTP graph, fed hidden rows by hand: the functions that pyluce itself has no use for, declared here."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np

from pyluce.native import llama
from pyluce.native.library import load_libraries
from pyluce.native.llama_structs import FlashAttnType
from pyluce.native.structs import GGMLType

MTP_CONTEXT = 1
DECODE = 1


class Embd(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("n_rows", ctypes.c_size_t), ("n_embd", ctypes.c_size_t))


def mtp_logits(path: Path, hidden: np.ndarray, tokens: list[int]) -> np.ndarray:
    """Logits [T, n_vocab] of the pairs (hidden row of position p, token at p + 1), p from 0 on; weights and cache F32."""
    library = load_libraries().handles["llama"]
    pointer, integer, boolean = ctypes.c_void_p, ctypes.c_int32, ctypes.c_bool
    signatures = {
        "llama_batch_ext_init": (pointer, [pointer]),
        "llama_batch_ext_free": (None, [pointer]),
        "llama_batch_ext_add_token": (integer, [pointer, integer, integer]),
        "llama_batch_ext_set_embd_state": (boolean, [pointer, integer, Embd]),
        "llama_batch_ext_set_output_logits": (boolean, [pointer, integer, boolean]),
        "llama_batch_ext_set_pos": (boolean, [pointer, integer, ctypes.POINTER(integer)]),
        "llama_process": (integer, [pointer, ctypes.c_int, pointer]),
    }
    call = {}
    for name, (result, arguments) in signatures.items():
        call[name] = getattr(library, name)
        call[name].restype, call[name].argtypes = result, arguments
    rows = np.ascontiguousarray(hidden, np.float32)
    model_params = llama.llama_model_default_params()
    model_params.use_extra_bufts = False
    model_params.load_mtp = True
    model = llama.llama_model_load_from_file(str(path).encode(), model_params)
    assert model
    params = llama.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = 512
    params.n_threads = params.n_threads_batch = 1
    params.type_k = params.type_v = GGMLType.F32
    params.flash_attn_type = FlashAttnType.DISABLED
    params.ctx_type = MTP_CONTEXT
    context = llama.llama_init_from_model(model, params)
    assert context
    batch = call["llama_batch_ext_init"](context)
    try:
        for position, token in enumerate(tokens):
            at = call["llama_batch_ext_add_token"](batch, 0, token)
            assert at == position
            row = Embd(rows[position].ctypes.data, 1, rows.shape[1])
            assert call["llama_batch_ext_set_embd_state"](batch, at, row)
            assert call["llama_batch_ext_set_pos"](batch, at, ctypes.byref(ctypes.c_int32(position)))
            assert call["llama_batch_ext_set_output_logits"](batch, at, True)
        assert call["llama_process"](context, DECODE, batch) == 0
        n_vocab = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
        found = []
        for position in range(len(tokens)):
            pointer_to_row = llama.llama_get_logits_ith(context, position)
            address = ctypes.cast(pointer_to_row, ctypes.c_void_p).value
            assert address
            found.append(np.ctypeslib.as_array((ctypes.c_float * n_vocab).from_address(address)).copy())
        return np.stack(found)
    finally:
        call["llama_batch_ext_free"](batch)
        llama.llama_free(context)
        llama.llama_model_free(model)
