"""The memory of all sequences: one tensor a layer and part, addressed by slot or by page.

Parts (shapes fastest axis first; R states a slot, see `StateOptions.ring`):

- GDN layers: `gdn` F32 [d*d*n_v_heads, R, n_slots], `conv` F32 [channels, taps - 1 + R, n_slots];
- full-attention layers: `k`, `v` [head_dim*n_head_kv, n_cells], `raw` F32 [indexer_dim, n_cells],
  `pooled` F32 [indexer_dim, n_cells / ratio];
- the PLE layer: `ple` F32 [hc*n_embd, (taps - 1)*dilation + R, n_slots];
- `pages` I32 [pages of a slot, n_slots].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from pyluce.native.backend import Backend, BackendBuffer, check_status
from pyluce.native.ggml import GGMLType, ggml_nbytes, ggml_view_1d
from pyluce.native.ggml_backend import ggml_backend_tensor_copy, ggml_backend_tensor_set, ggml_backend_view_init
from pyluce.native.tensors import TensorArena, tensor_struct
from pyluce.state.pages import PAGE_TOKENS, PageAllocator, pages_for

if TYPE_CHECKING:
    from pyluce.weights import HParams

KV_TYPES = {"f16": GGMLType.F16, "f32": GGMLType.F32}


@dataclass(frozen=True, slots=True)
class StateOptions:
    """Sizes of the pool. `ring` states are kept a slot; `reach` tokens can be rolled back, less than `ring`.

    `conv_margin`, `ple_margin`: convolution inputs kept beyond the taps; `reach` + 1 at least (tests take less, and see
    rollback fail).
    """

    n_slots: int
    n_ctx: int
    kv_type: str
    reach: int
    ring: int
    conv_margin: int
    ple_margin: int


class StatePool:
    """Allocates every part once and hands out slots. Its tensors are inputs of the graphs."""

    def __init__(self, backend: Backend, hparams: HParams, options: StateOptions) -> None:
        h = hparams
        self.hparams = h
        self.options = options
        self.pages_per_slot = pages_for(options.n_ctx)
        self.allocator = PageAllocator(options.n_slots * self.pages_per_slot + 1)
        self.n_cells = self.allocator.n_pages * PAGE_TOKENS
        self._free_slots = list(range(options.n_slots - 1, -1, -1))
        self._tables = np.zeros((options.n_slots, self.pages_per_slot), np.int32)
        self.gdn: dict[int, int] = {}
        self.conv: dict[int, int] = {}
        self.k: dict[int, int] = {}
        self.v: dict[int, int] = {}
        self.raw: dict[int, int] = {}
        self.pooled: dict[int, int] = {}
        self.ple: int | None = None

        n_tensors = 4 * h.n_layer + 4
        self.arena = TensorArena.for_counts(n_tensors)
        kv = KV_TYPES[options.kv_type]
        kv_width = h.head_dim * h.n_head_kv
        slots, ring, f32 = options.n_slots, options.ring, GGMLType.F32
        for layer, recurrent in enumerate(h.recurrent_layers):
            if recurrent:
                self.gdn[layer] = self._new(f32, (h.ssm_state**2 * h.ssm_v_heads, ring, slots), f"gdn.{layer}")
                history = h.ssm_conv_kernel - 1 + options.conv_margin
                self.conv[layer] = self._new(f32, (h.conv_channels, history, slots), f"conv.{layer}")
            else:
                self.k[layer] = self._new(kv, (kv_width, self.n_cells), f"k.{layer}")
                self.v[layer] = self._new(kv, (kv_width, self.n_cells), f"v.{layer}")
                self.raw[layer] = self._new(f32, (h.indexer_dim, self.n_cells), f"raw.{layer}")
                pooled = (h.indexer_dim, self.n_cells // h.compress_ratio)
                self.pooled[layer] = self._new(f32, pooled, f"pooled.{layer}")
        if h.ple is not None:
            history = (h.ple.conv_kernel - 1) * h.ple.ngram_size + options.ple_margin
            self.ple = self._new(f32, (h.hc_count * h.n_embd, history, slots), "ple")
        self.pages = self._new(GGMLType.I32, (self.pages_per_slot, slots), "pages")
        self.buffer = BackendBuffer.for_arena(self.arena, backend.buffer_type)
        self.buffer.clear(0)

    def _new(self, kind: GGMLType, ne: tuple[int, ...], name: str) -> int:
        return self.arena.new_tensor(kind, ne, name)

    # slots and pages

    def take_slot(self) -> int:
        """A free slot. Raises RuntimeError when all are taken."""
        if not self._free_slots:
            raise RuntimeError(f"all {self.options.n_slots} slots are taken; free a sequence first")
        return self._free_slots.pop()

    def give_slot(self, slot: int) -> None:
        """Return a slot; what it holds is garbage from now on."""
        self._free_slots.append(slot)

    @property
    def n_free_slots(self) -> int:
        """Slots that no sequence holds."""
        return len(self._free_slots)

    def publish_pages(self, slot: int, pages: list[int]) -> None:
        """Write a sequence's page table where the graphs read it, if it changed."""
        row = self._tables[slot]
        if len(pages) and not np.array_equal(row[: len(pages)], pages):
            row[: len(pages)] = pages
            self._write(self.pages, row, slot * row.nbytes)

    def cells(self, pages: list[int], first: int, count: int) -> npt.NDArray[np.int64]:
        """Physical cells of positions first .. first + count - 1."""
        positions = np.arange(first, first + count)
        table = np.asarray(pages, np.int64)
        return table[positions // PAGE_TOKENS] * PAGE_TOKENS + positions % PAGE_TOKENS

    @property
    def scratch_cell(self) -> int:
        """Where padding rows write their keys and values."""
        return self.n_cells - 1

    # moving state

    def _slot_parts(self) -> list[int]:
        return [*self.gdn.values(), *self.conv.values(), *([self.ple] if self.ple is not None else [])]

    def copy_slot(self, source: int, target: int) -> None:
        """Copy every recurrent part of one slot to another, on the device."""
        for tensor in self._slot_parts():
            size = ggml_nbytes(tensor) // self.options.n_slots
            self._copy(tensor, source * size, target * size, size)

    def copy_page(self, source: int, target: int) -> None:
        """Copy the rows of one page to another in every full-attention layer, on the device."""
        for part in (self.k, self.v, self.raw, self.pooled):
            for tensor in part.values():
                size = ggml_nbytes(tensor) // self.allocator.n_pages
                self._copy(tensor, source * size, target * size, size)

    @staticmethod
    def _write(tensor: int, values: npt.NDArray[np.generic], offset_bytes: int) -> None:
        """Overwrite the part of a tensor that starts at `offset_bytes`."""
        if offset_bytes + values.nbytes > ggml_nbytes(tensor):
            raise ValueError(
                f"{values.nbytes} bytes at {offset_bytes} lie beyond a tensor of {ggml_nbytes(tensor)} bytes"
            )
        ggml_backend_tensor_set(tensor, values.ctypes.data, offset_bytes, values.nbytes)

    def _copy(self, tensor: int, source: int, target: int, size: int) -> None:
        kind = GGMLType(tensor_struct(tensor).type)
        width = 2 if kind is GGMLType.F16 else 4
        with TensorArena.for_counts(2) as scratch:
            views = [ggml_view_1d(scratch.ptr, tensor, size // width, offset) for offset in (source, target)]
            for view in views:
                check_status(ggml_backend_view_init(view), "ggml_backend_view_init")
            ggml_backend_tensor_copy(views[0], views[1])

    def poison_free(self) -> None:
        """Fill everything that no sequence holds with NaN, so that a test sees whoever reads it."""
        for tensor in self._slot_parts():
            size = ggml_nbytes(tensor) // self.options.n_slots
            nan = np.full(size // 4, np.nan, np.float32)
            for slot in self._free_slots:
                self._write(tensor, nan, slot * size)
        free = self.allocator.free_pages()
        for part in (self.k, self.v, self.raw, self.pooled):
            for tensor in part.values():
                size = ggml_nbytes(tensor) // self.allocator.n_pages
                dtype = np.float16 if tensor_struct(tensor).type == GGMLType.F16 else np.float32
                nan = np.full(size // np.dtype(dtype).itemsize, np.nan, dtype)
                for page in free:
                    self._write(tensor, nan, page * size)

    def report(self) -> dict[str, int]:
        """Bytes of each kind of state."""
        kv = sum(ggml_nbytes(t) for part in (self.k, self.v) for t in part.values())
        indexer = sum(ggml_nbytes(t) for part in (self.raw, self.pooled) for t in part.values())
        recurrent = sum(ggml_nbytes(t) for t in self._slot_parts())
        return {
            "kv_bytes": kv,
            "indexer_bytes": indexer,
            "recurrent_bytes": recurrent,
            "total_bytes": self.buffer.n_bytes,
        }

    def close(self) -> None:
        """Free the buffer. Idempotent."""
        self.buffer.close()
        self.arena.close()
