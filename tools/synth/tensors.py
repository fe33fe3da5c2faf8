"""What every tensor of a random model is filled with.

Matrices are normal with variance gain^2 / width, so that activations keep their size; norms are near 1 but not 1, so
that a norm left out or applied twice shows; decay rates and step biases are drawn as the model's own initialisation
does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from pyluce.weights.ggml_types import TYPES_BY_NAME
from tools.synth.shape import Shape

Floats: TypeAlias = npt.NDArray[np.float32]
Fill: TypeAlias = Callable[[np.random.Generator, int, int], Floats]
"""(generator, rows, width) -> float32 [rows, width]"""


@dataclass(frozen=True, slots=True)
class Recipe:
    """Name, shape (fastest axis first), stored type and filling of one tensor."""

    name: str
    ne: tuple[int, ...]
    type_name: str
    fill: Fill


def normal(gain: float = 1.0) -> Fill:
    """Normal values of standard deviation gain / sqrt(width)."""

    def fill(rng: np.random.Generator, rows: int, width: int) -> Floats:
        scale = np.float32(gain / math.sqrt(width))
        return np.asarray(rng.standard_normal((rows, width), np.float32) * scale, np.float32)

    return fill


def near(value: float) -> Fill:
    """`value` times 1 +- 10 %."""

    def fill(rng: np.random.Generator, rows: int, width: int) -> Floats:
        noise = rng.standard_normal((rows, width), np.float32)
        return np.asarray(np.float32(value) * (1 + np.float32(0.1) * noise), np.float32)

    return fill


def decay_rates(rng: np.random.Generator, rows: int, width: int) -> Floats:
    """-exp(A_log) with exp(A_log) uniform in 1 to 16."""
    return -rng.uniform(1.0, 16.0, (rows, width)).astype(np.float32)


def step_biases(rng: np.random.Generator, rows: int, width: int) -> Floats:
    """softplus^-1 of steps that are log-uniform in 0.001 to 0.1."""
    steps = np.exp(rng.uniform(math.log(1e-3), math.log(1e-1), (rows, width)))
    return (steps + np.log(-np.expm1(-steps))).astype(np.float32)


def fitting_type(name: str, width: int) -> str:
    """The type itself if rows of `width` fit it, else Q8_0, else F16."""
    return next(n for n in (name, "Q8_0", "F16") if width % TYPES_BY_NAME[n].block == 0)


def recipes(s: Shape) -> Iterator[Recipe]:
    """All tensors in file order."""
    yield _matrix("token_embd.weight", (s.n_embd, s.n_vocab), s.dense)
    yield _matrix("output.weight", (s.n_embd, s.n_vocab), s.dense, s.weight_gain)
    yield from _mixer("output_hc_", s, inject=False)
    if s.ple_layer is not None:
        rows = sum(s.ple_sizes)
        yield _matrix("per_layer_token_embd.weight", (s.ple_head_dim, rows + -rows % 128), s.table)
    for layer in range(s.n_layer + s.mtp):
        yield from _block(layer, s)
    if s.mtp:
        prefix = f"blk.{s.n_layer}.nextn."
        yield _matrix(prefix + "eh_proj.weight", (2 * s.n_embd, s.n_embd), s.dense)
        yield _vector(prefix + "enorm.weight", s.n_embd)
        yield _vector(prefix + "hnorm.weight", s.hc_count * s.n_embd)
        yield from _mixer(prefix + "hc_head_", s, inject=False)


def _matrix(name: str, ne: tuple[int, ...], type_name: str, gain: float = 1.0) -> Recipe:
    return Recipe(name, ne, fitting_type(type_name, ne[0]), normal(gain))


def _float_matrix(name: str, ne: tuple[int, ...], gain: float = 1.0) -> Recipe:
    return Recipe(name, ne, "F32", normal(gain))


def _vector(name: str, width: int, fill: Fill | None = None) -> Recipe:
    return Recipe(name, (width,), "F32", fill or near(1.0))


def _mixer(prefix: str, s: Shape, *, inject: bool) -> Iterator[Recipe]:
    hc = s.hc_count * s.n_embd
    yield _vector(prefix + "norm.weight", hc)
    yield _matrix(prefix + "down.weight", (hc, s.hc_low_rank), s.dense, gain=s.hc_count)
    yield _matrix(prefix + "up.weight", (s.hc_low_rank, hc), s.dense)
    if inject:
        yield _float_matrix(prefix + "inject.weight", (hc, s.hc_count), gain=s.hc_count)


def _block(layer: int, s: Shape) -> Iterator[Recipe]:
    b = f"blk.{layer}."
    d, hc = s.n_embd, s.hc_count * s.n_embd
    yield from _mixer(b + "hc_attn_", s, inject=True)
    yield from _mixer(b + "hc_ffn_", s, inject=True)
    yield from _linear(b, s) if s.is_linear(layer) else _full(b, s)
    if layer == s.ple_layer:
        yield _matrix(b + "ple_key.weight", (d, hc), s.dense, gain=math.sqrt(s.ple_head_dim))
        yield _matrix(b + "ple_value.weight", (d, d), s.dense, gain=math.sqrt(s.ple_head_dim))
        for part in ("key", "query", "conv"):
            yield _vector(f"{b}ple_norm_{part}.weight", hc)
        yield _float_matrix(b + "ple_conv1d.weight", (s.ple_conv, hc))
    yield _float_matrix(b + "ffn_gate_inp.weight", (d, s.n_expert), s.weight_gain)
    if s.fused_gate_up:
        yield _matrix(b + "ffn_gate_up_exps.weight", (d, 2 * s.n_ff_exp, s.n_expert), s.expert_up, 2.0)
    else:
        yield _matrix(b + "ffn_gate_exps.weight", (d, s.n_ff_exp, s.n_expert), s.expert_up, 2.0)
        yield _matrix(b + "ffn_up_exps.weight", (d, s.n_ff_exp, s.n_expert), s.expert_up, 2.0)
    yield _matrix(b + "ffn_down_exps.weight", (s.n_ff_exp, d, s.n_expert), s.expert_down, 2.0)
    yield _vector(b + "ffn_gate_inp_shexp.weight", d, normal())
    yield _matrix(b + "ffn_gate_shexp.weight", (d, s.n_ff_shexp), s.dense)
    yield _matrix(b + "ffn_up_shexp.weight", (d, s.n_ff_shexp), s.dense)
    yield _matrix(b + "ffn_down_shexp.weight", (s.n_ff_shexp, d), s.dense)


def _linear(b: str, s: Shape) -> Iterator[Recipe]:
    d, channels = s.n_embd, 2 * s.key_width + s.value_width
    yield _matrix(b + "attn_qkv.weight", (d, channels), s.dense, 2.0)
    yield _matrix(b + "attn_gate.weight", (d, s.value_width), s.dense)
    yield _float_matrix(b + "ssm_conv1d.weight", (s.ssm_conv, channels))
    yield _vector(b + "ssm_dt.bias", s.ssm_v_heads, step_biases)
    yield _vector(b + "ssm_a", s.ssm_v_heads, decay_rates)
    yield _float_matrix(b + "ssm_beta.weight", (d, s.ssm_v_heads))
    yield _float_matrix(b + "ssm_alpha.weight", (d, s.ssm_v_heads))
    yield _vector(b + "ssm_norm.weight", s.ssm_state)
    yield _matrix(b + "ssm_out.weight", (s.value_width, d), s.dense)


def _full(b: str, s: Shape) -> Iterator[Recipe]:
    d, q, kv = s.n_embd, s.head_dim * s.n_head, s.head_dim * s.n_head_kv
    yield _matrix(b + "attn_q.weight", (d, 2 * q), s.dense)
    yield _matrix(b + "attn_k.weight", (d, kv), s.dense)
    yield _matrix(b + "attn_v.weight", (d, kv), s.dense, s.weight_gain)
    yield _matrix(b + "attn_output.weight", (q, d), s.dense, s.weight_gain)
    yield _vector(b + "attn_q_norm.weight", s.head_dim, near(math.sqrt(s.weight_gain)))
    yield _vector(b + "attn_k_norm.weight", s.head_dim, near(math.sqrt(s.weight_gain)))
    yield _matrix(b + "indexer.q_proj.weight", (d, s.indexer_heads * s.indexer_dim), s.dense)
    yield _matrix(b + "indexer.k_proj.weight", (d, s.indexer_dim), s.dense)
    yield _vector(b + "indexer.q_norm.weight", s.indexer_dim)
    yield _vector(b + "indexer.k_norm.weight", s.indexer_dim)
