"""Widths of luce-tiny, in the words of the GGUF keys."""

from __future__ import annotations

import math
from dataclasses import dataclass

_MASK64 = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15


def primes_from(base: int, count: int) -> list[int]:
    """The first `count` primes at or above `base`."""
    found: list[int] = []
    candidate = max(base, 2)
    while len(found) < count:
        if all(candidate % divisor for divisor in range(2, math.isqrt(candidate) + 1)):
            found.append(candidate)
        candidate += 1
    return found


def hash_multipliers(n_vocab: int, ngram_size: int, seed: int) -> list[int]:
    """Odd multipliers of the n-gram hash, small enough that token times multiplier stays below 2**63.

    The generator is splitmix64, seeded as the reference implementation seeds its first PLE layer, so
    that both derive the same numbers from the same configuration.
    """
    half_bound = max(1, ((1 << 63) - 1) // n_vocab // 2)
    out = []
    for index in range(ngram_size):
        value = (seed + _GAMMA * (index + 2)) & _MASK64
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
        out.append(2 * ((value ^ (value >> 31)) % half_bound) + 1)
    return out


@dataclass(frozen=True, slots=True)
class Config:
    """One qwen4exp model; the defaults are luce-tiny."""

    n_vocab: int = 4096
    n_embd: int = 256
    n_layer: int = 8
    full_interval: int = 4
    n_ctx: int = 8192
    n_head: int = 4
    n_head_kv: int = 2
    head_dim: int = 64
    rope_dim: int = 16
    rope_sections: tuple[int, int, int, int] = (3, 3, 2, 0)
    rope_base: float = 1e7
    n_expert: int = 16
    n_expert_used: int = 4
    n_ff_exp: int = 96
    n_ff_shexp: int = 128
    hc: int = 4
    hc_low_rank: int = 32
    ssm_state: int = 64
    ssm_k_heads: int = 2
    ssm_v_heads: int = 4
    ssm_conv: int = 4
    indexer_heads: int = 4
    indexer_dim: int = 32
    indexer_top_k: int = 64
    compress_ratio: int = 4
    ple_layer: int = 1
    ple_ngram: int = 3
    ple_heads: int = 4
    ple_row_dim: int = 32
    ple_conv: int = 4
    ple_vocab_base: int = 4001
    ple_seed: int = 1234
    ple_eos: int = 4087
    eps: float = 1e-6

    @property
    def hc_dim(self) -> int:
        return self.hc * self.n_embd

    @property
    def key_dim(self) -> int:
        return self.ssm_k_heads * self.ssm_state

    @property
    def value_dim(self) -> int:
        return self.ssm_v_heads * self.ssm_state

    @property
    def conv_dim(self) -> int:
        return 2 * self.key_dim + self.value_dim

    @property
    def ple_head_sizes(self) -> list[int]:
        return primes_from(self.ple_vocab_base, (self.ple_ngram - 1) * self.ple_heads)

    @property
    def ple_head_offsets(self) -> list[int]:
        sizes = self.ple_head_sizes
        return [sum(sizes[:i]) for i in range(len(sizes))]

    @property
    def ple_rows(self) -> int:
        """Rows of the n-gram table, padded to a multiple of 128."""
        return -(-sum(self.ple_head_sizes) // 128) * 128

    @property
    def ple_dim(self) -> int:
        return self.ple_row_dim * (self.ple_ngram - 1) * self.ple_heads

    @property
    def ple_multipliers(self) -> list[int]:
        return hash_multipliers(self.n_vocab, self.ple_ngram, self.ple_seed)

    def is_full(self, layer: int) -> bool:
        """Whether a trunk layer is full attention (the MTP block always is)."""
        return layer >= self.n_layer or (layer + 1) % self.full_interval == 0
