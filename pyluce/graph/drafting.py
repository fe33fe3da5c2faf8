"""Drafts tokens with the model's own head, for many sequences at once: draft graphs, kept and replayed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from pyluce.graph.layers import MtpWeights
from pyluce.graph.mtp import DraftGraph, DraftKey
from pyluce.graph.mtp_inputs import DraftRequest, DraftWriter
from pyluce.native.backend import Backend, GraphAllocator
from pyluce.native.luce import Fault
from pyluce.native.tensors import tensor_get
from pyluce.state.pages import PAGE_TOKENS, pages_for
from pyluce.state.pool import StatePool
from pyluce.weights import HParams

MAX_DRAFTS: Final = 7
RETAINED_DRAFT_GRAPHS: Final = 32
SMALLEST_PAGES: Final = 16
GPU_DRAFT_TOKENS: Final = 65_536
"""Tokens of a sequence, its drafts included, up to which a GPU's attention serves the head, which reads every page."""


class Drafter:
    """The draft graphs of a runner. `n_built` counts them: a step that built one says nothing about what a step costs."""

    def __init__(
        self,
        hparams: HParams,
        weights: MtpWeights,
        pool: StatePool,
        backend: Backend,
        inputs: DraftWriter,
        fault: Fault,
        keep_logits: bool = False,
    ) -> None:
        self._hparams = hparams
        self._weights = weights
        self._pool = pool
        self._backend = backend
        self._inputs = inputs
        self._fault = fault
        self._keep_logits = keep_logits
        self._allocator = GraphAllocator(backend)
        self._graphs: OrderedDict[DraftKey, DraftGraph] = OrderedDict()
        self.n_built = 0
        self.last_logits: list[npt.NDArray[np.float32]] = []  # [n_steps] of [n_seqs, n_vocab], with keep_logits

    def draft(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        """For each (sequence, its next token, how many drafts): tokens that may follow that one.

        The sequences' lengths do not change; what they write is written again by the rows that verify the drafts.
        """
        wanted = list(requests)
        for state, token, count in wanted:
            if not 1 <= count <= MAX_DRAFTS:
                raise ValueError(f"expected 1 to {MAX_DRAFTS} drafts a sequence, found {count}")
            if not state.length:
                raise ValueError("expected a sequence with tokens to draft for, found an empty one")
            if not 0 <= token < self._hparams.n_vocab:
                raise ValueError(f"expected a token id below {self._hparams.n_vocab}, found {token}")
        if len({state.slot for state, _, _ in wanted}) != len(wanted):
            raise ValueError("expected every sequence once")
        if not wanted:
            return []
        furthest = max(state.length + count for state, _, count in wanted)
        if furthest > GPU_DRAFT_TOKENS and not self._backend.is_cpu:
            raise ValueError(f"expected drafts within {GPU_DRAFT_TOKENS} tokens on a GPU, found {furthest}")
        for state, _, count in wanted:
            state.prepare_draft(count)
        n_steps = max(count for _, _, count in wanted)
        graph = self._graph(DraftKey(len(wanted), n_steps, self._pages(furthest)))
        self._inputs.write(graph, wanted)
        graph.compute(self._backend)
        self._inputs.computed()
        ids = [tensor_get(tensor, np.int32, len(wanted)) for tensor in graph.drafts]
        chosen = self._weights.draft_ids
        if self._keep_logits:
            shape = (len(wanted), self._hparams.n_vocab if chosen is None else len(chosen))
            self.last_logits = [tensor_get(tensor, np.float32, shape) for tensor in graph.logits]
        drafts = [[max(0, int(ids[j][i])) for j in range(count)] for i, (_, _, count) in enumerate(wanted)]
        return drafts if chosen is None else [[int(chosen[row]) for row in mine] for mine in drafts]

    def _pages(self, n_tokens: int) -> int:
        """Bound on the pages that a row sees: a power of two, so that few graphs serve all lengths."""
        n_pages = SMALLEST_PAGES
        while n_pages < pages_for(n_tokens):
            n_pages *= 2
        most = self._pool.pages_per_slot if self._backend.is_cpu else GPU_DRAFT_TOKENS // PAGE_TOKENS - 1
        return min(n_pages, self._pool.pages_per_slot, most)

    def _graph(self, key: DraftKey) -> DraftGraph:
        graph = self._graphs.get(key)
        if graph is None:
            graph = DraftGraph(
                key,
                self._hparams,
                self._weights,
                self._pool,
                self._fault,
                on_cpu=self._backend.is_cpu,
                keep_logits=self._keep_logits,
            )
            if not self._backend.is_cpu:
                try:
                    self._backend.check_supports(graph.graph)
                except BaseException:
                    graph.close()
                    raise
            self._inputs.reserve(graph)
            self._graphs[key] = graph
            self.n_built += 1
            while len(self._graphs) > RETAINED_DRAFT_GRAPHS:
                self._drop(next(iter(self._graphs)))
            epoch = self._allocator.epoch
            self._allocator.alloc(graph.graph)
            if self._allocator.epoch != epoch:
                for other in [k for k in self._graphs if k != key]:
                    self._drop(other)
        self._graphs.move_to_end(key)
        return graph

    def _drop(self, key: DraftKey) -> None:
        graph = self._graphs.pop(key)
        self._inputs.forget(graph)
        graph.close()

    @property
    def host_bytes(self) -> int:
        """Bytes of inputs on their way to a device."""
        return self._inputs.host_bytes

    def report(self) -> dict[str, int]:
        """Graph memory in bytes, graphs kept, tokens that may be drafted."""
        ids = self._weights.draft_ids
        vocabulary = self._hparams.n_vocab if ids is None else len(ids)
        return {"graph_bytes": self._allocator.n_bytes, "graphs": len(self._graphs), "vocabulary": vocabulary}

    def close(self) -> None:
        """Free the graphs. Idempotent."""
        for key in list(self._graphs):
            self._drop(key)
        self._allocator.close()
