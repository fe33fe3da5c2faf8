"""The memory of all sequences: one tensor a layer and part (`layout.py`), addressed by slot or by page."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from pyluce.native.backend import Backend, BackendBuffer, check_status
from pyluce.native.ggml import GGMLType, ggml_nbytes, ggml_view_1d
from pyluce.native.ggml_backend import (
    ggml_backend_tensor_copy,
    ggml_backend_tensor_get,
    ggml_backend_tensor_set,
    ggml_backend_view_init,
)
from pyluce.native.tensors import TensorArena, tensor_struct
from pyluce.state.layout import StateOptions, StatePart, state_layout
from pyluce.state.pages import PAGE_TOKENS, PageAllocator

if TYPE_CHECKING:
    from pyluce.weights import HParams


class StatePool:
    """Allocates every part once and hands out slots. Its tensors are inputs of the graphs."""

    def __init__(self, backend: Backend, hparams: HParams, options: StateOptions) -> None:
        h = hparams
        self.hparams = h
        self.options = options
        self.pages_per_slot = options.pages_per_slot
        self.allocator = PageAllocator(options.n_pages)
        self.n_cells = options.n_cells
        self._free_slots = list(range(options.n_slots - 1, -1, -1))
        self._tables = np.zeros((options.n_slots, self.pages_per_slot), np.int32)
        self.gdn: dict[int, int] = {}
        self.conv: dict[int, int] = {}
        self.k: dict[int, int] = {}
        self.v: dict[int, int] = {}
        self.raw: dict[int, int] = {}
        self.pooled: dict[int, int] = {}
        self.ple: int | None = None
        self.hidden: int | None = None

        layout = state_layout(h, options)
        self.arena = TensorArena.for_counts(len(layout))
        by_layer = {
            "gdn": self.gdn,
            "conv": self.conv,
            "k": self.k,
            "v": self.v,
            "raw": self.raw,
            "pooled": self.pooled,
        }
        for part in layout:
            tensor = self._new(part)
            if part.layer is not None:
                by_layer[part.kind][part.layer] = tensor
            elif part.kind == "ple":
                self.ple = tensor
            elif part.kind == "hidden":
                self.hidden = tensor
            else:
                self.pages = tensor
        self.buffer = self._allocate(backend)

    def _allocate(self, backend: Backend) -> BackendBuffer:
        buffer = BackendBuffer.for_arena(self.arena, backend.buffer_type)
        buffer.clear(0)
        return buffer

    def _new(self, part: StatePart) -> int:
        return self.arena.new_tensor(part.type, part.ne, part.name)

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
        return [*self.gdn.values(), *self.conv.values(), *(t for t in (self.ple, self.hidden) if t is not None)]

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

    @property
    def page_bytes(self) -> int:
        """Bytes of one page in all full-attention layers."""
        tensors = [t for part in (self.k, self.v, self.raw, self.pooled) for t in part.values()]
        return sum(ggml_nbytes(t) // self.allocator.n_pages for t in tensors)

    def _paged(self) -> Iterator[int]:
        for part in (self.k, self.v, self.raw, self.pooled):
            yield from part.values()

    def page_parts(self) -> tuple[tuple[str, int], ...]:
        """Names and bytes of what a page consists of, in the order of `read_page`."""
        return tuple((_name(t), ggml_nbytes(t) // self.allocator.n_pages) for t in self._paged())

    def recurrent_parts(self, length: int) -> tuple[tuple[str, int], ...]:
        """Names and bytes of what `capture` holds, in its order."""
        sizes: dict[str, int] = {}
        for tensor, _, size in self._recurrent_pieces(0, length):
            sizes[_name(tensor)] = sizes.get(_name(tensor), 0) + size
        return tuple(sizes.items())

    def read_page(self, page: int, out: npt.NDArray[np.uint8], n_tokens: int = PAGE_TOKENS) -> None:
        """Copy a page into out [page_bytes]; rows beyond its first `n_tokens` tokens become zero."""
        at = 0
        for tensor in self._paged():
            size = ggml_nbytes(tensor) // self.allocator.n_pages
            n_rows = tensor_struct(tensor).ne[1] // self.allocator.n_pages
            used = size // n_rows * (n_tokens * n_rows // PAGE_TOKENS)
            if used:
                ggml_backend_tensor_get(tensor, out.ctypes.data + at, page * size, used)
            out[at + used : at + size] = 0
            at += size

    def write_page(self, page: int, data: npt.NDArray[np.uint8]) -> None:
        """Put what `read_page` read into any page. ValueError when it has another size."""
        if data.nbytes != self.page_bytes:
            raise ValueError(f"expected {self.page_bytes} bytes of a page, found {data.nbytes}")
        at = 0
        for tensor in self._paged():
            size = ggml_nbytes(tensor) // self.allocator.n_pages
            ggml_backend_tensor_set(tensor, data.ctypes.data + at, page * size, size)
            at += size

    def settled_pages(self, length: int) -> int:
        """How many pages of a state of `length` tokens no later step writes into (the draft head's last keys come a token late)."""
        return max(0, length - 1 if self.options.mtp else length) // PAGE_TOKENS

    def _recurrent_pieces(self, slot: int, length: int) -> Iterator[tuple[int, int, int]]:
        """(tensor, offset, bytes) of what a sequence of `length` tokens in this slot still needs of its recurrent parts.

        The state after `length` tokens, and the convolution inputs of the positions that the taps of the next reach.
        """
        h = self.hparams
        for tensor in self.gdn.values():
            ne = tensor_struct(tensor).ne
            yield tensor, (slot * ne[1] + length % ne[1]) * ne[0] * 4, ne[0] * 4
        histories = [(tensor, h.ssm_conv_kernel - 1) for tensor in self.conv.values()]
        if self.ple is not None and h.ple is not None:
            histories.append((self.ple, (h.ple.conv_kernel - 1) * h.ple.ngram_size))
        for tensor, reach in histories:
            ne = tensor_struct(tensor).ne
            for position in range(max(0, length - reach), length):
                yield tensor, (slot * ne[1] + position % ne[1]) * ne[0] * 4, ne[0] * 4
        if self.hidden is not None and length:
            width = tensor_struct(self.hidden).ne[0] * 4
            yield self.hidden, self.hidden_entry(slot, length - 1) * width, width

    def hidden_entry(self, slot: int, position: int) -> int:
        """Row of `hidden` that holds the trunk's residual after this position."""
        ring = self.options.hidden_ring
        return slot * (ring + 1) + position % ring

    def hidden_scratch(self, slot: int) -> int:
        """Row of `hidden` that nobody reads."""
        return (slot + 1) * (self.options.hidden_ring + 1) - 1

    def capture(self, slot: int, length: int) -> npt.NDArray[np.uint8]:
        """A copy of the recurrent state of a sequence of `length` tokens, without a trace of its slot."""
        pieces = list(self._recurrent_pieces(slot, length))
        out = np.empty(sum(size for _, _, size in pieces), np.uint8)
        at = 0
        for tensor, offset, size in pieces:
            ggml_backend_tensor_get(tensor, out.ctypes.data + at, offset, size)
            at += size
        return out

    def install(self, slot: int, length: int, data: npt.NDArray[np.uint8]) -> None:
        """Put a captured state of `length` tokens into any slot. ValueError when it belongs to another model or length."""
        pieces = list(self._recurrent_pieces(slot, length))
        expected = sum(size for _, _, size in pieces)
        if data.nbytes != expected:
            raise ValueError(f"expected {expected} bytes of recurrent state at {length} tokens, found {data.nbytes}")
        at = 0
        for tensor, offset, size in pieces:
            ggml_backend_tensor_set(tensor, data.ctypes.data + at, offset, size)
            at += size

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

    @property
    def host_bytes(self) -> int:
        """Bytes of the page tables' copy on the host."""
        return self._tables.nbytes

    def report(self) -> dict[str, int]:
        """Bytes of each kind of state; `hidden_size` of them are among the recurrent ones."""
        kv = sum(ggml_nbytes(t) for part in (self.k, self.v) for t in part.values())
        indexer = sum(ggml_nbytes(t) for part in (self.raw, self.pooled) for t in part.values())
        recurrent = sum(ggml_nbytes(t) for t in self._slot_parts())
        return {
            "kv_bytes": kv,
            "indexer_bytes": indexer,
            "recurrent_bytes": recurrent,
            "hidden_size": ggml_nbytes(self.hidden) if self.hidden is not None else 0,
            "total_bytes": self.buffer.n_bytes,
        }

    def close(self) -> None:
        """Free the buffer. Idempotent."""
        self.buffer.close()
        self.arena.close()


def _name(tensor: int) -> str:
    return bytes(tensor_struct(tensor).name).rstrip(b"\0").decode()
