"""The tensors that a `qwen4exp` model must have: names, shapes and the types that each may be stored in.

Shapes are ggml's, fastest axis first. hc = streams * n_embd (the residual's width).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum

from pyluce.weights.errors import refuse
from pyluce.weights.ggml_types import BF16, F16, F32, TYPES, WEIGHT_TYPES, type_name
from pyluce.weights.hparams import HParams

PLE_TABLE = "per_layer_token_embd.weight"
TOKEN_EMBEDDING = "token_embd.weight"
OUTPUT = "output.weight"
DRAFT_EMBEDDING = "nextn.token_embd.weight"
DRAFT_OUTPUT = "nextn.output.weight"
"""What a draft head brings of its own, under the names that it is placed under."""


class Role(Enum):
    """What a tensor is used for, which decides the types it may have and where it may be placed."""

    MATRIX = "matrix"
    EXPERTS = "experts"
    VECTOR = "vector"
    CONVOLUTION = "convolution"
    EMBEDDING = "embedding"
    PLE_TABLE = "ple_table"


ALLOWED_TYPES: dict[Role, frozenset[int]] = {
    Role.MATRIX: WEIGHT_TYPES,
    Role.EXPERTS: WEIGHT_TYPES,
    Role.VECTOR: frozenset({F32}),
    Role.CONVOLUTION: frozenset({F32, F16, BF16}),
    Role.EMBEDDING: WEIGHT_TYPES,
    Role.PLE_TABLE: WEIGHT_TYPES,
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of the model: `shard` indexes `ModelFile.shards`, `offset` is in bytes from that file's start."""

    name: str
    type_id: int
    ne: tuple[int, ...]
    nbytes: int
    shard: int
    offset: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of `ne[0]` values."""
        return TYPES[self.type_id].row_bytes(self.ne[0])


@dataclass(frozen=True, slots=True)
class Expected:
    """A tensor that must exist. `also`: shapes that hold the same values in the same order."""

    name: str
    ne: tuple[int, ...]
    role: Role
    also: tuple[tuple[int, ...], ...] = ()


def global_tensors(hp: HParams) -> Iterator[Expected]:
    """Tensors outside the blocks. `output.weight` is checked if present; without it `token_embd.weight` serves."""
    hc = hp.hc_count * hp.n_embd
    yield Expected(TOKEN_EMBEDDING, (hp.n_embd, hp.n_vocab), Role.EMBEDDING)
    yield from _mixer("output_hc_", hp, inject=False)
    if hp.ple is not None:
        yield Expected(PLE_TABLE, (hp.ple.head_dim, hp.ple.n_rows), Role.PLE_TABLE)
        prefix = f"blk.{hp.ple.layer}.ple_"
        yield Expected(prefix + "key.weight", (hp.n_embd, hc), Role.MATRIX)
        yield Expected(prefix + "value.weight", (hp.n_embd, hp.n_embd), Role.MATRIX)
        for part in ("key", "query", "conv"):
            yield _stream_norm(f"{prefix}norm_{part}.weight", hp)
        yield Expected(prefix + "conv1d.weight", (hp.ple.conv_kernel, hc), Role.CONVOLUTION)


def block_tensors(hp: HParams, layer: int) -> Iterator[Expected]:
    """Tensors of one block without those of PLE; `layer` = `n_layer` is the MTP block's full-attention layer."""
    prefix = f"blk.{layer}."
    yield from _mixer(prefix + "hc_attn_", hp, inject=True)
    yield from _mixer(prefix + "hc_ffn_", hp, inject=True)
    if layer < hp.n_layer and hp.recurrent_layers[layer]:
        yield from _linear_attention(prefix, hp)
    else:
        yield from _full_attention(prefix, hp)
    d, ff, shared = hp.n_embd, hp.n_ff_exp, hp.n_ff_shexp
    yield Expected(prefix + "ffn_gate_inp.weight", (d, hp.n_expert), Role.MATRIX)
    yield Expected(prefix + "ffn_gate_exps.weight", (d, ff, hp.n_expert), Role.EXPERTS)
    yield Expected(prefix + "ffn_up_exps.weight", (d, ff, hp.n_expert), Role.EXPERTS)
    yield Expected(prefix + "ffn_down_exps.weight", (ff, d, hp.n_expert), Role.EXPERTS)
    yield Expected(prefix + "ffn_gate_inp_shexp.weight", (d,), Role.MATRIX)
    yield Expected(prefix + "ffn_gate_shexp.weight", (d, shared), Role.MATRIX)
    yield Expected(prefix + "ffn_up_shexp.weight", (d, shared), Role.MATRIX)
    yield Expected(prefix + "ffn_down_shexp.weight", (shared, d), Role.MATRIX)


def mtp_tensors(hp: HParams) -> Iterator[Expected]:
    """Tensors of the MTP block (index `n_layer`): a full-attention block and its front and head."""
    yield from block_tensors(hp, hp.n_layer)
    prefix = f"blk.{hp.n_layer}.nextn."
    yield Expected(prefix + "eh_proj.weight", (2 * hp.n_embd, hp.n_embd), Role.MATRIX)
    yield Expected(prefix + "enorm.weight", (hp.n_embd,), Role.VECTOR)
    yield _stream_norm(prefix + "hnorm.weight", hp)
    yield from _mixer(prefix + "hc_head_", hp, inject=False)


def _stream_norm(name: str, hp: HParams) -> Expected:
    return Expected(name, (hp.hc_count * hp.n_embd,), Role.VECTOR, also=((hp.n_embd, hp.hc_count),))


def _mixer(prefix: str, hp: HParams, *, inject: bool) -> Iterator[Expected]:
    hc = hp.hc_count * hp.n_embd
    yield _stream_norm(prefix + "norm.weight", hp)
    yield Expected(prefix + "down.weight", (hc, hp.hc_low_rank), Role.MATRIX)
    yield Expected(prefix + "up.weight", (hp.hc_low_rank, hc), Role.MATRIX)
    if inject:
        yield Expected(prefix + "inject.weight", (hc, hp.hc_count), Role.MATRIX)


def _linear_attention(prefix: str, hp: HParams) -> Iterator[Expected]:
    d = hp.n_embd
    yield Expected(prefix + "attn_qkv.weight", (d, hp.conv_channels), Role.MATRIX)
    yield Expected(prefix + "attn_gate.weight", (d, hp.ssm_inner), Role.MATRIX)
    yield Expected(prefix + "ssm_conv1d.weight", (hp.ssm_conv_kernel, hp.conv_channels), Role.CONVOLUTION)
    yield Expected(prefix + "ssm_dt.bias", (hp.ssm_v_heads,), Role.VECTOR)
    yield Expected(prefix + "ssm_a", (hp.ssm_v_heads,), Role.VECTOR)
    yield Expected(prefix + "ssm_beta.weight", (d, hp.ssm_v_heads), Role.MATRIX)
    yield Expected(prefix + "ssm_alpha.weight", (d, hp.ssm_v_heads), Role.MATRIX)
    yield Expected(prefix + "ssm_norm.weight", (hp.ssm_state,), Role.VECTOR)
    yield Expected(prefix + "ssm_out.weight", (hp.ssm_inner, d), Role.MATRIX)


def _full_attention(prefix: str, hp: HParams) -> Iterator[Expected]:
    d, q, kv = hp.n_embd, hp.head_dim * hp.n_head, hp.head_dim * hp.n_head_kv
    yield Expected(prefix + "attn_q.weight", (d, 2 * q), Role.MATRIX)
    yield Expected(prefix + "attn_k.weight", (d, kv), Role.MATRIX)
    yield Expected(prefix + "attn_v.weight", (d, kv), Role.MATRIX)
    yield Expected(prefix + "attn_output.weight", (q, d), Role.MATRIX)
    yield Expected(prefix + "attn_q_norm.weight", (hp.head_dim,), Role.VECTOR)
    yield Expected(prefix + "attn_k_norm.weight", (hp.head_dim,), Role.VECTOR)
    yield Expected(prefix + "indexer.q_proj.weight", (d, hp.indexer_heads * hp.indexer_dim), Role.MATRIX)
    yield Expected(prefix + "indexer.k_proj.weight", (d, hp.indexer_dim), Role.MATRIX)
    yield Expected(prefix + "indexer.q_norm.weight", (hp.indexer_dim,), Role.VECTOR)
    yield Expected(prefix + "indexer.k_norm.weight", (hp.indexer_dim,), Role.VECTOR)


def _without_trailing_ones(ne: tuple[int, ...]) -> tuple[int, ...]:
    while len(ne) > 1 and ne[-1] == 1:
        ne = ne[:-1]
    return ne


def check_tensor(path: str, found: TensorInfo, expected: Expected) -> TensorInfo:
    """The tensor with the expected shape, or `ModelError` naming both shapes or types."""
    ne = _without_trailing_ones(found.ne)
    wanted = _without_trailing_ones(expected.ne)
    if expected.role is Role.PLE_TABLE:
        if len(ne) != 2 or ne[0] != wanted[0] or ne[1] < wanted[1]:
            shape = f"{wanted[0]} values by at least {wanted[1]} rows (what the PLE heads address)"
            refuse(path, f"shape of {found.name}", expected=shape, found=list(ne))
        wanted = ne
    elif ne != wanted and ne not in expected.also:
        refuse(path, f"shape of {found.name}", expected=list(expected.ne), found=list(found.ne))
    allowed = ALLOWED_TYPES[expected.role]
    if found.type_id not in allowed:
        names = ", ".join(type_name(t) for t in sorted(allowed))
        refuse(path, f"type of {found.name}", expected=f"one of {names}", found=type_name(found.type_id))
    return replace(found, ne=wanted)


def split_fused(tensors: Mapping[str, TensorInfo], hp: HParams, layers: list[int]) -> dict[str, TensorInfo]:
    """The table with fused `attn_qkv` of full-attention layers replaced by three row ranges of it.

    Some converters store Q (with its gate), K and V of a full layer as one matrix, rows in that order.
    """
    out = dict(tensors)
    q, kv = 2 * hp.head_dim * hp.n_head, hp.head_dim * hp.n_head_kv
    for layer in layers:
        fused = out.get(f"blk.{layer}.attn_qkv.weight")
        if fused is None or f"blk.{layer}.attn_q.weight" in out or fused.ne != (hp.n_embd, q + 2 * kv):
            continue
        del out[fused.name]
        first = 0
        for part, rows in (("attn_q", q), ("attn_k", kv), ("attn_v", kv)):
            name = f"blk.{layer}.{part}.weight"
            offset, nbytes = fused.offset + first * fused.row_bytes, rows * fused.row_bytes
            out[name] = replace(fused, name=name, ne=(hp.n_embd, rows), nbytes=nbytes, offset=offset)
            first += rows
    return out
