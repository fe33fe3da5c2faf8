"""What follows the projections of a sparse attention layer, as one graph and node by node: the same bits and the same state.

A GPU computes the graph in fewer launches than it has nodes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from pyluce.native import ggml, luce
from pyluce.selftest.bench import Array, OpBench
from pyluce.selftest.cases import normal, rows_table
from pyluce.state.pages import PAGE_TOKENS
from tests.support.device import DEVICE, load

EPS, RATIO, T = 1e-6, 4, 3
POSITIONS = ((0, 130), (0, 131), (1, 7))
"""Slot and position of the rows: the second and the third complete a block, the second with the first's key."""
PAGES = np.array([[3, 1, 5], [2, 4, 0]], np.int32)
CELLS = 6 * PAGE_TOKENS
N_BLOCK_MAX = PAGES.shape[1] * PAGE_TOKENS // RATIO
STATE = ("k", "v", "raw", "pooled")


@dataclass(frozen=True)
class Shape:
    """Heads of d values, those of the indexer of di; `n_top` of at most N_BLOCK_MAX blocks are chosen."""

    heads: int
    n_kv: int
    d: int
    n_rot: int
    hi: int
    di: int
    n_top: int
    kind: type

    def arrays(self) -> dict[str, Array]:
        rng = np.random.default_rng(5)
        width, cells = (
            self.d * self.n_kv,
            [PAGES[s][p // PAGE_TOKENS] * PAGE_TOKENS + p % PAGE_TOKENS for s, p in POSITIONS],
        )
        return {
            "q_gate": normal(rng, T, 2 * self.d * self.heads), "k_in": normal(rng, T, width), "v_in": normal(rng, T, width),
            "index_q": normal(rng, T, self.di * self.hi), "index_k": normal(rng, T, self.di),
            "q_norm": normal(rng, self.d), "k_norm": normal(rng, self.d), "iq_norm": normal(rng, self.di), "ik_norm": normal(rng, self.di),
            "rope": normal(rng, T, self.n_rot), "block_rope": normal(rng, T, self.n_rot),
            "cells": np.array(cells, np.int64), "pages": PAGES, "rows": rows_table(*((s, p, 1) for s, p in POSITIONS)),
            "k": normal(rng, CELLS, width).astype(self.kind), "v": normal(rng, CELLS, width).astype(self.kind),
            "raw": normal(rng, CELLS, self.di), "pooled": normal(rng, CELLS // RATIO, self.di),
        }  # fmt: skip


SHAPES = {
    "model": Shape(heads=4, n_kv=2, d=256, n_rot=64, hi=2, di=128, n_top=6, kind=np.float16),
    "model, all": Shape(heads=4, n_kv=2, d=256, n_rot=64, hi=2, di=128, n_top=N_BLOCK_MAX, kind=np.float16),
    "small": Shape(heads=4, n_kv=2, d=32, n_rot=8, hi=2, di=16, n_top=6, kind=np.float32),
    "small, all": Shape(heads=3, n_kv=1, d=48, n_rot=16, hi=1, di=20, n_top=N_BLOCK_MAX, kind=np.float16),
}


def roped(c: int, x: dict[str, int], name: str, norm: str, heads: int, stride: int) -> int | None:
    return luce.ggml_luce_norm_rope(c, x[name], x[norm], x["rope"], heads, stride, EPS)


def pooled(c: int, x: dict[str, int]) -> int | None:
    return luce.ggml_luce_qsa_pool(
        c, x["index_k"], x["ik_norm"], x["block_rope"], x["raw"], x["pooled"], x["pages"], x["rows"], RATIO, EPS
    )


def as_graph(device: str, z: Shape) -> list[Array]:
    """The result, then the state."""

    def build(c: int, x: dict[str, int]) -> int | None:
        index_q = roped(c, x, "index_q", "iq_norm", z.hi, z.di)
        selected = luce.ggml_luce_qsa_select(
            c, index_q or 0, x["pooled"], pooled(c, x) or 0, x["pages"], x["rows"], RATIO, z.n_top, N_BLOCK_MAX, 0
        )
        turned = roped(c, x, "k_in", "k_norm", z.n_kv, z.d)
        keys = ggml.ggml_set_rows(c, x["k"], ggml.ggml_reshape_2d(c, turned or 0, z.d * z.n_kv, T), x["cells"])
        values = ggml.ggml_set_rows(c, x["v"], x["v_in"], x["cells"])
        q, row = roped(c, x, "q_gate", "q_norm", z.heads, 2 * z.d), 2 * z.d * z.heads
        gate = ggml.ggml_view_2d(c, x["q_gate"], row - z.d, T, row * 4, z.d * 4)
        return luce.ggml_luce_qsa_attn(
            c, q or 0, keys, values, selected or 0, gate, x["pages"], x["rows"], RATIO, 2 * z.d, z.d**-0.5, 0
        )

    arrays = z.arrays()
    with OpBench(arrays, device=device) as bench:
        return [bench.run(build).reshape(T, -1), *(bench.read(name, arrays[name]) for name in STATE)]


def node_by_node(device: str, z: Shape) -> list[Array]:
    """The same; the host appends keys and values."""
    arrays = z.arrays()
    with OpBench(arrays, device=device) as bench:
        arrays["q"] = bench.run(lambda c, x: roped(c, x, "q_gate", "q_norm", z.heads, 2 * z.d))[0]
        turned = bench.run(lambda c, x: roped(c, x, "k_in", "k_norm", z.n_kv, z.d))
        arrays["iq"] = bench.run(lambda c, x: roped(c, x, "index_q", "iq_norm", z.hi, z.di))[0]
        arrays["after"] = bench.run(pooled).reshape(T, 1)
        for name in ("raw", "pooled"):
            arrays[name] = bench.read(name, arrays[name])
    arrays["k"][arrays["cells"]] = turned.reshape(T, -1).astype(z.kind)
    arrays["v"][arrays["cells"]] = arrays["v_in"].astype(z.kind)
    with OpBench(arrays, device=device) as bench:
        arrays["selected"] = bench.run(
            lambda c, x: luce.ggml_luce_qsa_select(
                c, x["iq"], x["pooled"], x["after"], x["pages"], x["rows"], RATIO, z.n_top, N_BLOCK_MAX, 0
            ),
            np.int32,
        ).reshape(T, -1)
    arrays["gate"] = np.pad(arrays["q_gate"][:, z.d :], ((0, 0), (0, z.d)))
    with OpBench(arrays, device=device) as bench:
        found = bench.run(
            lambda c, x: luce.ggml_luce_qsa_attn(
                c, x["q"], x["k"], x["v"], x["selected"], x["gate"], x["pages"], x["rows"], RATIO, 2 * z.d, z.d**-0.5, 0
            )
        )
    return [found.reshape(T, -1), *(arrays[name] for name in STATE)]


def differing(found: list[Array], expected: list[Array]) -> list[str]:
    """What is not the same bits."""
    pairs = zip(("result", *STATE), found, expected, strict=True)
    return [name for name, a, b in pairs if a.tobytes() != b.tobytes()]


@pytest.mark.parametrize("name", SHAPES)
def test_a_layers_graph_is_its_nodes(name: str) -> None:
    load()
    found = as_graph(DEVICE, SHAPES[name])
    assert np.isfinite(found[0]).all()
    assert differing(found, node_by_node(DEVICE, SHAPES[name])) == []


def test_control_another_choice_shows() -> None:
    load()
    assert differing(as_graph(DEVICE, SHAPES["model"]), as_graph(DEVICE, SHAPES["model, all"])) == ["result"]
