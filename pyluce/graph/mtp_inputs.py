"""Fills the inputs of the draft head: of what a trunk step leaves for it, and of a draft graph."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from pyluce.graph.inputs import Group
from pyluce.graph.mtp import DraftGraph
from pyluce.graph.rope import RopeTable
from pyluce.graph.trunk import StepGraph
from pyluce.native.tensors import tensor_memory, tensor_set, tensor_struct
from pyluce.state import SequenceState, StatePool
from pyluce.state.pages import PAGE_TOKENS
from pyluce.weights import HParams

S = TypeVar("S", bound=np.generic)
DraftRequest = tuple[SequenceState, int, int]


class Arrays:
    """Arrays to fill for one graph, numpy order; on a host backend they are the tensors' own memory."""

    def __init__(self, on_host: bool) -> None:
        self._on_host = on_host
        self._copies: list[tuple[int, npt.NDArray[Any]]] = []

    def of(self, tensor: int, dtype: type[S]) -> npt.NDArray[S]:
        """[ne1, ne0] of a tensor of one or two axes."""
        if not self._on_host:
            header = tensor_struct(tensor)
            shape = (header.ne[1], header.ne[0])
            array = np.zeros(shape, dtype)
            self._copies.append((tensor, array))
            return array
        return tensor_memory(tensor, dtype)

    def send(self) -> None:
        """Copy what is not written in place."""
        for tensor, array in self._copies:
            tensor_set(tensor, array)


class FillArrays(Arrays):
    """Of a trunk step."""

    def __init__(self, graph: StepGraph, on_host: bool) -> None:
        super().__init__(on_host)
        step = graph.fill
        assert step is not None
        self.source = self.of(step.source, np.int32)[0]
        self.pick = None if step.pick is None else self.of(step.pick, np.int32)[0]
        self.keep = None if step.keep is None else self.of(step.keep, np.int32)[0]
        self.target = self.of(step.target, np.int64)[0]
        self.rope = self.of(step.rope, np.float32)
        self.cells = self.of(step.cells, np.int64)[0]


class DraftArrays(Arrays):
    """Of a draft graph."""

    def __init__(self, graph: DraftGraph, on_host: bool) -> None:
        super().__init__(on_host)
        step = graph.inputs
        self.tokens = self.of(step.tokens, np.int32)[0]
        self.source = self.of(step.source, np.int32)[0]
        self.rows = self.of(step.rows, np.int32)
        self.rope = self.of(step.rope, np.float32)
        self.cells = self.of(step.cells, np.int64)[0]
        self.pages = self.of(step.pages, np.int32)


class MtpInputWriter:
    """Writes both. `write_fill` comes before a step of the trunk, whose sequences still have the length before it.

    `stale_keys` plants a fault: decoded rows leave the head's keys as its drafts wrote them.
    """

    def __init__(self, hparams: HParams, pool: StatePool, on_host: bool, stale_keys: bool = False) -> None:
        self._pool = pool
        self._on_host = on_host
        self._stale_keys = stale_keys
        self._rope = RopeTable(hparams.rope_dim, hparams.rope_freq_base)
        self._fills: dict[StepGraph, FillArrays] = {}
        self._drafts: dict[DraftGraph, DraftArrays] = {}

    def forget(self, graph: StepGraph | DraftGraph) -> None:
        """The graph is about to be closed."""
        if isinstance(graph, DraftGraph):
            self._drafts.pop(graph, None)
        else:
            self._fills.pop(graph, None)

    def write_fill(self, graph: StepGraph, groups: list[Group], n_rows: int) -> None:
        """Inputs of a trunk step; rows beyond `n_rows` are padding."""
        into = self._fills.get(graph)
        if into is None:
            into = self._fills[graph] = FillArrays(graph, self._on_host)
        into.cells[:] = self._pool.scratch_cell
        into.rope[:] = 0.0
        if into.pick is None:
            self._write_chunk(into, groups[0], n_rows)
        else:
            self._write_rows(into, into.pick, groups)
        into.send()

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

    def write_draft(self, graph: DraftGraph, requests: list[DraftRequest]) -> None:
        """Inputs of a draft graph: (sequence, its next token, how many drafts) each; later steps of a sequence are padding."""
        into = self._drafts.get(graph)
        if into is None:
            into = self._drafts[graph] = DraftArrays(graph, self._on_host)
        b = graph.key.n_seqs
        into.rows[:] = (-1, 0, 0, 0)
        into.cells[:] = self._pool.scratch_cell
        into.rope[:] = 0.0
        into.pages[:, 0] = 0
        into.pages[:, 1:] = np.arange(
            graph.key.n_pages, dtype=np.int32
        )  # a step uses its inputs' memory for other things too
        for i, (state, token, count) in enumerate(requests):
            first = state.length - 1
            into.tokens[i] = token
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
