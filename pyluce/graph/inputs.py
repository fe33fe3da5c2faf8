"""Fills the inputs of a step graph: which slots, positions and cells its rows are, their embeddings and angles.

On a host backend the inputs are written in place (numpy views of the tensors' memory), elsewhere into staging memory.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from struct import pack_into

import numpy as np
import numpy.typing as npt

from pyluce.graph.ahead import Ahead, Stretch
from pyluce.graph.arrays import FEW_ROWS, InputArrays, aligned
from pyluce.graph.chunks import pad_rows
from pyluce.graph.groups import Group
from pyluce.graph.mtp_inputs import FillArrays, FillWriter
from pyluce.graph.rope import RopeTable
from pyluce.graph.staging import Staging
from pyluce.graph.trunk import StepGraph
from pyluce.native.errors import NativeError
from pyluce.native.luce import Phase, ggml_luce_dequantize_rows
from pyluce.state import SequenceState, StatePool
from pyluce.state.pages import PAGE_TOKENS
from pyluce.weights import (
    FEW_TOKENS,
    GatherCounts,
    ModelFile,
    PleTable,
    ple_few_row_ids,
    ple_row_ids,
    ple_window_row_ids,
)


class StepArrays(InputArrays):
    """Of a trunk step; `fill`: what it leaves for the draft head, with one."""

    def __init__(self, graph: StepGraph, staging: Staging | None, block: int) -> None:
        super().__init__(graph.tensors, staging, block)
        self.embd = self.of("embd", np.float32)
        self.ple = self.maybe("ple", np.float32)
        self.rows = self.of("rows", np.int32)
        self.cells = self.of("cells", np.int64)[0]
        self.rope = self.of("rope", np.float32)
        self.block_rope = self.of("block_rope", np.float32)
        out_rows = self.maybe("out_rows", np.int32)
        self.out_rows = None if out_rows is None else out_rows[0]
        self.fill = FillArrays.of(self) if graph.fill is not None else None
        self.embd_address = self.embd.ctypes.data
        self.ple_address = 0 if self.ple is None else self.ple.ctypes.data


class InputWriter:
    """Writes steps of one model. `write` changes no state.

    With `staging`, inputs go to the device from there, and a chunk that is said to come next is prepared while the device computes.
    Rows of the n-gram table are counted when a step uses them: those prepared for a chunk that never ran are not.
    """

    def __init__(
        self,
        model: ModelFile,
        pool: StatePool,
        ple: PleTable | None,
        staging: Staging | None,
        fault: str | None = None,
    ) -> None:
        h = model.hparams
        self._fills = FillWriter(h, pool, stale_keys=fault == "stale_mtp")
        self._hparams = h
        self._pool = pool
        self._ple = ple
        self._staging = staging
        self._rope = RopeTable(h.rope_dim, h.rope_freq_base)
        self._embedding = model.tensors["token_embd.weight"]
        self._embedding_address = model.address(self._embedding)
        self._embedding_row_bytes = self._embedding.row_bytes
        self._buffers: dict[StepGraph, list[StepArrays | None]] = {}
        self._stale: dict[int, list[int]] | None = {} if fault == "stale_ngram" else None
        self._n_back = h.ple.ngram_size - 1 if h.ple is not None else 0
        self.ahead = Ahead(self._fill) if staging is not None and fault is None else None
        self._block = 0

    @property
    def host_bytes(self) -> int:
        """Bytes of angles, and of inputs on their way to a device."""
        return self._rope.n_bytes + (2 * self._staging.block_bytes if self._staging is not None else 0)

    def reserve(self, graph: StepGraph) -> None:
        """Have room for the inputs of a new graph."""
        if self._staging is None or graph.tensors.n_bytes <= self._staging.block_bytes:
            return
        if self.ahead is not None:
            self.ahead.drop()
        self._buffers.clear()
        self._staging.grow(graph.tensors.n_bytes)

    def forget(self, graph: StepGraph) -> None:
        """The graph is about to be closed."""
        self._buffers.pop(graph, None)

    def close(self) -> None:
        """Stop preparing. Idempotent."""
        if self.ahead is not None:
            self.ahead.close()

    def stretch(self, before: Sequence[int], first: int, tokens: Sequence[int]) -> Stretch:
        """The chunk `tokens` at position `first`, after tokens that end with `before`."""
        window = tuple(before[-self._n_back :]) if self._n_back else ()
        return Stretch(window, first, tuple(tokens), pad_rows(len(tokens)))

    def expect(self, stretch: Stretch) -> None:
        """Called between `write` and the step it was for: this chunk comes next, as far as one knows."""
        if self.ahead is not None:
            self.ahead.start(stretch, self._block)

    def computed(self) -> None:
        """The step that was written has ended."""
        if self._staging is not None:
            self._staging.computed()

    def write(self, graph: StepGraph, groups: list[Group], n_rows: int, n_out: int) -> None:
        """Inputs of a step: each group adds its tokens to its sequence; rows beyond `n_rows` are padding.

        Logits are wanted of the last `n_out` rows; the graph's further logits rows repeat the last.
        """
        if self._staging is not None:
            self._staging.settle()
        ready = self._take(graph, groups)
        into = self._arrays(graph)
        if n_rows <= FEW_ROWS:
            self._write_few(into, groups, ready)
        else:
            at = 0
            for state, tokens in groups:
                self._write_group(into, at, state, tokens, ready)
                at += len(tokens)
        if len(into.rows) > n_rows:
            self._pad(into, n_rows)
        if not ready:
            self.embed(into.embd_address, [token for _, tokens in groups for token in tokens])
        if into.fill is not None:
            self._fills.write(into.fill, groups, n_rows)
        if into.out_rows is not None:
            into.out_rows[:] = n_rows - 1
            into.out_rows[:n_out] = np.arange(n_rows - n_out, n_rows)
        into.send()

    def _take(self, graph: StepGraph, groups: list[Group]) -> bool:
        """Choose the step's block of staging memory; True when embedding and n-gram rows are in it already."""
        if self.ahead is None:
            return False
        if graph.key.phase is Phase.CHUNK and len(groups) == 1:
            state, tokens = groups[0]
            taken = self.ahead.take(self.stretch(state.tokens, state.length, tokens))
            if taken is not None:
                self._block, counts = taken
                if self._ple is not None:
                    self._ple.count(counts)
                return True
        self._block = self.ahead.free_block
        return False

    def _fill(self, stretch: Stretch, block: int) -> GatherCounts:
        """Embedding, n-gram rows and angles of a stretch, on the thread that works ahead."""
        h, n = self._hparams, len(stretch.tokens)
        assert self._staging is not None
        embd = self._staging.array(block, 0, (stretch.n_rows, h.n_embd), np.float32)
        counts = GatherCounts()
        if h.ple is not None and self._ple is not None:
            width = h.ple.n_heads * h.ple.head_dim
            ple = self._staging.array(block, aligned(embd.nbytes), (stretch.n_rows, width), np.float32)
            counts = self._ple.gather_into(ple_row_ids(h.ple, stretch.tokens, stretch.before), ple[:n])
        self.embed(embd.ctypes.data, list(stretch.tokens))
        self._rope.warm(stretch.first, n)
        return counts

    def _arrays(self, graph: StepGraph) -> StepArrays:
        """Those of the block that the step was given."""
        found = self._buffers.setdefault(graph, [None, None])
        made = found[self._block]
        if made is None:
            made = found[self._block] = StepArrays(graph, self._staging, self._block)
        return made

    def _gather(self, ids: npt.NDArray[np.int64], out: npt.NDArray[np.float32]) -> None:
        assert self._ple is not None
        self._ple.count(self._ple.gather_into(ids, out))

    def _write_few(self, into: StepArrays, groups: list[Group], ready: bool) -> None:
        """All rows of a step together."""
        h, n_back = self._hparams, 0 if ready else self._n_back
        rows: list[int] = []
        positions: list[int] = []
        cells: list[int] = []
        windows: list[list[int]] = []
        for state, tokens in groups:
            slot, first, pages = state.slot, state.length, state.pages
            for position in range(first, first + len(tokens)):
                rows += (slot, position, 0, 0)
                positions.append(position)
                cells.append(pages[position // PAGE_TOKENS] * PAGE_TOKENS + position % PAGE_TOKENS)
            if n_back:
                before = self._previous(state, tokens)[-n_back:]
                seen = [-1] * (n_back - len(before)) + before + tokens
                windows += [seen[i : i + n_back + 1] for i in range(len(tokens))]
        ratio = h.compress_ratio
        pack_into(f"{len(rows)}i", into.rows.data, 0, *rows)
        pack_into(f"{len(cells)}q", into.cells.data, 0, *cells)
        self._rope.fill_at(into.rope, positions)
        self._rope.fill_at(into.block_rope, [position // ratio * ratio for position in positions])
        if h.ple is not None and self._ple is not None and not ready:
            if len(windows) <= FEW_TOKENS:
                counts = self._ple.gather_few(ple_few_row_ids(h.ple, windows), into.ple_address)
                self._ple.count(counts)
            elif into.ple is not None:
                self._gather(ple_window_row_ids(h.ple, windows), into.ple[: len(windows)])

    def _write_group(self, into: StepArrays, at: int, state: SequenceState, tokens: list[int], ready: bool) -> None:
        """The rows from `at` on: a stretch of one sequence."""
        h = self._hparams
        first, count = state.length, len(tokens)
        end = at + count
        into.rows[at:end, 0] = state.slot
        into.rows[at:end, 1] = np.arange(first, first + count)
        into.rows[at:end, 2:] = 0
        into.cells[at:end] = self._pool.cells(state.pages, first, count)
        self._rope.fill(into.rope[at:end], first)
        self._rope.fill_block_starts(into.block_rope[at:end], first, h.compress_ratio)
        if into.ple is not None and h.ple is not None and not ready:
            ids = ple_row_ids(h.ple, tokens, self._previous(state, tokens)[1 - h.ple.ngram_size :])
            self._gather(ids, into.ple[at:end])

    def _previous(self, state: SequenceState, tokens: list[int]) -> list[int]:
        """The sequence's tokens so far; under the planted fault, what its slot was given whatever became of it."""
        if self._stale is None:
            return state.tokens
        seen = self._stale.setdefault(state.slot, [])
        before = list(seen)
        seen.extend(tokens)
        return before

    def _pad(self, into: StepArrays, n_rows: int) -> None:
        """Rows that belong to no sequence: slot -1, zero inputs, the scratch cell."""
        into.rows[n_rows:] = (-1, 0, 0, 0)
        into.cells[n_rows:] = self._pool.scratch_cell
        for values in (into.rope, into.block_rope, into.embd, into.ple):
            if values is not None:
                values[n_rows:] = 0.0

    def embed(self, address: int, tokens: list[int]) -> None:
        """Embedding rows of the tokens, widened to F32 [T, n_embd] at an address."""
        info = self._embedding
        ids = array("q", tokens)
        if not ggml_luce_dequantize_rows(
            info.type_id,
            self._embedding_address,
            self._embedding_row_bytes,
            ids.buffer_info()[0],
            len(tokens),
            info.ne[0],
            address,
        ):
            raise NativeError(f"token_embd.weight: type {info.type_id} cannot be widened to F32")
