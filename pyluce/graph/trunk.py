"""The trunk as one graph: embedding to logits, for T rows in one phase.

The graph depends on the number of rows, the phase, a bound on the blocks a row can see and the number of logits rows.
Which sequences, positions and tokens the rows are is input, so one graph serves any step of its shape.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from pyluce.graph import blocks, mtp
from pyluce.graph.arrays import FEW_ROWS, GraphInputs, InputSpec
from pyluce.graph.blocks import StepInputs
from pyluce.graph.experts import LayerGraphs, SplitBuilder
from pyluce.graph.layers import TrunkWeights
from pyluce.graph.mtp import FillInputs
from pyluce.graph.ops import GraphScope
from pyluce.graph.picks import copy_picks, new_picks
from pyluce.native import ggml, luce
from pyluce.native.backend import Backend
from pyluce.native.ggml import GGMLType
from pyluce.native.luce import Fault, Phase
from pyluce.native.split import SplitGraph
from pyluce.native.tensors import Graph, TensorArena
from pyluce.state.pool import StatePool
from pyluce.weights import HParams

NODES_PER_LAYER: Final = 64
NODES_BESIDE: Final = 128


@dataclass(frozen=True, slots=True)
class GraphKey:
    """What a retained graph is made for. n_out: rows of logits, 0 for none. Graphs of different streams share no memory."""

    phase: Phase
    n_rows: int
    n_out: int
    n_block_max: int
    stream: int = 0


class StepGraph:
    """One graph of the trunk, kept and replayed.

    `inputs` are set before, `logits` [n_vocab, n_out] or, of a row graph, `best` I32 [1, n_out] (where each row's largest
    logit is, -1 for a row with a NaN) read after compute. With `collect_picks` also `all_picks`, see `pyluce.graph.picks`.
    """

    def __init__(
        self,
        key: GraphKey,
        hparams: HParams,
        weights: TrunkWeights,
        pool: StatePool,
        fault: Fault,
        matmul_phase: Phase,
        *,
        collect_picks: bool = False,
        experts: LayerGraphs | None = None,
    ) -> None:
        """`experts`: what an expert device computes; `join` is to be called when all have memory."""
        self.key = key
        n_nodes = NODES_PER_LAYER * hparams.n_layer + NODES_BESIDE
        self.arena = TensorArena.for_counts(n_nodes, n_nodes)
        try:
            self.graph = Graph(self.arena, n_nodes)
            scope = GraphScope(self.arena, self.graph, key.phase, matmul_phase, fault)
            specs = self._specs(hparams)
            if weights.mtp is not None:
                specs += FillInputs.specs(hparams, key.phase, key.n_rows)
            few = key.phase is Phase.ROW and key.n_rows <= FEW_ROWS
            self.tensors = GraphInputs.new(self.arena, self.graph, specs, packed=few)
            self.inputs = StepInputs.of(self.tensors)
            self.fill = FillInputs.of(self.tensors) if weights.mtp is not None else None
            self.picks: list[int] = []
            self.all_picks = new_picks(self.arena, hparams, key.n_rows) if collect_picks else None
            self._away = SplitBuilder(self.arena, experts.layers) if experts is not None else None
            self._split: SplitGraph | None = None
            self.logits: int | None = None
            self.best: int | None = None
            self.memory: dict[int, npt.NDArray[np.uint8]] = {}  # of results on a host backend, by tensor
            self._build(scope, hparams, weights, pool)
        except BaseException:
            self.arena.close()
            raise

    def _specs(self, h: HParams) -> list[InputSpec]:
        """What `StepInputs` describes. Where the first two are depends on the number of rows alone: they may be prepared before there
        is a graph.
        """
        n = self.key.n_rows
        specs = [InputSpec("embd", GGMLType.F32, (h.n_embd, n))]
        if h.ple is not None:
            specs.append(InputSpec("ple", GGMLType.F32, (h.ple.n_heads * h.ple.head_dim, n)))
        specs += [
            InputSpec("rows", GGMLType.I32, (4, n)),
            InputSpec("cells", GGMLType.I64, (n,)),
            InputSpec("rope", GGMLType.F32, (h.rope_dim, n)),
            InputSpec("block_rope", GGMLType.F32, (h.rope_dim, n)),
        ]
        if 0 < self.key.n_out < n:
            specs.append(InputSpec("out_rows", GGMLType.I32, (self.key.n_out,)))
        return specs

    def _build(self, g: GraphScope, h: HParams, w: TrunkWeights, pool: StatePool) -> None:
        n, width, eps, step = self.key.n_rows, h.hc_count * h.n_embd, h.rms_eps, self.inputs
        both = g.made(luce.ggml_luce_hc_init(g.ctx, step.embd, w.layers[0].attn_mix.norm, h.hc_count, eps), "hc_init")
        residual, xn = g.half(both, width, n, 0), g.half(both, width, n, 1)
        for i, layer in enumerate(w.layers):
            if layer.ple is not None:
                residual = blocks.ple(g, h, layer.ple, pool, residual, step)
                xn = g.made(luce.ggml_luce_hc_norm(g.ctx, residual, layer.attn_mix.norm, h.hc_count, eps), "hc_norm")
            x, inject = blocks.mix(g, h, layer.attn_mix, xn)
            if layer.gdn is not None:
                out = blocks.gdn(g, h, layer.gdn, pool, i, x, step)
            elif layer.attention is not None:
                out = blocks.attention(g, h, layer.attention, pool, i, x, step, n, self.key.n_block_max)
            else:
                raise ValueError(f"layer {i} has neither linear nor full attention weights")
            residual, xn = blocks.combine(g, h, residual, out, inject, layer.ffn_mix.norm, n)
            x, inject = blocks.mix(g, h, layer.ffn_mix, xn)
            if self._away is not None:
                out, picked = self._away.moe(g, h, layer.moe, i, x, n)
            else:
                out, picked = blocks.moe(g, h, layer.moe, x, n)
            self.picks.append(picked)
            if self.all_picks is not None:
                copy_picks(g, self.all_picks, i, picked)
            following = w.layers[i + 1].attn_mix.norm if i + 1 < h.n_layer else w.output_mix.norm
            residual, xn = blocks.combine(g, h, residual, out, inject, following, n)
        if w.mtp is not None and self.fill is not None:
            for node in mtp.fill(g, h, w.mtp, pool, step.embd, residual, self.fill, n):
                self.graph.expand(node)
        if self.key.n_out == 0:
            self.graph.expand(xn)
            return
        if step.out_rows is not None:
            xn = ggml.ggml_get_rows(g.ctx, xn, step.out_rows)
        x, _ = blocks.mix(g, h, w.output_mix, xn)
        self.logits = g.mul_mat(w.output, x)
        ggml.ggml_set_output(self.logits)
        self.graph.expand(self.logits)
        if self.key.phase is Phase.ROW:
            self.best = g.made(luce.ggml_luce_argmax(g.ctx, self.logits), "argmax")
            ggml.ggml_set_output(self.best)
            self.graph.expand(self.best)

    def join(self, target: Backend, expert: Backend) -> None:
        """Prepare the computation on two devices; the graphs have memory."""
        if self._away is not None:
            self._split = self._away.join(target, expert, self.graph)

    def start(self, backend: Backend, *others: StepGraph) -> None:
        """Run once with the inputs that are set; `Backend.wait` waits for the end. `others`: see `SplitGraph.start`."""
        if self._split is not None:
            self._split.start(*(other._split for other in others if other._split is not None))
        else:
            backend.start(self.graph)

    def link_bytes(self) -> tuple[int, int]:
        """Bytes that a step sends to the expert device, and gets from it."""
        return self._split.n_bytes() if self._split is not None else (0, 0)

    def close(self) -> None:
        """Free the graph. Idempotent."""
        if self._split is not None:
            self._split.close()
        self.arena.close()
