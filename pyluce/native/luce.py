# mypy: disable-error-code="empty-body"
"""Declarations of ggml-luce.h: the constructors of GGML_OP_LUCE, matmul phases, and what widens rows.

Shapes and formulas stand in the header (``patches/src/ggml/include/ggml-luce.h``). A constructor returns None, with the
reason in the native log, when a shape or type does not fit; ``pyluce.graph.ops`` turns that into an exception.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

from pyluce.native.declare import F32, I64, Bool, Int, OptPtr, Out, Ptr, Size, Str, function

BASE = "ggml-base"
PAGE_TOKENS = 64


class Phase(IntEnum):
    """How a matrix product chooses its kernel (``enum ggml_luce_phase``)."""

    UPSTREAM = 0
    ROW = 1
    CHUNK = 2


ATTN_PHASE_PARAM: Final = 5
"""Which of qsa_attn's op_params has the graph's `Phase`: a device splits a row's keys by it, never by how many rows there are."""


class Fault(IntEnum):
    """Faults that tests plant in a graph (``enum ggml_luce_fault``); NONE in every real one."""

    NONE = 0
    NAN_LEAK = 1
    TIE_HIGH = 2
    SCAN_ORDER = 3
    THREADS = 4


@function(BASE)
def ggml_luce_hc_init(ctx: Ptr, embd: Ptr, norm: Ptr, n_stream: Int, eps: F32) -> OptPtr: ...
@function(BASE)
def ggml_luce_hc_norm(ctx: Ptr, residual: Ptr, norm: Ptr, n_stream: Int, eps: F32) -> OptPtr: ...
@function(BASE)
def ggml_luce_hc_mix(ctx: Ptr, xn: Ptr, gate: Ptr, n_stream: Int) -> OptPtr: ...
@function(BASE)
def ggml_luce_hc_combine(ctx: Ptr, residual: Ptr, block: Ptr, inject: Ptr, norm: OptPtr, eps: F32) -> OptPtr: ...
@function(BASE)
def ggml_luce_norm_rope(
    ctx: Ptr,
    x: Ptr,
    norm: Ptr,
    rope: Ptr,
    n_head: Int,
    head_stride: Int,
    eps: F32,
) -> OptPtr: ...
@function(BASE)
def ggml_luce_gdn(
    ctx: Ptr,
    qkv: Ptr,
    z: Ptr,
    beta: Ptr,
    alpha: Ptr,
    conv: Ptr,
    misc: Ptr,
    state: Ptr,
    history: Ptr,
    rows: Ptr,
    n_k_head: Int,
    eps: F32,
    keep_rows: Bool,
    fault: Int,
) -> OptPtr: ...
@function(BASE)
def ggml_luce_qsa_pool(
    ctx: Ptr,
    k: Ptr,
    norm: Ptr,
    rope: Ptr,
    raw: Ptr,
    pooled: Ptr,
    pages: Ptr,
    rows: Ptr,
    ratio: Int,
    eps: F32,
) -> OptPtr: ...
@function(BASE)
def ggml_luce_qsa_select(
    ctx: Ptr,
    q: Ptr,
    pooled: Ptr,
    after: Ptr,
    pages: Ptr,
    rows: Ptr,
    ratio: Int,
    n_top: Int,
    n_block_max: Int,
    fault: Int,
) -> OptPtr: ...
@function(BASE)
def ggml_luce_qsa_attn(
    ctx: Ptr,
    q: Ptr,
    k: Ptr,
    v: Ptr,
    selected: Ptr,
    gate: Ptr,
    pages: Ptr,
    rows: Ptr,
    ratio: Int,
    gate_stride: Int,
    scale: F32,
    fault: Int,
) -> OptPtr: ...
@function(BASE)
def ggml_luce_ple_gate(
    ctx: Ptr,
    key: Ptr,
    value: Ptr,
    residual: Ptr,
    norm_key: Ptr,
    norm_query: Ptr,
    norm_conv: Ptr,
    n_stream: Int,
    eps: F32,
) -> OptPtr: ...
@function(BASE)
def ggml_luce_ple_conv(
    ctx: Ptr,
    gated: Ptr,
    residual: Ptr,
    conv: Ptr,
    history: Ptr,
    rows: Ptr,
    dilation: Int,
) -> OptPtr: ...
@function(BASE)
def ggml_luce_route(ctx: Ptr, logits: Ptr, n_used: Int) -> OptPtr: ...
@function(BASE)
def ggml_luce_moe_combine(
    ctx: Ptr, picks: Ptr, logits: Ptr, ids: Ptr, shared: OptPtr, shared_gate: OptPtr
) -> OptPtr: ...
@function(BASE)
def ggml_luce_silu_scale(ctx: Ptr, x: Ptr, scale: F32) -> OptPtr: ...
@function(BASE)
def ggml_luce_argmax(ctx: Ptr, logits: Ptr) -> OptPtr: ...
@function(BASE)
def ggml_luce_moe_join(ctx: Ptr, sum: Ptr, shared: Ptr, shared_gate: Ptr) -> OptPtr: ...
@function(BASE)
def ggml_luce_pick_split(ctx: Ptr, ids: Ptr, slots: Ptr) -> OptPtr: ...
@function(BASE)
def ggml_luce_pick_merge(ctx: Ptr, here: Ptr, there: Ptr, places: Ptr) -> OptPtr: ...
@function(BASE)
def ggml_luce_split_new(target: Ptr, expert: Ptr, graph: Ptr) -> OptPtr: ...
@function(BASE)
def ggml_luce_split_add(
    split: Ptr,
    send_at: Int,
    receive_at: Int,
    layer: Ptr,
    n_send: Int,
    from_: Out,
    to: Out,
    result: Ptr,
    into: Ptr,
) -> Bool: ...
@function(BASE)
def ggml_luce_split_compute(split: Ptr) -> Int: ...
@function(BASE)
def ggml_luce_split_compute_streams(splits: Out, n: Int) -> Int: ...
@function(BASE)
def ggml_luce_split_bytes(split: Ptr, sent: Out, received: Out) -> None: ...
@function(BASE)
def ggml_luce_split_record(split: Ptr, target: Out, expert: Out) -> None: ...
@function(BASE)
def ggml_luce_split_free(split: OptPtr) -> None: ...
@function(BASE)
def ggml_luce_graph_retain(graph: Ptr) -> None: ...
@function(BASE)
def ggml_luce_stamp() -> Str: ...
@function(BASE)
def ggml_luce_set_phase(tensor: Ptr, phase: Int) -> Bool: ...
@function(BASE)
def ggml_luce_get_phase(tensor: Ptr) -> Int: ...
@function(BASE)
def ggml_luce_dequantize_rows(
    type: Int, base: Ptr, row_bytes: Size, ids: OptPtr, n: I64, ne0: I64, dst: Out
) -> Bool: ...
@function(BASE)
def ggml_luce_pread_rows(
    fd: Int,
    offset: I64,
    row_bytes: Size,
    type: Int,
    ids: Ptr,
    to: OptPtr,
    n: I64,
    ne0: I64,
    dst: Out,
    n_reads: Out,
) -> I64: ...
