"""Widths and types of the models that can be written, and the presets."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from pyluce.weights.ggml_types import TYPES_BY_NAME


@dataclass(frozen=True, slots=True)
class Shape:
    """Widths of one qwen4exp model (names follow the GGUF keys), and the types of its matrices.

    `n_layer` counts the trunk. Types are names such as `Q4_K`; a matrix whose rows are no multiple of the type's block
    is stored as Q8_0, or as F16 if that does not fit either. `weight_gain` scales what decides between alternatives
    (router, attention scores, logits), so that another expert or block visibly changes the result.
    """

    n_layer: int = 8
    mtp: bool = False
    n_embd: int = 256
    n_vocab: int = 512
    n_ctx: int = 8192
    n_head: int = 8
    n_head_kv: int = 2
    head_dim: int = 64
    rope_dim: int = 16
    rope_sections: tuple[int, int, int, int] = (3, 3, 2, 0)
    n_expert: int = 16
    n_expert_used: int = 4
    n_ff_exp: int = 256
    n_ff_shexp: int = 256
    hc_count: int = 4
    hc_low_rank: int = 64
    ssm_state: int = 64
    ssm_k_heads: int = 2
    ssm_v_heads: int = 4
    ssm_conv: int = 4
    indexer_heads: int = 4
    indexer_dim: int = 32
    indexer_top_k: int = 64
    compress_ratio: int = 4
    full_interval: int = 4
    ple_layer: int | None = 1
    ple_ngram: int = 3
    ple_heads: int = 4
    ple_conv: int = 4
    ple_base: int = 509
    fused_gate_up: bool = False
    dense: str = "F32"
    expert_up: str = "F32"
    expert_down: str = "F32"
    table: str = "F32"
    weight_gain: float = 3.0

    def __post_init__(self) -> None:
        if self.n_layer < self.full_interval or self.n_layer % self.full_interval:
            raise ValueError(f"n_layer: expected a multiple of {self.full_interval}, found {self.n_layer}")
        for name in (self.dense, self.expert_up, self.expert_down, self.table):
            if name not in TYPES_BY_NAME:
                raise ValueError(f"type: expected one of {', '.join(TYPES_BY_NAME)}, found {name}")

    def with_type(self, name: str) -> Shape:
        """The same shape with every matrix of one type."""
        return replace(self, dense=name, expert_up=name, expert_down=name, table=name)

    @property
    def key_width(self) -> int:
        return self.ssm_k_heads * self.ssm_state

    @property
    def value_width(self) -> int:
        return self.ssm_v_heads * self.ssm_state

    @property
    def ple_head_count(self) -> int:
        return (self.ple_ngram - 1) * self.ple_heads

    @property
    def ple_head_dim(self) -> int:
        return self.n_embd // self.ple_head_count

    @property
    def ple_sizes(self) -> list[int]:
        """Rows of each head: ascending primes from `ple_base` on."""
        return primes_from(self.ple_base, self.ple_head_count)

    def is_linear(self, layer: int) -> bool:
        return layer < self.n_layer and (layer + 1) % self.full_interval != 0


def primes_from(base: int, count: int) -> list[int]:
    """The first `count` primes at or above `base`."""
    found: list[int] = []
    n = max(base, 2)
    while len(found) < count:
        if all(n % d for d in range(2, math.isqrt(n) + 1)):
            found.append(n)
        n += 1
    return found


TINY = Shape()
"""Everything in it, small: 8 layers, 64 tokens of selection budget, rows that K-quants fit (multiples of 256)."""

MICRO = Shape(
    n_layer=4, n_embd=64, n_head=4, head_dim=32, rope_dim=8, rope_sections=(2, 1, 1, 0), n_expert=4, n_expert_used=2,
    n_ff_exp=32, n_ff_shexp=32, hc_low_rank=16, ssm_state=32, ssm_k_heads=1, ssm_v_heads=2, indexer_heads=2,
    indexer_dim=16, indexer_top_k=32, ple_heads=2, ple_base=61, n_vocab=320, n_ctx=2048,
)  # fmt: skip
"""As small as it gets (about 1 MB), for tests of the loader."""

FULL = Shape(
    n_layer=12, n_embd=2560, n_vocab=248320, n_ctx=262144, n_head=24, head_dim=256, rope_dim=64,
    rope_sections=(11, 11, 10, 0), n_expert=512, n_expert_used=10, n_ff_exp=640, n_ff_shexp=640, hc_low_rank=320,
    ssm_state=128, ssm_k_heads=16, ssm_v_heads=48, indexer_dim=128, indexer_top_k=2048, ple_heads=8, ple_base=10007,
    dense="Q8_0", expert_up="Q4_K", expert_down="IQ4_NL", table="Q8_0",
)  # fmt: skip
"""Every width of the real model with fewer layers: a layer costs what it costs there (18 GiB for 12 layers)."""

PRESETS = {"tiny": TINY, "micro": MICRO, "full": FULL}
