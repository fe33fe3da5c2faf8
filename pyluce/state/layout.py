"""The tensors that hold all sequences' state: names, types and shapes, known before anything is allocated.

Shapes fastest axis first; R states a slot, see `StateOptions.ring`:

- GDN layers: `gdn` F32 [d*d*n_v_heads, R, n_slots], `conv` F32 [channels, taps - 1 + R, n_slots];
- full-attention layers: `k`, `v` [head_dim*n_head_kv, n_cells], `raw` F32 [indexer_dim, n_cells],
  `pooled` F32 [indexer_dim, n_cells / ratio];
- the PLE layer: `ple` F32 [hc*n_embd, (taps - 1)*dilation + R, n_slots];
- the draft head (MTP): `k`, `v` of layer n_layer, and `hidden` F32 [hc*n_embd, R + 1, n_slots], the trunk's residual after
  position p in entry p mod R; the last entry is scratch;
- `pages` I32 [pages of a slot, n_slots].
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from pyluce.native.ggml import GGMLType
from pyluce.state.pages import PAGE_TOKENS, pages_for

if TYPE_CHECKING:
    from pyluce.weights import HParams

KV_TYPES: Final = {"f16": GGMLType.F16, "f32": GGMLType.F32}
VALUE_BYTES: Final = {GGMLType.F16: 2, GGMLType.F32: 4, GGMLType.I32: 4}


@dataclass(frozen=True, slots=True)
class StateOptions:
    """Sizes of the pool. `ring` states are kept a slot; `reach` tokens can be rolled back, less than `ring`.

    `conv_margin`, `ple_margin`: convolution inputs kept beyond the taps; `reach` + 1 at least (tests take less, and see
    rollback fail). `cache_pages`: pages beyond those of full slots, for what a prefix cache keeps. `mtp`: with the parts of the
    draft head, of which `hidden_ring` rows are kept a slot; `reach` + 1 at least.
    """

    n_slots: int
    n_ctx: int
    kv_type: str
    reach: int
    ring: int
    conv_margin: int
    ple_margin: int
    cache_pages: int = 0
    mtp: bool = False
    hidden_ring: int = 1

    @property
    def pages_per_slot(self) -> int:
        """Pages that a full context takes."""
        return pages_for(self.n_ctx)

    @property
    def n_pages(self) -> int:
        """Pages of all slots and of the cache, and a scratch page."""
        return self.n_slots * self.pages_per_slot + self.cache_pages + 1

    @property
    def n_cells(self) -> int:
        """Tokens in all pages."""
        return self.n_pages * PAGE_TOKENS


@dataclass(frozen=True, slots=True)
class StatePart:
    """One tensor. `kind` is one of the names above; `layer` None: it belongs to no layer."""

    kind: str
    layer: int | None
    type: GGMLType
    ne: tuple[int, ...]

    @property
    def name(self) -> str:
        """The tensor's name."""
        return self.kind if self.layer is None else f"{self.kind}.{self.layer}"

    @property
    def n_bytes(self) -> int:
        """Bytes of its values."""
        return math.prod(self.ne) * VALUE_BYTES[self.type]


def state_layout(h: HParams, options: StateOptions) -> list[StatePart]:
    """Every tensor of the pool, in the order of allocation."""
    kv, f32 = KV_TYPES[options.kv_type], GGMLType.F32
    kv_width = h.head_dim * h.n_head_kv
    slots, ring, cells = options.n_slots, options.ring, options.n_cells
    parts: list[StatePart] = []
    for layer, recurrent in enumerate(h.recurrent_layers):
        if recurrent:
            history = h.ssm_conv_kernel - 1 + options.conv_margin
            parts.append(StatePart("gdn", layer, f32, (h.ssm_state**2 * h.ssm_v_heads, ring, slots)))
            parts.append(StatePart("conv", layer, f32, (h.conv_channels, history, slots)))
        else:
            parts.append(StatePart("k", layer, kv, (kv_width, cells)))
            parts.append(StatePart("v", layer, kv, (kv_width, cells)))
            parts.append(StatePart("raw", layer, f32, (h.indexer_dim, cells)))
            parts.append(StatePart("pooled", layer, f32, (h.indexer_dim, cells // h.compress_ratio)))
    if h.ple is not None:
        history = (h.ple.conv_kernel - 1) * h.ple.ngram_size + options.ple_margin
        parts.append(StatePart("ple", None, f32, (h.hc_count * h.n_embd, history, slots)))
    if options.mtp:
        parts.append(StatePart("k", h.n_layer, kv, (kv_width, cells)))
        parts.append(StatePart("v", h.n_layer, kv, (kv_width, cells)))
        parts.append(StatePart("hidden", None, f32, (h.hc_count * h.n_embd, options.hidden_ring + 1, slots)))
    parts.append(StatePart("pages", None, GGMLType.I32, (options.pages_per_slot, slots)))
    return parts


def state_bytes(h: HParams, options: StateOptions) -> int:
    """Bytes of all parts, without the few that alignment adds."""
    return sum(part.n_bytes for part in state_layout(h, options))


def page_bytes(h: HParams, options: StateOptions) -> int:
    """Bytes of one page in all full-attention layers."""
    paged = ("k", "v", "raw", "pooled")
    return sum(part.n_bytes for part in state_layout(h, options) if part.kind in paged) // options.n_pages


def recurrent_bytes(h: HParams, options: StateOptions) -> int:
    """Bytes of the recurrent state that a snapshot holds: every GDN state, the inputs that the next token's taps reach, and
    the last hidden row for the draft head."""
    linear = sum(h.recurrent_layers)
    gdn = linear * h.ssm_state**2 * h.ssm_v_heads
    conv = linear * (h.ssm_conv_kernel - 1) * h.conv_channels
    ple = (h.ple.conv_kernel - 1) * h.ple.ngram_size * h.hc_count * h.n_embd if h.ple is not None else 0
    hidden = h.hc_count * h.n_embd if options.mtp else 0
    return 4 * (gdn + conv + ple + hidden)
