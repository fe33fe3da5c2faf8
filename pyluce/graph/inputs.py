"""Fills the inputs of a step graph: which slots, positions and cells its rows are, their embeddings and angles.

On a host backend the inputs are written in place (numpy views of the tensors' memory), elsewhere through a copy each.
"""

from __future__ import annotations

import ctypes
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt

from pyluce.graph.trunk import StepGraph
from pyluce.native.errors import NativeError
from pyluce.native.luce import ggml_luce_dequantize_rows
from pyluce.native.tensors import tensor_get, tensor_set, tensor_struct
from pyluce.state import SequenceState, StatePool
from pyluce.state.pages import PAGE_TOKENS
from pyluce.weights import ModelFile, PleTable, ple_row_ids, ple_window_row_ids

Group = tuple[SequenceState, list[int]]
S = TypeVar("S", bound=np.generic)

FEW_ROWS: Final = 64
"""Up to this many rows are written together, whichever sequences they belong to: a numpy call costs as much as a row."""


def host_array(tensor: int, dtype: type[S]) -> npt.NDArray[S]:
    """A tensor's own memory on a host backend, [ne1, ne0] for one or two axes."""
    header = tensor_struct(tensor)
    shape = (header.ne[1], header.ne[0])
    size = shape[0] * shape[1] * np.dtype(dtype).itemsize
    return np.frombuffer((ctypes.c_char * size).from_address(header.data), dtype).reshape(shape)


def read_rows(tensor: int, first: int, count: int, on_host: bool) -> npt.NDArray[np.float32]:
    """A copy of rows of an F32 result [ne1, ne0]; on a host backend only of those."""
    if on_host:
        return host_array(tensor, np.float32)[first : first + count].copy()
    header = tensor_struct(tensor)
    return tensor_get(tensor, np.float32, (header.ne[1], header.ne[0]))[first : first + count]


class RopeTable:
    """cos | sin of every position's angles, F32 [rope_dim] each, computed block by block when first needed.

    angle_i = position * base^(-2i / rope_dim) in float32, as the model's reference computes it; text positions are the
    same in all M-RoPE sections, so the sections do not matter.
    """

    BLOCK: Final = 4096

    def __init__(self, rope_dim: int, base: float) -> None:
        exponents = np.arange(0, rope_dim, 2, dtype=np.float32) / np.float32(rope_dim)
        self._frequency = (np.float32(1.0) / np.float32(base) ** exponents).astype(np.float32)
        self._blocks: dict[int, npt.NDArray[np.float32]] = {}

    def fill(self, out: npt.NDArray[np.float32], first: int) -> None:
        """Rows of `out` [n, rope_dim] for the positions first .. first + n - 1."""
        done = 0
        while done < len(out):
            block, at = divmod(first + done, self.BLOCK)
            count = min(len(out) - done, self.BLOCK - at)
            out[done : done + count] = self._block(block)[at : at + count]
            done += count

    def fill_block_starts(self, out: npt.NDArray[np.float32], first: int, ratio: int) -> None:
        """Rows of `out` [n, rope_dim] for the first positions of the blocks of `ratio` that the rows lie in."""
        starts = np.arange(first, first + len(out)) // ratio * ratio
        for block in range(int(starts[0]) // self.BLOCK, int(starts[-1]) // self.BLOCK + 1):
            chosen = starts // self.BLOCK == block
            out[chosen] = self._block(block)[starts[chosen] % self.BLOCK]

    def fill_at(self, out: npt.NDArray[np.float32], positions: list[int]) -> None:
        """Rows of `out` [n, rope_dim] for a few positions."""
        for row, position in enumerate(positions):
            out[row] = self._block(position // self.BLOCK)[position % self.BLOCK]

    @property
    def n_bytes(self) -> int:
        """Bytes of the angles that were computed so far."""
        return sum(block.nbytes for block in self._blocks.values())

    def _block(self, index: int) -> npt.NDArray[np.float32]:
        if index not in self._blocks:
            positions = np.arange(index * self.BLOCK, (index + 1) * self.BLOCK, dtype=np.float32)
            angles = (positions[:, None] * self._frequency[None, :]).astype(np.float64)
            self._blocks[index] = np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
        return self._blocks[index]


class InputBuffers:
    """Arrays to fill for one step graph, numpy order (slowest axis first); `send` brings them to the device."""

    def __init__(self, graph: StepGraph, on_host: bool) -> None:
        step = graph.inputs
        self._copies: list[tuple[int, npt.NDArray[Any]]] = []
        self._on_host = on_host
        self.rows = self._array(step.rows, np.int32)
        self.cells = self._array(step.cells, np.int64)[0]
        self.rope = self._array(step.rope, np.float32)
        self.block_rope = self._array(step.block_rope, np.float32)
        self.embd = self._array(step.embd, np.float32)
        self.ple = None if step.ple is None else self._array(step.ple, np.float32)
        self.out_rows = None if step.out_rows is None else self._array(step.out_rows, np.int32)[0]

    def _array(self, tensor: int, dtype: type[S]) -> npt.NDArray[S]:
        if self._on_host:
            return host_array(tensor, dtype)
        header = tensor_struct(tensor)
        array = np.zeros((header.ne[1], header.ne[0]), dtype)
        self._copies.append((tensor, array))
        return array

    @property
    def n_bytes(self) -> int:
        """Bytes of the arrays that are not the device's own memory."""
        return sum(array.nbytes for _, array in self._copies)

    def send(self) -> None:
        """Copy what is not written in place."""
        for tensor, array in self._copies:
            tensor_set(tensor, array)


class InputWriter:
    """Writes steps of one model. `write` changes no state."""

    def __init__(
        self, model: ModelFile, pool: StatePool, ple: PleTable | None, on_host: bool, stale_ngram: bool = False
    ) -> None:
        h = model.hparams
        self._hparams = h
        self._model = model
        self._pool = pool
        self._ple = ple
        self._on_host = on_host
        self._rope = RopeTable(h.rope_dim, h.rope_freq_base)
        self._embedding = model.tensors["token_embd.weight"]
        self._buffers: dict[StepGraph, InputBuffers] = {}
        self._stale: dict[int, list[int]] | None = {} if stale_ngram else None

    @property
    def host_bytes(self) -> int:
        """Bytes of angles, and of inputs on their way to a device."""
        return self._rope.n_bytes + sum(buffers.n_bytes for buffers in self._buffers.values())

    def forget(self, graph: StepGraph) -> None:
        """The graph is about to be closed."""
        self._buffers.pop(graph, None)

    def write(self, graph: StepGraph, groups: list[Group], n_rows: int, n_out: int) -> None:
        """Inputs of a step: each group adds its tokens to its sequence; rows beyond `n_rows` are padding.

        Logits are wanted of the last `n_out` rows; the graph's further logits rows repeat the last.
        """
        into = self._buffers.get(graph)
        if into is None:
            into = self._buffers[graph] = InputBuffers(graph, self._on_host)
        if n_rows <= FEW_ROWS:
            self._write_few(into, groups)
        else:
            at = 0
            for state, tokens in groups:
                self._write_group(into, at, state, tokens)
                at += len(tokens)
        if len(into.rows) > n_rows:
            self._pad(into, n_rows)
        self._embed(into.embd, [token for _, tokens in groups for token in tokens])
        if into.out_rows is not None:
            into.out_rows[:] = n_rows - 1
            into.out_rows[:n_out] = np.arange(n_rows - n_out, n_rows)
        into.send()

    def _write_few(self, into: InputBuffers, groups: list[Group]) -> None:
        """All rows of a step together."""
        h = self._hparams
        n_back = h.ple.ngram_size - 1 if h.ple is not None else 0
        slots: list[int] = []
        positions: list[int] = []
        cells: list[int] = []
        windows: list[list[int]] = []
        for state, tokens in groups:
            slot, first, pages = state.slot, state.length, state.pages
            for position in range(first, first + len(tokens)):
                slots.append(slot)
                positions.append(position)
                cells.append(pages[position // PAGE_TOKENS] * PAGE_TOKENS + position % PAGE_TOKENS)
            if n_back:
                before = self._previous(state, tokens)[-n_back:]
                seen = [-1] * (n_back - len(before)) + before + tokens
                windows += [seen[i : i + n_back + 1] for i in range(len(tokens))]
        n, ratio = len(slots), h.compress_ratio
        into.rows[:n, 0] = slots
        into.rows[:n, 1] = positions
        into.cells[:n] = cells
        self._rope.fill_at(into.rope, positions)
        self._rope.fill_at(into.block_rope, [position // ratio * ratio for position in positions])
        if into.ple is not None and h.ple is not None and self._ple is not None:
            into.ple[:n] = self._ple.gather(ple_window_row_ids(h.ple, windows)).reshape(n, -1)

    def _write_group(self, into: InputBuffers, at: int, state: SequenceState, tokens: list[int]) -> None:
        """The rows from `at` on: a stretch of one sequence."""
        h = self._hparams
        first, count = state.length, len(tokens)
        end = at + count
        into.rows[at:end, 0] = state.slot
        into.rows[at:end, 1] = np.arange(first, first + count)
        into.cells[at:end] = self._pool.cells(state.pages, first, count)
        self._rope.fill(into.rope[at:end], first)
        self._rope.fill_block_starts(into.block_rope[at:end], first, h.compress_ratio)
        if into.ple is not None and h.ple is not None and self._ple is not None:
            ids = ple_row_ids(h.ple, tokens, self._previous(state, tokens)[1 - h.ple.ngram_size :])
            into.ple[at:end] = self._ple.gather(ids).reshape(count, -1)

    def _previous(self, state: SequenceState, tokens: list[int]) -> list[int]:
        """The sequence's tokens so far; under the planted fault, what its slot was given whatever became of it."""
        if self._stale is None:
            return state.tokens
        seen = self._stale.setdefault(state.slot, [])
        before = list(seen)
        seen.extend(tokens)
        return before

    def _pad(self, into: InputBuffers, n_rows: int) -> None:
        """Rows that belong to no sequence: slot -1, zero inputs, the scratch cell."""
        into.rows[n_rows:] = (-1, 0, 0, 0)
        into.cells[n_rows:] = self._pool.scratch_cell
        for array in (into.rope, into.block_rope, into.embd, into.ple):
            if array is not None:
                array[n_rows:] = 0.0

    def _embed(self, out: npt.NDArray[np.float32], tokens: list[int]) -> None:
        """The first rows of `out` [T, n_embd]: embedding rows of the tokens, widened to F32."""
        info = self._embedding
        ids = np.asarray(tokens, np.int64)
        row_bytes = info.nbytes // info.ne[1]
        if not ggml_luce_dequantize_rows(
            info.type_id,
            self._model.address(info),
            row_bytes,
            ids.ctypes.data,
            len(tokens),
            info.ne[0],
            out.ctypes.data,
        ):
            raise NativeError(f"token_embd.weight: type {info.type_id} cannot be widened to F32")
