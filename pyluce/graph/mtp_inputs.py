"""Fills the inputs of the draft head: of what a trunk step leaves for it, and of a draft graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pyluce.graph.arrays import InputArrays
from pyluce.graph.groups import Group
from pyluce.graph.mtp import DraftGraph
from pyluce.graph.rope import RopeTable
from pyluce.graph.staging import Staging
from pyluce.state import SequenceState, StatePool
from pyluce.state.pages import PAGE_TOKENS
from pyluce.weights import HParams

DraftRequest = tuple[SequenceState, int, int]
Embed = Callable[[int, list[int]], None]


@dataclass(frozen=True, slots=True)
class FillArrays:
    """The arrays of `FillInputs`."""

    source: npt.NDArray[np.int32]
    pick: npt.NDArray[np.int32] | None
    keep: npt.NDArray[np.int32] | None
    target: npt.NDArray[np.int64]
    rope: npt.NDArray[np.float32]
    cells: npt.NDArray[np.int64]

    @classmethod
    def of(cls, arrays: InputArrays) -> FillArrays:
        """The last ones of a trunk step."""
        source = arrays.of("hidden_source", np.int32)[0]
        pick, keep = arrays.maybe("hidden_pick", np.int32), arrays.maybe("hidden_keep", np.int32)
        return cls(
            source,
            None if pick is None else pick[0],
            None if keep is None else keep[0],
            arrays.of("hidden_target", np.int64)[0],
            arrays.of("draft_rope", np.float32),
            arrays.of("draft_cells", np.int64)[0],
        )


class DraftArrays(InputArrays):
    """The arrays of `DraftInputs`."""

    def __init__(self, graph: DraftGraph, staging: Staging | None) -> None:
        super().__init__(graph.tensors, staging, 0)
        self.embd_address = self.of("embd", np.float32).ctypes.data
        self.source = self.of("source", np.int32)[0]
        self.rows = self.of("rows", np.int32)
        self.rope = self.of("rope", np.float32)
        self.cells = self.of("cells", np.int64)[0]
        self.pages = self.of("pages", np.int32)


class FillWriter:
    """Writes what a trunk step leaves for the head; its sequences still have the length before it.

    `stale_keys` plants a fault: decoded rows leave the head's keys as its drafts wrote them.
    """

    def __init__(self, hparams: HParams, pool: StatePool, stale_keys: bool = False) -> None:
        self._pool = pool
        self._stale_keys = stale_keys
        self._rope = RopeTable(hparams.rope_dim, hparams.rope_freq_base)

    def write(self, into: FillArrays, groups: list[Group], n_rows: int) -> None:
        """Rows beyond `n_rows` are padding."""
        into.cells[:] = self._pool.scratch_cell
        into.rope[:] = 0.0
        if into.pick is None:
            self._write_chunk(into, groups[0], n_rows)
        else:
            self._write_rows(into, into.pick, groups)

    def _write_chunk(self, into: FillArrays, group: Group, n_rows: int) -> None:
        """Rows f .. l - 1 of one sequence: the head's rows f - 1 .. l - 2, of which -1 is none."""
        state, tokens = group
        first, last = state.length, state.length + len(tokens)
        into.source[0] = self._pool.hidden_entry(state.slot, max(0, first - 1))
        assert into.keep is not None
        into.keep[0] = n_rows - 1
        into.target[0] = self._pool.hidden_entry(state.slot, last - 1)
        self._positions(into, state, 0, first - 1, last - 1)

    def _write_rows(self, into: FillArrays, pick: npt.NDArray[np.int32], groups: list[Group]) -> None:
        """A row graph: a sequence's first row reads the ring, the next ones the row before; the last R residuals stay."""
        n_entries, ring = len(pick), self._pool.options.hidden_ring
        at = 0
        for state, tokens in groups:
            count, first = len(tokens), state.length
            into.source[at : at + count] = self._pool.hidden_entry(state.slot, max(0, first - 1))
            pick[at] = at
            pick[at + 1 : at + count] = np.arange(n_entries + at, n_entries + at + count - 1)
            for i in range(count):
                kept = i >= count - ring
                scratch = self._pool.hidden_scratch(state.slot)
                into.target[at + i] = self._pool.hidden_entry(state.slot, first + i) if kept else scratch
            if not self._stale_keys:
                self._positions(into, state, at, first - 1, first + count - 1)
            at += count

    def _positions(self, into: FillArrays, state: SequenceState, at: int, first: int, last: int) -> None:
        """Cells and angles of positions first .. last - 1 for the rows from `at` on; position -1 stays padding."""
        if first < 0:
            first, at = 0, at + 1
        count = last - first
        if count > 0:
            into.cells[at : at + count] = self._pool.cells(state.pages, first, count)
            self._rope.fill(into.rope[at : at + count], first)


class DraftWriter:
    """Writes the inputs of draft graphs, on a device through staging memory."""

    def __init__(self, hparams: HParams, pool: StatePool, staging: Staging | None, embed: Embed) -> None:
        """`embed` writes the embedding rows of tokens to an address."""
        self._pool = pool
        self._staging = staging
        self._embed = embed
        self._rope = RopeTable(hparams.rope_dim, hparams.rope_freq_base)
        self._arrays: dict[DraftGraph, DraftArrays] = {}

    def reserve(self, graph: DraftGraph) -> None:
        """Have room for the inputs of a new graph."""
        if self._staging is not None and graph.tensors.n_bytes > self._staging.block_bytes:
            self._arrays.clear()
            self._staging.grow(graph.tensors.n_bytes)

    def forget(self, graph: DraftGraph) -> None:
        """The graph is about to be closed."""
        self._arrays.pop(graph, None)

    @property
    def host_bytes(self) -> int:
        """Bytes of inputs on their way to a device."""
        return 2 * self._staging.block_bytes if self._staging is not None else 0

    def computed(self) -> None:
        """The graph that was written has ended."""
        if self._staging is not None:
            self._staging.computed()

    def write(self, graph: DraftGraph, requests: list[DraftRequest]) -> None:
        """Inputs: (sequence, its next token, how many drafts) each; later steps of a sequence are padding."""
        if self._staging is not None:
            self._staging.settle()
        into = self._arrays.get(graph)
        if into is None:
            into = self._arrays[graph] = DraftArrays(graph, self._staging)
        b = graph.key.n_seqs
        into.rows[:] = (-1, 0, 0, 0)
        into.cells[:] = self._pool.scratch_cell
        into.rope[:] = 0.0
        into.pages[:, 0] = 0
        into.pages[:, 1:] = np.arange(
            graph.key.n_pages, dtype=np.int32
        )  # a step uses its inputs' memory for other things too
        self._embed(into.embd_address, [token for _, token, _ in requests])
        for i, (state, _, count) in enumerate(requests):
            first = state.length - 1
            into.source[i] = self._pool.hidden_entry(state.slot, first)
            positions = np.arange(first, first + count)
            mine = slice(i, i + b * count, b)
            into.rows[mine, 0] = state.slot
            into.rows[mine, 1] = positions
            into.cells[mine] = self._pool.cells(state.pages, first, count)
            into.pages[mine, 0] = (positions + 1) // PAGE_TOKENS
            angles = np.empty((count, into.rope.shape[1]), np.float32)
            self._rope.fill(angles, first)
            into.rope[mine] = angles
        into.send()
