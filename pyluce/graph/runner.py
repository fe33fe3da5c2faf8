"""Loads a model and runs steps: prefill by chunk graphs, decode by row graphs, every graph kept and replayed.

Two invariants carry exactness: a row's arithmetic depends on its own sequence only (kernels, see ggml-luce.h), and a
chunk's cuts depend on the request's own tokens only (`chunk_bounds`). Everything runs on the thread that made the
runner.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Final, Literal

import numpy as np

from pyluce.graph.ahead import Stretch
from pyluce.graph.chunks import chunk_bounds, pad_rows, span_blocks
from pyluce.graph.closable import C, Closable
from pyluce.graph.drafting import Drafter
from pyluce.graph.groups import Group, check_tokens, group_rows
from pyluce.graph.inputs import InputWriter
from pyluce.graph.largest import largest_graphs
from pyluce.graph.layers import TrunkWeights
from pyluce.graph.mtp_inputs import DraftWriter
from pyluce.graph.options import RunnerOptions
from pyluce.graph.picks import RouteSink, count_picks
from pyluce.graph.report import device_report, host_bytes, snapshot_report, weights_report
from pyluce.graph.results import Logits, ResultReader, Row
from pyluce.graph.retained import FAULTS, RetainedGraphs
from pyluce.graph.staging import Staging
from pyluce.graph.trunk import GraphKey, StepGraph
from pyluce.graph.two_devices import SplitExperts, check_expert_device, tune_devices
from pyluce.native import load_libraries
from pyluce.native.backend import Backend
from pyluce.native.devices import parse_device
from pyluce.native.ggml_backend import ggml_backend_buft_is_host
from pyluce.native.luce import Fault, Phase
from pyluce.native.thread import ThreadGuard
from pyluce.placement.hot import HotSet
from pyluce.placement.learner import HotLearner
from pyluce.state import SequenceState, SnapshotStore, StatePool
from pyluce.tuning import OFF, model_products
from pyluce.weights import HParams, PleTable, open_model, place_weights
from pyluce.weights.experts import trunk_experts
from pyluce.weights.model_file import Progress

Want = Literal["none", "last", "all"]

MAX_BEFORE: Final = 64  # tokens before a chunk, more than any n-gram hash reads


class TrunkRunner:
    """A loaded model with its state pool. Context manager; `close()` frees everything."""

    def __init__(
        self,
        model_path: str | os.PathLike[str],
        options: RunnerOptions | None = None,
        progress: Progress | None = None,
        routes: RouteSink | None = None,
        learner: HotLearner | None = None,
    ) -> None:
        """`routes`: counts the experts that each computed row picks. `learner`: the hot experts follow it, beginning with `hot_experts`."""
        self.options = options or RunnerOptions()
        self._routes = routes
        self._learner = learner
        self._guard = ThreadGuard("TrunkRunner")
        self._experts: SplitExperts | None = None
        self._closers: list[Closable] = []
        self._expected: Stretch | None = None
        self.on_launch: Callable[[], object] | None = None  # see `pyluce.engine.protocols.Launching`
        load_libraries(parse_device(self.options.device)[0])
        try:
            self._load(model_path, progress)
        except BaseException:
            self.close()
            raise

    def _load(self, model_path: str | os.PathLike[str], progress: Progress | None) -> None:
        o, fault = self.options, self.options.debug_fault
        self.model = self._owned(open_model(model_path, progress, draft=o.draft_path))
        self.model.guard()
        h = self.model.hparams
        self._backend = self._owned(Backend(o.device, o.n_threads))
        self.tuned, *other = tune_devices(o, model_products(h, self.model.tensors.values()))
        self._closers += [self.tuned, *other]
        self.options = replace(o, tune=self.tuned.tuning.path or OFF)
        if o.mtp:
            self.model.attach_draft(embedding=not self._backend.is_cpu, vocabulary=o.draft_vocab)
        leave: set[str] = set()
        if o.expert_device is not None:
            check_expert_device(self.model, o.expert_device)
            leave = {info.name for info in trunk_experts(self.model)}
        self._placed = self._owned(
            place_weights(self.model, self._backend, repack=o.repack, leave=leave, progress=progress)
        )
        if o.expert_device is not None:
            made = SplitExperts(o, self.model, self._backend, progress, self._learner)
            self._experts = self._owned(made)
            self._placed.adopt(self._experts.hot.tensors)
        self._weights = self._owned(TrunkWeights(self.model, self._placed, self._backend))
        self._pool = self._owned(StatePool(self._backend, h, o.state(h)))
        self._pool.allocator.copy_on_write = fault != "shared_page"
        self.store = SnapshotStore(self._pool, o.prefix_cache_bytes)
        self._ple = self._owned(PleTable(self.model)) if h.ple is not None else None
        on_host = ggml_backend_buft_is_host(self._backend.buffer_type)
        staging = None if on_host else self._owned(Staging(self._backend))
        self._results = self._owned(ResultReader(self._backend, on_host))
        self._inputs = self._owned(InputWriter(self.model, self._pool, self._ple, staging, fault))
        self._drafter: Drafter | None = None
        if fault == "stream_norm" and self._weights.mtp is not None:
            self._weights.mtp = replace(self._weights.mtp, norm_groups=h.hc_count)
        if self._weights.mtp is not None:
            draft_staging = None if on_host else self._owned(Staging(self._backend))
            self._draft_inputs = DraftWriter(h, self._pool, draft_staging, self._inputs.embed)
            drafter = Drafter(
                h,
                self._weights.mtp,
                self._pool,
                self._backend,
                self._draft_inputs,
                FAULTS.get(fault or "", Fault.NONE),
            )
            self._drafter = self._owned(drafter)
        self._graphs = self._owned(
            RetainedGraphs(
                o,
                h,
                self._weights,
                self._pool,
                self._backend,
                self._inputs,
                self._experts,
                collect_picks=self._routes is not None or self._learner is not None,
            )
        )
        # the largest graphs first, so that graph memory does not grow (and retained graphs survive) later; without logits a
        # chunk may need more than with
        longest = min(o.chunk_tokens, pad_rows(o.n_ctx))
        n_rows, span = o.n_slots * (1 + o.max_rollback), self._span(o.n_ctx)
        for key in largest_graphs(longest, n_rows, span, o.prompt_streams):
            self._graphs.get(key)

    def _owned(self, thing: C) -> C:
        self._closers.append(thing)
        return thing

    @property
    def hparams(self) -> HParams:
        """The model's sizes."""
        return self.model.hparams

    @property
    def vocab_size(self) -> int:
        """Values of a logits row."""
        return self.model.hparams.n_vocab

    @property
    def n_free_slots(self) -> int:
        """Sequences that can still be made."""
        return self._pool.n_free_slots

    def new_sequence(self) -> SequenceState:
        """An empty sequence in a free slot. Raises RuntimeError when all slots are taken, ModelError when the file was written to."""
        self._guard.check()
        self.model.check_intact(now=True)
        return SequenceState(self._pool, self._pool.take_slot())

    def prefill(
        self, state: SequenceState, tokens: Sequence[int], want: Want = "last", cuts: Iterable[int] | None = None
    ) -> Logits | None:
        """Add `tokens` to the sequence by chunk graphs.

        want: "last" -> float32 [n_vocab], "all" -> [T, n_vocab], "none" -> None. `cuts`: positions (in the sequence)
        where a chunk ends besides the grid of `chunk_tokens`. Raises ValueError for bad tokens or a full context,
        before any work; NativeError when a step fails, after which the sequence must be cleared.
        """
        self._guard.check()
        check_tokens(tokens, self.vocab_size)
        if not tokens:
            raise ValueError("expected at least one token to prefill, found none")
        if len(tokens) > state.room:
            raise ValueError(f"expected at most {state.room} more tokens in this context, found {len(tokens)}")
        start = state.length
        parts: list[Logits] = []
        expected, self._expected = self._expected, None
        bounds = list(chunk_bounds(start, start + len(tokens), self.options.chunk_tokens, cuts))
        n_streams = self.options.prompt_streams
        for i in range(0, len(bounds), n_streams):
            chunks = [list(tokens[first - start : last - start]) for first, last in bounds[i : i + n_streams]]
            coming = bounds[i + n_streams] if i + n_streams < len(bounds) else None
            if coming is not None:
                following = tokens[coming[0] - start : coming[1] - start]
                before = [*state.tokens[-MAX_BEFORE:], *(token for chunk in chunks for token in chunk)]
                self._expected = self._inputs.stretch(before, coming[0], following)
            else:
                self._expected = expected
            n_out = [len(chunk) if want == "all" else 0 for chunk in chunks]
            if want == "last" and coming is None:
                n_out[-1] = 1
            parts += self._run_chunks(state, chunks, n_out)
        if want == "none":
            return None
        return parts[-1][0] if want == "last" else np.concatenate(parts)

    def expect(self, prompt: Sequence[int], begin: int, end: int) -> None:
        """The chunk after the next `prefill` will probably be `prompt[begin:end]`, of any sequence that holds `prompt[:begin]`.

        On a device with memory of its own its inputs are prepared while that prefill computes; elsewhere nothing happens. No
        result depends on it. What goes wrong while preparing is raised by the prefill of that chunk, or by nobody.
        """
        self._guard.check()
        if not 0 <= begin < end <= len(prompt):
            raise ValueError(f"expected a part of a prompt of {len(prompt)} tokens, found {begin} to {end}")
        before, tokens = prompt[max(0, begin - MAX_BEFORE) : begin], prompt[begin:end]
        check_tokens(tokens, self.vocab_size)
        self._expected = self._inputs.stretch(before, begin, tokens)

    def decode(self, rows: Sequence[tuple[SequenceState, int]]) -> Logits:
        """One row graph: each pair adds a token to a sequence -> float32 [n_rows, n_vocab], in the order given.

        Rows of one sequence are consecutive tokens, in order; sequences may be mixed at will.
        """
        logits, order = self._step_rows(rows, [True] * len(rows))
        assert isinstance(logits, np.ndarray)
        if order == list(range(len(order))):
            return logits
        out = np.empty_like(logits)
        out[order] = logits
        return out

    def decode_rows(self, rows: Sequence[tuple[SequenceState, int]], wants_logits: Sequence[bool]) -> list[Row]:
        """As `decode`, but only the rows that want them have their logits, float32 [n_vocab].

        Of the others four bytes are read: the token with the largest logit, the lowest id of equal ones. A row from which no token
        can be chosen (a NaN) has its logits whether they are wanted or not. Raises ValueError for lists of different lengths.

        A GPU writes logits straight into memory that is used again when nobody holds them; while those of several steps are held,
        later ones are copied, which takes longer.
        """
        found, order = self._step_rows(rows, wants_logits)
        out = list(found)
        for place, row in zip(order, found, strict=True):
            out[place] = row
        return out

    def _step_rows(
        self, rows: Sequence[tuple[SequenceState, int]], wants_logits: Sequence[bool]
    ) -> tuple[Logits | list[Row], list[int]]:
        """A step of rows: what they are found to be, see `ResultReader.rows`, in another order, and where each of them stood."""
        if len(wants_logits) != len(rows):
            raise ValueError(f"wants_logits: expected one for each of {len(rows)} rows, found {len(wants_logits)}")
        self._guard.check()
        if not rows:
            raise ValueError("expected at least one row to decode, found none")
        check_tokens([token for _, token in rows], self.vocab_size)
        groups, order = group_rows(rows)
        try:
            graph, found = self._decode(groups, [wants_logits[i] for i in order])
        except BaseException:
            self._abandon()
            raise
        self._end([(graph, len(rows))])
        for state, taken in groups:
            state.commit(taken, by_chunk=False)
        return found, order

    def _decode(self, groups: list[Group], wants_logits: list[bool]) -> tuple[StepGraph, Logits | list[Row]]:
        """The graph, and rows in its order; the step has ended, nothing is committed."""
        self._graphs.reconnect()
        graph = self._start_rows(groups, len(wants_logits))
        asked = self._results.ask(graph, wants_logits)
        self._launched()
        found = self._results.rows(asked)
        if isinstance(found, list):
            for i, row in enumerate(found):
                if isinstance(row, int) and row < 0:
                    found[i] = self._results.logits(graph, i, 1)[0]
        return graph, found

    def _abandon(self) -> None:
        """A step failed somewhere: nothing is under way after this."""
        self._backend.wait()
        self._inputs.computed()

    def draft(self, requests: Sequence[tuple[SequenceState, int, int]]) -> list[list[int]]:
        """For each (sequence, its next token, how many drafts): tokens that may follow that one, by the model's draft head.

        Lengths do not change. Raises ValueError without `RunnerOptions.mtp`, and for what does not fit.
        """
        self._guard.check()
        if self._drafter is None:
            raise ValueError("expected a runner with a draft head (mtp=True), found one without")
        return self._drafter.draft(requests)

    @property
    def graphs_built(self) -> int:
        """Graphs built so far; a step during which it rose is no measure of what a step costs."""
        return self._graphs.n_built + (self._drafter.n_built if self._drafter is not None else 0)

    def _run_chunks(self, state: SequenceState, chunks: list[list[int]], n_out: list[int]) -> list[Logits]:
        """Consecutive chunks of a sequence, at the same time if there are several: logits [n_out, n_vocab] of those that have some."""
        self._graphs.reconnect()
        graphs: list[StepGraph] = []
        try:
            for stream, (tokens, n) in enumerate(zip(chunks, n_out, strict=True)):
                graph = self._prepare(Phase.CHUNK, [(state, tokens)], n, stream)
                self._inputs.write(graph, [(state, tokens)], len(tokens), n)
                graphs.append(graph)
                state.commit(tokens, by_chunk=True)  # what comes next is at the positions after these
            if self._expected is not None:
                expected, self._expected = self._expected, None
                self._inputs.expect(expected)
            self._start(graphs)
            self._launched()
            parts = []
            for graph, tokens, n in zip(graphs, chunks, n_out, strict=True):
                if graph.logits is not None:
                    first = len(tokens) - n if graph.inputs.out_rows is None else 0
                    parts.append(self._results.logits(graph, first, n))
            self._end([(graph, len(tokens)) for graph, tokens in zip(graphs, chunks, strict=True)])
        except BaseException:
            state.take_back(sum(map(len, chunks[: len(graphs)])), len(graphs))
            raise
        return parts

    def _start_rows(self, groups: list[Group], n_rows: int) -> StepGraph:
        """Start a step of rows; the graph, whose results can be read until the next."""
        graph = self._prepare(Phase.ROW, groups, n_rows)
        self._inputs.write(graph, groups, n_rows, n_rows)
        self._start([graph])
        return graph

    def _prepare(self, phase: Phase, groups: list[Group], n_out: int, stream: int = 0) -> StepGraph:
        """The graph of a step, whose sequences can be written."""
        n_rows = sum([len(tokens) for _, tokens in groups])
        for state, tokens in groups:
            state.begin_write(len(tokens), keeps_rows=phase is Phase.ROW)
        whole_units = phase is Phase.CHUNK and self.options.debug_fault != "cut_variant"
        padded = pad_rows(n_rows) if whole_units else n_rows
        furthest = max([state.length + len(tokens) for state, tokens in groups])
        # the head must not see how many rows are wanted either
        n_out_padded = pad_rows(n_out) if whole_units else n_out
        return self._graphs.get(GraphKey(phase, padded, n_out_padded, self._span(furthest), stream))

    def _start(self, graphs: list[StepGraph]) -> None:
        if self._backend.is_cpu and self.on_launch is not None:
            self.on_launch()
        graphs[0].start(self._backend, *graphs[1:])

    def _launched(self) -> None:
        if not self._backend.is_cpu and self.on_launch is not None:
            self.on_launch()

    def _end(self, graphs: list[tuple[StepGraph, int]]) -> None:
        """Wait for the end of a step; each graph with the number of its rows."""
        self._backend.wait()
        self.model.check_intact()
        self._inputs.computed()
        swapper = self._experts.swapper if self._experts is not None else None
        for graph, n_rows in graphs:
            if graph.all_picks is not None:
                count_picks(graph.all_picks, n_rows, self._routes, swapper)
        if swapper is not None:
            swapper.between_steps()

    def _span(self, n_tokens: int) -> int:
        """See `span_blocks`."""
        return span_blocks(self.hparams, self._pool.pages_per_slot, n_tokens)

    @property
    def hot_experts(self) -> HotSet | None:
        """The experts that are on the device as well; None without an expert device."""
        return self._experts.hot.hot if self._experts is not None else None

    def replace_hot(self, layer: int, slot: int, expert: int) -> None:
        """Between steps: put another expert into a slot of the hot ones. Results do not change, only where they are computed.

        Errors as of `HotSet.replaced`.
        """
        self._guard.check()
        if self._experts is None:
            raise ValueError("expected a runner with an expert_device, found one without")
        self._backend.wait()
        self._experts.hot.replace(layer, slot, expert)

    def poison_free_state(self) -> None:
        """Fill what no sequence holds with NaN (for tests)."""
        self._pool.poison_free()

    def memory_report(self) -> dict[str, object]:
        """Bytes by place, from the buffers that exist: weights, state, kept prompts, graphs; see `pyluce.graph.report`."""
        return {
            "weights": weights_report(self._placed, self._weights),
            "state": {**self._pool.report(), "capacity_tokens": self.options.n_slots * self.options.n_ctx},
            "prefix_cache": self.store.report(),
            "snapshots": snapshot_report(self.store, self._pool.page_bytes),
            "graph_bytes": self._graphs.n_bytes,
            "workspace_bytes": self._graphs.work_bytes,
            "host_bytes": host_bytes(self._inputs, self._results, self._drafter, self._pool),
            "device": device_report(self._backend),
            "graphs": len(self._graphs),
            "experts": self._experts.report() if self._experts is not None else None,
            "draft": self._drafter.report() if self._drafter is not None else None,
            "ple_rows_read": self._ple.rows_read if self._ple is not None else 0,
        }

    def close(self) -> None:
        """Free graphs, state, weights and files, in this order. Idempotent."""
        while self._closers:
            self._closers.pop().close()

    def __enter__(self) -> TrunkRunner:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
