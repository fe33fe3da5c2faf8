"""Sizes that ggml itself computes, from shapes alone: tensors and graphs of a model that is not there.

Weights and state are headers that claim to lie somewhere, so the graphs of `pyluce.graph` can be built on them and planned, and
nothing is allocated but the headers. What is planned here is what `TrunkRunner` allocates, by the same code.
"""

from __future__ import annotations

from dataclasses import replace
from types import TracebackType
from typing import Final

import numpy as np
import numpy.typing as npt

from pyluce.graph.chunks import span_blocks
from pyluce.graph.largest import largest_graphs
from pyluce.graph.layers import MtpWeights, TrunkWeights
from pyluce.graph.mtp import DraftGraph, DraftKey
from pyluce.graph.trunk import GraphKey, StepGraph
from pyluce.memory.facts import ModelFacts, TensorFact
from pyluce.native import ggml_backend as api
from pyluce.native import load_libraries
from pyluce.native.backend import Backend, BackendBuffer, check_status
from pyluce.native.luce import Fault
from pyluce.native.measure import cpu_work_bytes, graph_memory_bytes
from pyluce.native.structs import GGMLType
from pyluce.native.tensors import TensorArena, tensor_struct
from pyluce.state.layout import StateOptions, state_layout
from pyluce.state.pool import StatePool
from pyluce.weights.draft_vocabulary import DRAFT_VOCAB, pays
from pyluce.weights.placement import repacked_tensors
from pyluce.weights.tensors import PLE_TABLE, TensorInfo

SOMEWHERE: Final = 1 << 40
"""The address that tensors claim which are not there: never read, a multiple of every alignment."""
SMALLEST_BUFFER: Final = 64
"""Bytes of a buffer that is there for its type only: one of 0 bytes would not choose a layout for the tensors that are said to be in it."""
UNKNOWN_TYPE: Final = GGMLType.F16
"""Stands for a type that is not known; sizes of graphs do not depend on it."""


class Meter:
    """Measures one model on one kind of device: "cpu", or another's buffer type where its libraries are loaded.

    `on_cpu`: weights are mapped or repacked; otherwise everything is copied. Every figure is bytes. Context manager.
    """

    def __init__(
        self,
        facts: ModelFacts,
        *,
        on_cpu: bool = True,
        repack: bool = True,
        n_threads: int = 1,
        buffer_type: int = 0,
        collect_picks: bool = False,
    ) -> None:
        load_libraries()
        self._facts = facts
        self._on_cpu = on_cpu
        self._n_threads = n_threads
        self._collect_picks = collect_picks
        self._buffer_type = buffer_type or api.ggml_backend_cpu_buffer_type()
        self._repack_type: int | None = None
        self._repacked: frozenset[str] = frozenset()
        self._here = BackendBuffer.of_size(self._buffer_type, 0)
        self._repack_buffer: BackendBuffer | None = None
        if on_cpu and repack and facts.published is None:
            infos = [_info(t) for t in facts.tensors.values() if t.name != PLE_TABLE]
            with Backend("cpu") as backend:
                self._repack_type, chosen = repacked_tensors(infos, facts.hparams.n_expert_used, backend)
            self._repacked = frozenset(t.name for t in chosen)
            if self._repack_type is not None:
                self._repack_buffer = BackendBuffer.of_size(self._repack_type, SMALLEST_BUFFER)
        self._weights = HeaderWeights(facts, self._here, self._repacked, self._repack_buffer)
        self._trunk = HeaderTrunk(self._weights, self._here, self._buffer_type)
        self._graphs: dict[tuple[StateOptions, GraphKey], tuple[int, int]] = {}
        self._drafts: dict[DraftKey, int] = {}

    @property
    def derived_bytes(self) -> int:
        """Tensors that are made from the file's while loading."""
        return self._trunk.planned_bytes

    def repacked_bytes(self, tensors: list[TensorFact]) -> int:
        """Those of the tensors that the CPU keeps in its own layout; 0 elsewhere."""
        return sum(t.n_bytes for t in tensors if t.name in self._repacked)

    def copied_bytes(self, tensors: list[TensorFact]) -> int:
        """Tensors in one buffer of the device, its alignment and padding included."""
        with TensorArena.for_counts(len(tensors)) as arena:
            for t in tensors:
                arena.new_tensor(_type(t), t.ne)
            return _buffer_bytes(arena, self._buffer_type)

    def state_bytes(self, options: StateOptions) -> int:
        """All sequences' state, pages of the prefix cache included."""
        layout = state_layout(self._facts.hparams, options)
        with TensorArena.for_counts(len(layout)) as arena:
            for part in layout:
                arena.new_tensor(part.type, part.ne)
            return _buffer_bytes(arena, self._buffer_type)

    def graph_bytes(self, options: StateOptions, rows: int) -> int:
        """Memory of the largest graph, at the end of a full context: a prompt's chunk of so many rows, or a row of every slot."""
        return self._measured(options, rows)[0]

    def work_bytes(self, options: StateOptions, rows: int) -> int:
        """The CPU's work buffer for those graphs; on other devices 0: their pools are not planned by ggml."""
        return self._measured(options, rows)[1]

    def draft_bytes(self, options: StateOptions) -> int:
        """Memory of the largest graph of the draft head: for every slot as many drafts as can be taken back; 0 without one."""
        mtp = self._trunk.mtp
        if mtp is None or not options.mtp or not options.reach:
            return 0
        key = DraftKey(options.n_slots, options.reach, options.pages_per_slot)
        if key not in self._drafts:
            self._drafts[key] = self._draft_graph(options, key, mtp)
        return self._drafts[key]

    def _draft_graph(self, options: StateOptions, key: DraftKey, mtp: MtpWeights) -> int:
        pool = HeaderPool(self._here, self._facts.hparams, replace(options, n_slots=1, cache_pages=0))
        graph = DraftGraph(key, self._facts.hparams, mtp, pool, Fault.NONE, on_cpu=self._on_cpu)
        try:
            return graph_memory_bytes(graph.graph, self._buffer_type)
        finally:
            graph.close()
            pool.arena.close()

    def _measured(self, options: StateOptions, rows: int) -> tuple[int, int]:
        span = span_blocks(self._facts.hparams, options.pages_per_slot, options.n_ctx)
        found = [self._graph(options, key) for key in largest_graphs(rows, options.n_slots * (1 + options.reach), span)]
        return max(memory for memory, _ in found), max(work for _, work in found)

    def _graph(self, options: StateOptions, key: GraphKey) -> tuple[int, int]:
        """(graph memory, work buffer) of one graph; neither depends on how large the pool is, the span apart."""
        h = self._facts.hparams
        one = replace(options, n_slots=1, cache_pages=0)
        shape = (replace(one, n_ctx=1), key)
        known = self._graphs.get(shape)
        if known is not None:
            return known
        pool = HeaderPool(self._here, h, one)
        graph = StepGraph(key, h, self._trunk, pool, Fault.NONE, key.phase, collect_picks=self._collect_picks)
        try:
            work = cpu_work_bytes(graph.graph, self._n_threads) if self._on_cpu else 0
            found = (graph_memory_bytes(graph.graph, self._buffer_type), work)
        finally:
            graph.close()
            pool.arena.close()
        self._graphs[shape] = found
        return found

    def close(self) -> None:
        """Free the headers. Idempotent."""
        self._trunk.arena.close()
        self._weights.arena.close()
        self._here.close()
        if self._repack_buffer is not None:
            self._repack_buffer.close()

    def __enter__(self) -> Meter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


class HeaderWeights:
    """Tensors of every weight, without data. Stands for the model's file and for its placed weights."""

    def __init__(
        self, facts: ModelFacts, here: BackendBuffer, repacked: frozenset[str], there: BackendBuffer | None
    ) -> None:
        self.hparams = facts.hparams
        self.tensors = {t.name: _info(t) for t in facts.tensors.values() if t.name != PLE_TABLE}
        self.arena = TensorArena.for_counts(len(self.tensors))
        self._made: dict[str, int] = {}
        compact = f"blk.{facts.hparams.n_layer}.nextn.eh_proj.weight" in self.tensors and pays(
            facts.hparams.n_vocab, DRAFT_VOCAB
        )
        self.draft_ids = np.arange(DRAFT_VOCAB) if compact else None  # as many
        for t in self.tensors.values():
            tensor = self.arena.new_tensor(t.type_id, t.ne, t.name)
            _claim(tensor, there if there is not None and t.name in repacked else here)
            self._made[t.name] = tensor

    def tensor(self, name: str) -> int:
        """The `ggml_tensor *` of that name."""
        return self._made[name]

    def get(self, name: str) -> int | None:
        """The same, or None."""
        return self._made.get(name)


class HeaderTrunk(TrunkWeights):
    """The trunk's weights as shapes; `planned_bytes` is what the derived ones would take."""

    def __init__(self, weights: HeaderWeights, here: BackendBuffer, buffer_type: int) -> None:
        self._here = here
        self._buffer_type = buffer_type
        self.planned_bytes = 0
        super().__init__(weights, weights, here)  # type: ignore[arg-type]

    def _values(self, name: str) -> npt.NDArray[np.float32]:
        ne = self._model.tensors[name].ne
        shape = (int(np.prod(ne[1:], dtype=np.int64)), ne[0])
        return np.broadcast_to(np.float32(0.0), shape)

    def _gathered(self, info: TensorInfo, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
        return np.empty(0, np.uint8)

    def _fill(self, backend: object) -> None:
        self.planned_bytes = _buffer_bytes(self.arena, self._buffer_type) if self._pending else 0
        for tensor, _ in self._pending:
            _claim(tensor, self._here)
        self._pending.clear()


class HeaderPool(StatePool):
    """The pool's tensors as shapes."""

    def _allocate(self, backend: object) -> BackendBuffer:
        here = backend
        assert isinstance(here, BackendBuffer)
        for tensor in self.arena.tensors():
            _claim(tensor, here)
        return here

    def __init__(self, here: BackendBuffer, hparams: object, options: StateOptions) -> None:
        super().__init__(here, hparams, options)  # type: ignore[arg-type]


def _claim(tensor: int, buffer: BackendBuffer) -> None:
    """Let a tensor say that it lies in a buffer's memory."""
    header = tensor_struct(tensor)
    header.buffer = buffer.ptr
    header.data = SOMEWHERE
    check_status(api.ggml_backend_buffer_init_tensor(buffer.ptr, tensor), "ggml_backend_buffer_init_tensor")


def _buffer_bytes(arena: TensorArena, buffer_type: int) -> int:
    """Bytes of the buffer that would hold the arena's tensors."""
    return api.ggml_backend_alloc_ctx_tensors_from_buft_size(arena.ptr, buffer_type)


def _type(t: TensorFact) -> int:
    return UNKNOWN_TYPE if t.type_id is None else t.type_id


def _info(t: TensorFact) -> TensorInfo:
    n_bytes = t.n_bytes if t.type_id is not None else 0
    return TensorInfo(t.name, _type(t), t.ne, n_bytes, 0, 0)
