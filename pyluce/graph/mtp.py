"""The draft head (MTP) as nodes: what each step of the trunk leaves for it, and the graph that drafts with it.

At position p the head reads the trunk's residual h_p and the token at p + 1, and says what follows that token. So its keys of
position p can be made only when the token at p + 1 is known: a step of the trunk over the positions f .. l - 1 makes those of
f - 1 .. l - 2, and leaves h_(l-1) in the slot's ring of hidden rows. A draft step puts its own residual in the place of h.

Front: stream s = eh_proj . [rms(embedding) * enorm ; (rms(h) * hnorm)_s], the norm of h over all hc*H values at once
(`hnorm` has as many gains). Then a block of the trunk's kind with dense attention, and a hyper-connection mix to logits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from pyluce.graph import blocks
from pyluce.graph.arrays import GraphInputs, InputSpec
from pyluce.graph.layers import MtpWeights
from pyluce.graph.ops import GraphScope
from pyluce.native import ggml, luce
from pyluce.native.backend import Backend
from pyluce.native.ggml import GGMLType
from pyluce.native.luce import Fault, Phase
from pyluce.native.tensors import Graph, TensorArena, tensor_struct
from pyluce.state.pages import PAGE_TOKENS
from pyluce.state.pool import StatePool
from pyluce.weights import HParams

NODES_PER_STEP = 96


@dataclass(frozen=True, slots=True)
class FillInputs:
    """What a step of the trunk needs to feed the head. T rows; in a row graph E = T, in a chunk graph E = 1.

    source I32 [E]: rows of the pool's `hidden` before this step; pick I32 [T] (row graph only): where a row's h is, below E
    among those, else E + a row of this step; keep I32 [1] (chunk graph only): the row whose residual stays;
    target I64 [E]: where in `hidden` the residuals go; rope F32 [rope_dim, T] and cells I64 [T] of the positions before the rows'.
    """

    source: int
    pick: int | None
    keep: int | None
    target: int
    rope: int
    cells: int

    @staticmethod
    def specs(h: HParams, phase: Phase, n_rows: int) -> list[InputSpec]:
        """What a graph needs for them."""
        rows = phase is Phase.ROW
        n_entries = n_rows if rows else 1
        return [
            InputSpec("hidden_source", GGMLType.I32, (n_entries,)),
            InputSpec("hidden_pick", GGMLType.I32, (n_rows,)) if rows else InputSpec("hidden_keep", GGMLType.I32, (1,)),
            InputSpec("hidden_target", GGMLType.I64, (n_entries,)),
            InputSpec("draft_rope", GGMLType.F32, (h.rope_dim, n_rows)),
            InputSpec("draft_cells", GGMLType.I64, (n_rows,)),
        ]

    @classmethod
    def of(cls, inputs: GraphInputs) -> FillInputs:
        """The tensors by name."""
        t = inputs.tensors
        return cls(
            source=t["hidden_source"],
            pick=t.get("hidden_pick"),
            keep=t.get("hidden_keep"),
            target=t["hidden_target"],
            rope=t["draft_rope"],
            cells=t["draft_cells"],
        )


def fill(
    g: GraphScope, h: HParams, w: MtpWeights, pool: StatePool, embd: int, residual: int, step: FillInputs, n_rows: int
) -> list[int]:
    """Nodes, in this order, that append the head's K and V and keep the residual [hc*H, T] of the step's last rows."""
    width = h.hc_count * h.n_embd
    ring = _ring(g, pool)
    before = ggml.ggml_get_rows(g.ctx, ring, step.source)
    if step.pick is not None:
        hidden = ggml.ggml_get_rows(g.ctx, ggml.ggml_concat(g.ctx, before, residual, 1), step.pick)
        kept = residual
    else:
        assert step.keep is not None
        hidden = before
        if n_rows > 1:
            earlier = ggml.ggml_view_2d(g.ctx, residual, width, n_rows - 1, width * 4, 0)
            hidden = ggml.ggml_concat(g.ctx, before, earlier, 1)
        kept = ggml.ggml_get_rows(g.ctx, residual, step.keep)
    streams = front(g, h, w, embd, hidden, n_rows)
    attention = w.block.attention
    assert attention is not None
    xn = g.made(luce.ggml_luce_hc_norm(g.ctx, streams, w.block.attn_mix.norm, h.hc_count, h.rms_eps), "hc_norm")
    x, _ = blocks.mix(g, h, replace(w.block.attn_mix, inject=None), xn)  # nothing is injected: there is no block output
    k, v = g.mul_mat(attention.k, x), g.mul_mat(attention.v, x)
    keys, values = blocks.append_keys(g, h, attention, pool, h.n_layer, k, v, step.rope, step.cells, n_rows)
    return [keys, values, ggml.ggml_set_rows(g.ctx, ring, kept, step.target)]


def front(g: GraphScope, h: HParams, w: MtpWeights, embd: int, hidden: int, n_rows: int) -> int:
    """The head's residual [hc*H, T] from embeddings [H, T] and hidden rows [hc*H, T]."""
    e = g.made(luce.ggml_luce_hc_norm(g.ctx, embd, w.enorm, 1, h.rms_eps), "hc_norm")
    x = g.made(luce.ggml_luce_hc_norm(g.ctx, hidden, w.hnorm, w.norm_groups, h.rms_eps), "hc_norm")
    e = ggml.ggml_reshape_3d(g.ctx, e, h.n_embd, 1, n_rows)
    e = ggml.ggml_repeat_4d(g.ctx, e, h.n_embd, h.hc_count, n_rows, 1)
    x = ggml.ggml_reshape_3d(g.ctx, x, h.n_embd, h.hc_count, n_rows)
    both = ggml.ggml_reshape_2d(g.ctx, ggml.ggml_concat(g.ctx, e, x, 0), 2 * h.n_embd, h.hc_count * n_rows)
    return ggml.ggml_reshape_2d(g.ctx, g.mul_mat(w.eh_proj, both), h.hc_count * h.n_embd, n_rows)


@dataclass(frozen=True, slots=True)
class DraftKey:
    """What a draft graph is made for: sequences, tokens each, a bound on the pages that they have."""

    n_seqs: int
    n_steps: int
    n_pages: int


@dataclass(frozen=True, slots=True)
class DraftInputs:
    """B sequences, k steps; what a step j needs of its rows stands at j*B .. j*B + B - 1.

    embd F32 [H, B]: of the sequences' next tokens; source I32 [B]: rows of the pool's `hidden`; rows I32 [4, B*k];
    rope F32 [rope_dim, B*k]; cells I64 [B*k];
    pages I32 [1 + n_pages, B*k]: how many whole pages a row sees, then 0, 1, 2, ...
    """

    embd: int
    source: int
    rows: int
    rope: int
    cells: int
    pages: int


class DraftGraph:
    """k chained draft steps of B sequences, kept and replayed: tokens and residuals stay on the device between the steps.

    `drafts[j]` I32 [1, B] are read after compute, the largest logit of step j, of equal ones the lowest row of the output, which is an
    id where the head has no vocabulary of its own; `logits[j]` F32 [rows of the output, B] are kept for tests with `keep_logits`.
    """

    def __init__(
        self,
        key: DraftKey,
        h: HParams,
        w: MtpWeights,
        pool: StatePool,
        fault: Fault,
        *,
        on_cpu: bool,
        keep_logits: bool = False,
    ) -> None:
        self.key = key
        self._on_cpu = on_cpu
        n_nodes = NODES_PER_STEP * key.n_steps + 32
        self.arena = TensorArena.for_counts(2 * n_nodes, n_nodes)
        try:
            self.graph = Graph(self.arena, n_nodes)
            b, n = key.n_seqs, key.n_seqs * key.n_steps
            specs = [
                InputSpec("embd", GGMLType.F32, (h.n_embd, b)),
                InputSpec("source", GGMLType.I32, (b,)),
                InputSpec("rows", GGMLType.I32, (4, n)),
                InputSpec("rope", GGMLType.F32, (h.rope_dim, n)),
                InputSpec("cells", GGMLType.I64, (n,)),
                InputSpec("pages", GGMLType.I32, (1 + key.n_pages, n)),
            ]
            self.tensors = GraphInputs.new(self.arena, self.graph, specs, packed=True)
            self.inputs = DraftInputs(**self.tensors.tensors)
            self.drafts: list[int] = []
            self.logits: list[int] = []
            self._build(GraphScope(self.arena, self.graph, Phase.ROW, Phase.ROW, fault), h, w, pool, keep_logits)
        except BaseException:
            self.arena.close()
            raise

    def _build(self, g: GraphScope, h: HParams, w: MtpWeights, pool: StatePool, keep_logits: bool) -> None:
        b, step = self.key.n_seqs, self.inputs
        hidden = ggml.ggml_get_rows(g.ctx, _ring(g, pool), step.source)
        embd = step.embd
        for j in range(self.key.n_steps):
            hidden, xn = self._step(g, h, w, pool, embd, hidden, j)
            x, _ = blocks.mix(g, h, w.head_mix, xn)
            logits = g.mul_mat(w.output, x)
            best = self._best(g, logits)
            ggml.ggml_set_output(best)
            self.drafts.append(best)
            if keep_logits:
                ggml.ggml_set_output(logits)
                self.logits.append(logits)
            self.graph.expand(best)
            if j + 1 < self.key.n_steps:
                embd = ggml.ggml_get_rows(g.ctx, w.embedding, ggml.ggml_reshape_1d(g.ctx, best, b))

    def _best(self, g: GraphScope, logits: int) -> int:
        """The largest logit's id. A row with a NaN has the id -1 by the op argmax, which the CPU's row lookup stops the process for."""
        if self._on_cpu:
            return g.made(luce.ggml_luce_route(g.ctx, logits, 1), "route")
        return g.made(luce.ggml_luce_argmax(g.ctx, logits), "argmax")

    def _step(
        self, g: GraphScope, h: HParams, w: MtpWeights, pool: StatePool, embd: int, hidden: int, j: int
    ) -> tuple[int, int]:
        """The residual after step j and its normalised form, both [hc*H, B]."""
        b, step, block, eps = self.key.n_seqs, self.inputs, w.block, h.rms_eps
        assert block.attention is not None
        rows, rope, pages = (self._rows_of(g, t, j) for t in (step.rows, step.rope, step.pages))
        cells = ggml.ggml_view_1d(g.ctx, step.cells, b, j * b * 8)
        residual = front(g, h, w, embd, hidden, b)
        xn = g.made(luce.ggml_luce_hc_norm(g.ctx, residual, block.attn_mix.norm, h.hc_count, eps), "hc_norm")
        x, inject = blocks.mix(g, h, block.attn_mix, xn)
        q_gate, k, v = (g.mul_mat(t, x) for t in (block.attention.q, block.attention.k, block.attention.v))
        g.now(q_gate, k, v)
        keys, values = blocks.append_keys(g, h, block.attention, pool, h.n_layer, k, v, rope, cells, b)
        out = blocks.attend(
            g, h, block.attention, q_gate, keys, values, pages, PAGE_TOKENS, rope, pool.pages, rows, b
        )  # fmt: skip
        residual, xn = blocks.combine(g, h, residual, out, inject, block.ffn_mix.norm, b)
        x, inject = blocks.mix(g, h, block.ffn_mix, xn)
        out, _ = blocks.moe(g, h, block.moe, x, b)
        return blocks.combine(g, h, residual, out, inject, w.head_mix.norm, b)

    def _rows_of(self, g: GraphScope, tensor: int, j: int) -> int:
        """Step j's rows of an input."""
        header = tensor_struct(tensor)
        b = self.key.n_seqs
        return ggml.ggml_view_2d(g.ctx, tensor, header.ne[0], b, header.nb[1], j * b * header.nb[1])

    def compute(self, backend: Backend) -> None:
        """Run once with the inputs that are set."""
        backend.compute(self.graph)

    def close(self) -> None:
        """Free the graph. Idempotent."""
        self.arena.close()


def _ring(g: GraphScope, pool: StatePool) -> int:
    """The pool's hidden rows as [hc*H, (R + 1) * n_slots]."""
    if pool.hidden is None:
        raise ValueError("expected a state pool with hidden rows, found one without")
    ne = tensor_struct(pool.hidden).ne
    return ggml.ggml_reshape_2d(g.ctx, pool.hidden, ne[0], ne[1] * ne[2])
