"""A row of an op has the same bits in any company: whole graphs and each sequence's rows alone, on the interpreter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from pyluce.native import luce
from pyluce.selftest.bench import Array, OpBench
from pyluce.selftest.cases import normal, rows_table
from tests.rdna.kernels.device import FakeDevice

EPS = 1e-6
T, H, S, D, HEADS, E, USED, TOKENS, RATIO = 4, 72, 2, 32, 4, 20, 3, 70, 4
rng = np.random.default_rng(3)


@dataclass(frozen=True)
class Op:
    """`rows`: arrays with a row for each row of the graph; `shared`: those without. `blocks`: blocks of T rows of the result."""

    build: Callable[[int, dict[str, int]], int | None]
    rows: dict[str, Array]
    shared: dict[str, Array]
    dtype: Any = np.float32
    blocks: int = 1

    def run(self, device: str, part: slice) -> Array:
        """Rows `part` in a graph of their own, [rows, ...]."""
        arrays = {name: np.ascontiguousarray(array[part]) for name, array in self.rows.items()} | self.shared
        with OpBench(arrays, device=device) as bench:
            found = bench.run(self.build, self.dtype)
        count = len(next(iter(arrays.values())))
        return np.moveaxis(found.reshape(self.blocks, count, -1), 1, 0)


TABLE = rows_table((0, 5, 1), (1, 40, 1), (2, 2, 1), (3, 69, 1))
PAGES = np.array([[1, 2], [2, 1], [3, 3], [1, 3]], np.int32)
CELLS = 4 * 64
SELECTED = np.array([[1, 0, 0], [2, 1, 7], [0, 0, 0], [2, 3, 16]], np.int32)
ATTENTION_ROWS = {"q": normal(rng, T, HEADS, D), "gate": normal(rng, T, HEADS * D), "selected": SELECTED, "rows": TABLE}


def attention(kind: type, scale: float = D**-0.5) -> Op:
    return Op(
        lambda c, x: luce.ggml_luce_qsa_attn(
            c, x["q"], x["k"], x["v"], x["selected"], x["gate"], x["pages"], x["rows"], RATIO, D, scale, 0
        ),
        ATTENTION_ROWS,
        {"k": normal(rng, CELLS, 2 * D).astype(kind), "v": normal(rng, CELLS, 2 * D).astype(kind), "pages": PAGES},
    )


OPS = {
    "hc_init": Op(
        lambda c, x: luce.ggml_luce_hc_init(c, x["x"], x["norm"], S, EPS),
        {"x": normal(rng, T, H)}, {"norm": normal(rng, S * H)}, blocks=2,
    ),
    "hc_norm": Op(
        lambda c, x: luce.ggml_luce_hc_norm(c, x["x"], x["norm"], S, EPS), {"x": normal(rng, T, S * H)}, {"norm": normal(rng, S * H)}
    ),
    "hc_mix": Op(
        lambda c, x: luce.ggml_luce_hc_mix(c, x["x"], x["gate"], S), {"x": normal(rng, T, S * H), "gate": normal(rng, T, S * H)}, {}
    ),
    "hc_combine": Op(
        lambda c, x: luce.ggml_luce_hc_combine(c, x["x"], x["block"], x["inject"], x["norm"], EPS),
        {"x": normal(rng, T, S * H), "block": normal(rng, T, H), "inject": normal(rng, T, S)}, {"norm": normal(rng, S * H)}, blocks=2,
    ),
    "silu_scale": Op(lambda c, x: luce.ggml_luce_silu_scale(c, x["x"], 0.25), {"x": normal(rng, T, H)}, {}),
    "norm_rope": Op(
        lambda c, x: luce.ggml_luce_norm_rope(c, x["x"], x["norm"], x["rope"], HEADS, D, EPS),
        {"x": normal(rng, T, HEADS * D), "rope": normal(rng, T, 8)}, {"norm": normal(rng, D)},
    ),
    "qsa_select": Op(
        lambda c, x: luce.ggml_luce_qsa_select(c, x["q"], x["pooled"], x["after"], x["pages"], x["rows"], RATIO, 4, 32, 0),
        {"q": normal(rng, T, 2, 16), "after": np.zeros((T, 1), np.float32), "rows": rows_table((0, 40, 1), (1, 66, 1), (2, 31, 1), (3, 69, 1))},
        {"pooled": normal(rng, CELLS // RATIO, 16), "pages": PAGES}, np.int32,
    ),
    "qsa_attn F32": attention(np.float32),
    "qsa_attn F16": attention(np.float16),
    "ple_gate": Op(
        lambda c, x: luce.ggml_luce_ple_gate(c, x["key"], x["value"], x["x"], x["a"], x["b"], x["c"], S, EPS),
        {"key": normal(rng, T, S * H), "value": normal(rng, T, H), "x": normal(rng, T, S * H)},
        {name: normal(rng, S * H) for name in "abc"},
    ),
    "route": Op(lambda c, x: luce.ggml_luce_route(c, x["x"], USED), {"x": normal(rng, T, E)}, {}, np.int32),
    "argmax": Op(lambda c, x: luce.ggml_luce_argmax(c, x["x"]), {"x": normal(rng, T, 300)}, {}, np.int32),
    "moe_combine": Op(
        lambda c, x: luce.ggml_luce_moe_combine(c, x["picks"], x["x"], x["ids"], x["shared"], x["gate"]),
        {
            "picks": normal(rng, T, USED, H), "x": normal(rng, T, E), "shared": normal(rng, T, H), "gate": normal(rng, T, 1),
            "ids": rng.random((T, E)).argsort(1)[:, :USED].astype(np.int32),
        },
        {},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OPS)
def test_rows_do_not_see_each_other(executed: FakeDevice, device: str, name: str) -> None:
    op = OPS[name]
    whole = op.run(device, slice(0, T))
    assert np.isfinite(whole).all()
    for part in (slice(0, 1), slice(1, 3), slice(3, 4)):
        assert op.run(device, part).tobytes() == whole[part].tobytes(), part
    executed.check()


def test_a_sequences_recurrence_does_not_see_the_others(executed: FakeDevice, device: str) -> None:
    d, nk, nv, ring, taps = 16, 1, 2, 5, 4
    channels = (2 * nk + nv) * d
    runs = [(0, 7, 2), (1, 0, 1), (2, 12, 1)]
    widths = {"qkv": channels, "z": nv * d, "beta": nv, "alpha": nv}
    rows = {name: normal(rng, 4, width) for name, width in widths.items()} | {"rows": rows_table(*runs)}
    misc = normal(rng, 2 * nv + d)
    misc[nv : 2 * nv] = -np.abs(misc[nv : 2 * nv])
    shared = {"conv": normal(rng, taps, channels), "misc": misc}
    state, history = normal(rng, 3, ring, nv * d * d), normal(rng, 3, ring + taps - 1, channels)

    def run(part: slice) -> tuple[Array, Array, Array]:
        arrays = {name: np.ascontiguousarray(array[part]) for name, array in rows.items()} | shared
        with OpBench(arrays | {"state": state, "history": history}, device=device) as bench:
            out = bench.run(
                lambda c, x: luce.ggml_luce_gdn(
                    c, x["qkv"], x["z"], x["beta"], x["alpha"], x["conv"], x["misc"], x["state"], x["history"], x["rows"],
                    nk, EPS, True, 0,
                )
            )[0, 0]  # fmt: skip
            return out, bench.read("state", state), bench.read("history", history)

    out, states, histories = run(slice(0, 4))
    assert np.isfinite(out).all()
    for slot, part in enumerate((slice(0, 2), slice(2, 3), slice(3, 4))):
        alone, state_alone, history_alone = run(part)
        assert alone.tobytes() == out[part].tobytes()
        assert state_alone[slot].tobytes() == states[slot].tobytes()
        assert history_alone[slot].tobytes() == histories[slot].tobytes()
    executed.check()
