"""The blocks of the model as nodes: hyper-connection, GDN, sparse attention, n-gram layer, experts.

Formulas: the model's description, and the comments of ggml-luce.h for what an op computes. H hidden size, S streams, T
rows.
"""

from __future__ import annotations

from dataclasses import dataclass

from pyluce.graph.arrays import GraphInputs
from pyluce.graph.layers import AttentionWeights, GdnWeights, MixWeights, MoeWeights, PleWeights, RoutedWeights
from pyluce.graph.ops import GraphScope
from pyluce.native import ggml, luce
from pyluce.native.luce import ATTN_PHASE_PARAM, Phase
from pyluce.native.tensors import tensor_struct
from pyluce.state.pool import StatePool
from pyluce.weights import HParams


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Input tensors of a step graph.

    embd F32 [H, T]; rows I32 [4, T] (slot, position, 0, 0); rope and block_rope F32 [rope_dim, T] (cos | sin at the
    row's position, and at the first position of its block); cells I64 [T]; ple F32 [n_heads*head_dim, T] or None;
    out_rows I32 [n_out] or None.
    """

    embd: int
    rows: int
    rope: int
    block_rope: int
    cells: int
    ple: int | None
    out_rows: int | None

    @classmethod
    def of(cls, inputs: GraphInputs) -> StepInputs:
        """The tensors by name."""
        t = inputs.tensors
        required = ("embd", "rows", "rope", "block_rope", "cells")
        return cls(**{name: t[name] for name in required}, ple=t.get("ple"), out_rows=t.get("out_rows"))


def mix(g: GraphScope, h: HParams, w: MixWeights, xn: int) -> tuple[int, int | None]:
    """The block's input [H, T] and the injection [S, T] from the normalised residual xn [S*H, T]."""
    down = g.mul_mat(w.down, xn)
    inject = g.mul_mat(w.inject, xn) if w.inject is not None else None
    g.now(down, inject)
    low = g.made(luce.ggml_luce_silu_scale(g.ctx, down, 1.0 / h.hc_count), "silu_scale")
    mixed = g.made(luce.ggml_luce_hc_mix(g.ctx, xn, g.mul_mat(w.up, low), h.hc_count), "hc_mix")
    g.keep(mixed, low)
    return mixed, inject


def gdn(g: GraphScope, h: HParams, w: GdnWeights, pool: StatePool, layer: int, x: int, step: StepInputs) -> int:
    """Gated DeltaNet [H, T] of x [H, T]; reads and writes the slot's state and convolution history."""
    qkv, z = g.mul_mat(w.qkv, x), g.mul_mat(w.z, x)
    beta, alpha = g.mul_mat(w.beta, x), g.mul_mat(w.alpha, x)
    g.now(qkv, z, beta, alpha)
    keep_rows = g.phase is not Phase.CHUNK
    mixed = luce.ggml_luce_gdn(
        g.ctx, qkv, z, beta, alpha, w.conv, w.misc, pool.gdn[layer], pool.conv[layer], step.rows,
        h.ssm_k_heads, h.rms_eps, keep_rows, g.fault,
    )  # fmt: skip
    return g.mul_mat(w.out, g.made(mixed, "gdn"))


def attention(
    g: GraphScope,
    h: HParams,
    w: AttentionWeights,
    pool: StatePool,
    layer: int,
    x: int,
    step: StepInputs,
    n_rows: int,
    n_block_max: int,
) -> int:
    """Gated sparse attention [H, T] of x [H, T]; appends K, V and indexer keys, pools completed blocks."""
    eps, ratio, index = h.rms_eps, h.compress_ratio, w.indexer
    if index is None:
        raise ValueError(f"layer {layer} has no indexer weights")
    index_k, index_q_raw = g.mul_mat(index.k, x), g.mul_mat(index.q, x)
    q_gate, k, v = g.mul_mat(w.q, x), g.mul_mat(w.k, x), g.mul_mat(w.v, x)
    g.now(index_k, index_q_raw, q_gate, k, v)
    handle = g.made(
        luce.ggml_luce_qsa_pool(
            g.ctx, index_k, index.k_norm, step.block_rope, pool.raw[layer], pool.pooled[layer],
            pool.pages, step.rows, ratio, eps,
        ),
        "qsa_pool",
    )  # fmt: skip
    index_q = g.made(
        luce.ggml_luce_norm_rope(g.ctx, index_q_raw, index.q_norm, step.rope, h.indexer_heads, h.indexer_dim, eps),
        "norm_rope",
    )
    g.keep(index_q, k, v)
    selected = g.made(
        luce.ggml_luce_qsa_select(
            g.ctx, index_q, pool.pooled[layer], handle, pool.pages, step.rows,
            ratio, h.indexer_top_k // ratio, n_block_max, g.fault,
        ),
        "qsa_select",
    )  # fmt: skip
    keys, values = append_keys(g, h, w, pool, layer, k, v, step.rope, step.cells, n_rows)
    return attend(g, h, w, q_gate, keys, values, selected, ratio, step.rope, pool.pages, step.rows, n_rows)


def append_keys(
    g: GraphScope,
    h: HParams,
    w: AttentionWeights,
    pool: StatePool,
    layer: int,
    k: int,
    v: int,
    rope: int,
    cells: int,
    n_rows: int,
) -> tuple[int, int]:
    """The layer's K and V pools with the rows of its projections k and v [D*n_kv, T] written into `cells`."""
    turned = luce.ggml_luce_norm_rope(g.ctx, k, w.k_norm, rope, h.n_head_kv, h.head_dim, h.rms_eps)
    rows = ggml.ggml_reshape_2d(g.ctx, g.made(turned, "norm_rope"), h.head_dim * h.n_head_kv, n_rows)
    keys = ggml.ggml_set_rows(g.ctx, pool.k[layer], rows, cells)
    return keys, ggml.ggml_set_rows(g.ctx, pool.v[layer], v, cells)


def attend(
    g: GraphScope,
    h: HParams,
    w: AttentionWeights,
    q_gate: int,
    keys: int,
    values: int,
    selected: int,
    ratio: int,
    rope: int,
    pages: int,
    rows: int,
    n_rows: int,
) -> int:
    """Gated attention [H, T] of the projection q_gate [2*D*n_head, T].

    Over the selected blocks of `ratio` tokens and the tail of the incomplete one.
    """
    d = h.head_dim
    q = g.made(luce.ggml_luce_norm_rope(g.ctx, q_gate, w.q_norm, rope, h.n_head, 2 * d, h.rms_eps), "norm_rope")
    gate = ggml.ggml_view_2d(g.ctx, q_gate, 2 * d * h.n_head - d, n_rows, 2 * d * h.n_head * 4, d * 4)
    attended = luce.ggml_luce_qsa_attn(
        g.ctx, q, keys, values, selected, gate, pages, rows, ratio, 2 * d, d**-0.5, g.fault
    )
    tensor_struct(g.made(attended, "qsa_attn")).op_params[ATTN_PHASE_PARAM] = int(g.phase)
    return g.mul_mat(w.out, g.made(attended, "qsa_attn"))


def combine(
    g: GraphScope, h: HParams, residual: int, out: int, inject: int | None, norm: int, n_rows: int
) -> tuple[int, int]:
    """The residual [S*H, T] with a block's output [H, T] injected, and its norm times `norm`."""
    if inject is None:
        raise ValueError("a layer's hyper-connection has no injection weights")
    both = g.made(luce.ggml_luce_hc_combine(g.ctx, residual, out, inject, norm, h.rms_eps), "hc_combine")
    g.keep(both, *(source for source in tensor_struct(out).src if source))
    width = h.hc_count * h.n_embd
    return g.half(both, width, n_rows, 0), g.half(both, width, n_rows, 1)


def ple(g: GraphScope, h: HParams, w: PleWeights, pool: StatePool, residual: int, step: StepInputs) -> int:
    """The residual [S*H, T] with the n-gram embedding added, gated and convolved."""
    if h.ple is None or step.ple is None or pool.ple is None:
        raise ValueError("this model has no n-gram table")
    key, value = g.mul_mat(w.key, step.ple), g.mul_mat(w.value, step.ple)
    g.now(key, value)
    gated = luce.ggml_luce_ple_gate(
        g.ctx, key, value, residual,
        w.norm_key, w.norm_query, w.norm_conv, h.hc_count, h.rms_eps,
    )  # fmt: skip
    node = luce.ggml_luce_ple_conv(
        g.ctx, g.made(gated, "ple_gate"), residual, w.conv, pool.ple, step.rows, h.ple.ngram_size
    )
    return g.made(node, "ple_conv")


def moe(g: GraphScope, h: HParams, w: MoeWeights, x: int, n_rows: int) -> tuple[int, int]:
    """Routed and shared experts [H, T] of x [H, T], and the picked ids I32 [n_used, T]."""
    if w.routed is None:
        raise ValueError("expected routed experts, found none")
    logits, shared_gate = g.mul_mat(w.router, x), g.mul_mat(w.shared_gate_in, x)
    g.now(logits, shared_gate)
    ids = g.made(luce.ggml_luce_route(g.ctx, logits, h.n_expert_used), "route")
    picks, shared_out = picks_beside_shared(g, h, w, w.routed, x, ids, n_rows, (x, ids))
    node = luce.ggml_luce_moe_combine(g.ctx, picks, logits, ids, shared_out, shared_gate)
    return g.made(node, "moe_combine"), ids


def picks_beside_shared(
    g: GraphScope,
    h: HParams,
    w: MoeWeights,
    routed: RoutedWeights,
    x: int,
    ids: int,
    n_rows: int,
    kept: tuple[int, ...],
) -> tuple[int, int]:
    """The picks [H, n_used, T] of x [H, T] by ids I32 [n_used, T] and the shared expert [H, T], step by step beside each other.

    `kept` stays in memory until both have their hidden values.
    """
    first, second = g.mul_mat(w.shared_gate, x), g.mul_mat(w.shared_up, x)
    hidden = hidden_of(g, routed, ggml.ggml_reshape_3d(g.ctx, x, h.n_embd, 1, n_rows), ids, first, second)
    shared = ggml.ggml_swiglu_split(g.ctx, first, second)
    g.keep(hidden, *kept)
    g.keep(shared, *kept)
    g.now(hidden, shared)
    picks, shared_out = g.mul_mat_id(routed.down, hidden, ids), g.mul_mat(w.shared_down, shared)
    g.now(picks, shared_out)
    return picks, shared_out


def hidden_of(g: GraphScope, w: RoutedWeights, x3: int, ids: int, *beside: int) -> int:
    """The picked experts' hidden values [ff, n_used, T] of x3 [H, 1, T]; `beside`: products to compute in the same launch."""
    if w.gate_up is not None:
        both = g.mul_mat_id(w.gate_up, x3, ids)
        g.now(both, *beside)
        return ggml.ggml_swiglu(g.ctx, both)
    if w.gate is None or w.up is None:
        raise ValueError("expected gate and up experts, found neither them nor fused ones")
    gate, up = g.mul_mat_id(w.gate, x3, ids), g.mul_mat_id(w.up, x3, ids)
    g.now(gate, up, *beside)
    return ggml.ggml_swiglu_split(g.ctx, gate, up)
