"""Every luce kind against numpy in float64, and what the constructors refuse."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pyluce.native import luce
from pyluce.native.luce import PAGE_TOKENS
from pyluce.selftest import reference as ref
from tests.support.device import SLACK, THREADS
from tests.support.op_bench import OpBench

T, H, S = 11, 48, 4
EPS = ref.EPS


def rand(*shape: int, seed: int = 0, scale: float = 1.0) -> Any:
    return (np.random.default_rng([seed, *shape]).standard_normal(shape) * scale).astype(np.float32)


def rows_table(*runs: tuple[int, int, int]) -> Any:
    """Rows for runs of (slot, first position, count)."""
    out = [(slot, first + i, 0, 0) for slot, first, count in runs for i in range(count)]
    return np.array(out, np.int32)


def close(found: Any, expected: Any, bound: float = 2e-5) -> None:
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() <= SLACK * bound * max(1.0, np.abs(expected).max())


def test_hyper_connection_ops() -> None:
    arrays = {
        "embd": rand(T, H), "residual": rand(T, S * H, seed=1), "block": rand(T, H, seed=2), "inject": rand(T, S, seed=3),
        "norm": rand(S * H, seed=4), "gate": rand(T, S * H, seed=5),
    }  # fmt: skip
    a = {k: v.astype(np.float64) for k, v in arrays.items()}
    with OpBench(arrays) as bench:
        got = bench.run(lambda c, t: luce.ggml_luce_hc_init(c, t["embd"], t["norm"], S, EPS))[0, 0]
        start = np.tile(a["embd"], (1, S))
        close(got, np.concatenate([start, ref.stream_rms(start, a["norm"], S)]))

        got = bench.run(lambda c, t: luce.ggml_luce_hc_norm(c, t["residual"], t["norm"], S, EPS))[0, 0]
        close(got, ref.stream_rms(a["residual"], a["norm"], S))

        got = bench.run(lambda c, t: luce.ggml_luce_hc_mix(c, t["residual"], t["gate"], S))[0, 0]
        close(got, (a["residual"] * ref.sigmoid(a["gate"])).reshape(T, S, H).mean(1))

        combine = lambda c, t: luce.ggml_luce_hc_combine(c, t["residual"], t["block"], t["inject"], t["norm"], EPS)  # noqa: E731
        got = bench.run(combine)[0, 0]
        weights = 2 * ref.sigmoid(a["inject"] / S)
        new = (a["residual"].reshape(T, S, H) + a["block"][:, None] * weights[:, :, None]).reshape(T, S * H)
        close(got, np.concatenate([new, ref.stream_rms(new, a["norm"], S)]))

        got = bench.run(lambda c, t: luce.ggml_luce_silu_scale(c, t["gate"], 0.25))[0, 0]
        close(got, ref.silu(a["gate"] * 0.25))


def test_norm_rope_reads_strided_heads() -> None:
    heads, d, n_rot = 3, 16, 8
    arrays = {"x": rand(T, heads * 2 * d), "norm": rand(d, seed=1), "rope": rand(T, n_rot, seed=2)}
    with OpBench(arrays) as bench:
        got = bench.run(lambda c, t: luce.ggml_luce_norm_rope(c, t["x"], t["norm"], t["rope"], heads, 2 * d, EPS))[0]
    x = arrays["x"].astype(np.float64).reshape(T, heads, 2 * d)[:, :, :d]
    close(got, ref.rotate(ref.rms(x, arrays["norm"]), arrays["rope"][:, None, :].astype(np.float64)))


@pytest.mark.parametrize("n_threads", THREADS)
def test_gdn_of_two_sequences_by_rows_and_by_chunks(n_threads: int) -> None:
    nk, nv, d, taps, ring = 2, 4, 16, 4, 5
    channels = (2 * nk + nv) * d
    a = {
        name: rand(2, 13, width, seed=i)
        for i, (name, width) in enumerate([("qkv", channels), ("z", nv * d), ("beta", nv), ("alpha", nv)])
    }
    conv, misc = rand(taps, channels, seed=9, scale=0.5), rand(2 * nv + d, seed=10)
    misc[nv : 2 * nv] = -np.abs(misc[nv : 2 * nv])
    expected = [
        ref.gdn(
            *(a[n][s].astype(np.float64) for n in ("qkv", "z", "beta", "alpha")),
            conv.astype(np.float64),
            misc.astype(np.float64),
            nk,
        )
        for s in range(2)
    ]
    state = np.full((2, ring, nv * d * d), np.nan, np.float32)
    history = np.full((2, ring + taps - 1, channels), np.nan, np.float32)
    # sequence 0: a chunk of 6, then rows; sequence 1 in the other slot: rows beside them
    steps = [[(0, 0, 6)], [(1, 0, 3), (0, 6, 2)], [(0, 8, 1), (1, 3, 7)], [(0, 9, 4), (1, 10, 3)]]
    for number, runs in enumerate(steps):
        arrays = {n: np.concatenate([a[n][s, p : p + c] for s, p, c in runs]) for n in a}
        arrays |= {"conv": conv, "misc": misc, "state": state, "history": history, "rows": rows_table(*runs)}
        with OpBench(arrays, n_threads) as bench:
            got = bench.run(
                lambda c, t, keep=number > 0: luce.ggml_luce_gdn(
                    c, t["qkv"], t["z"], t["beta"], t["alpha"], t["conv"], t["misc"], t["state"], t["history"], t["rows"],
                    nk, EPS, keep, 0,
                )
            )[0, 0]  # fmt: skip
            state, history = bench.read("state", state), bench.read("history", history)
        close(got, np.concatenate([expected[s][p : p + c] for s, p, c in runs]), 1e-4)


def qsa_case(n_tokens: int, kind: Any) -> dict[str, Any]:
    """A sequence in slot 1 whose pages lie out of order."""
    heads, n_kv, d, di, hi = 4, 2, 16, 8, 2
    n_pages = -(-n_tokens // PAGE_TOKENS)
    pages = np.zeros((2, n_pages), np.int32)
    pages[1] = np.arange(n_pages)[::-1] + 1
    return {
        "pages": pages, "n_cells": (n_pages + 2) * PAGE_TOKENS, "heads": heads, "n_kv": n_kv, "d": d, "di": di, "hi": hi,
        "q": rand(n_tokens, heads, d), "k": rand(n_tokens, n_kv, d, seed=1).astype(kind), "v": rand(n_tokens, n_kv, d, seed=2).astype(kind),
        "gate": rand(n_tokens, heads * d, seed=3), "raw": rand(n_tokens, di, seed=4), "iq": rand(n_tokens, hi, di, seed=5),
        "norm": rand(di, seed=6), "rope": rand(n_tokens, 4, seed=7),
    }  # fmt: skip


def cells_of(pages: Any, n: int) -> Any:
    p = np.arange(n)
    return pages[1][p // PAGE_TOKENS] * PAGE_TOKENS + p % PAGE_TOKENS


@pytest.mark.parametrize("kind", [np.float32, np.float16])
@pytest.mark.parametrize("n_threads", THREADS)
def test_qsa_pools_selects_and_attends(kind: Any, n_threads: int) -> None:
    n, ratio, n_top = 150, 4, 8
    case = qsa_case(n, kind)
    cells = cells_of(case["pages"], n)
    block_rope = case["rope"][np.arange(n) // ratio * ratio]
    pooled = np.full((case["n_cells"] // ratio, case["di"]), np.nan, np.float32)
    k = np.full((case["n_cells"], case["n_kv"] * case["d"]), np.nan, kind)
    v = k.copy()
    k[cells], v[cells] = case["k"].reshape(n, -1), case["v"].reshape(n, -1)
    arrays = {
        "key": case["raw"], "norm": case["norm"], "rope": np.ascontiguousarray(block_rope), "pages": case["pages"],
        "raw": np.full((case["n_cells"], case["di"]), np.nan, np.float32), "pooled": pooled, "rows": rows_table((1, 0, n)),
        "iq": case["iq"], "q": case["q"], "k": k, "v": v, "gate": case["gate"],
    }  # fmt: skip
    with OpBench(arrays, n_threads) as bench:

        def pool(c: int, t: dict[str, int]) -> int | None:
            return luce.ggml_luce_qsa_pool(
                c, t["key"], t["norm"], t["rope"], t["raw"], t["pooled"], t["pages"], t["rows"], ratio, EPS
            )

        def choose(c: int, t: dict[str, int], fault: int = 0) -> int:
            node = luce.ggml_luce_qsa_select(
                c, t["iq"], t["pooled"], pool(c, t) or 0, t["pages"], t["rows"], ratio, n_top, 48, fault
            )
            assert node
            return node

        chosen = bench.run(choose, np.int32)[0, 0]
        found = bench.read("pooled", pooled)
        attended = bench.run(
            lambda c, t: luce.ggml_luce_qsa_attn(
                c,
                t["q"],
                t["k"],
                t["v"],
                choose(c, t),
                t["gate"],
                t["pages"],
                t["rows"],
                ratio,
                case["d"],
                case["d"] ** -0.5,
                0,
            )
        )[0, 0]
    blocks = ref.pooled_keys(
        case["raw"].astype(np.float64), case["norm"].astype(np.float64), case["rope"][::ratio].astype(np.float64), ratio
    )
    close(found[cells[::ratio][: n // ratio] // ratio], blocks)
    for row in (0, 2, 3, 31, 32, 63, 64, 100, n - 1):
        expected = ref.select(case["iq"][row].astype(np.float64), blocks, row, ratio, n_top)
        assert chosen[row, 0] == len(expected) and chosen[row, 1 : 1 + len(expected)].tolist() == expected
        tokens = [b * ratio + i for b in expected for i in range(ratio)] + list(
            range((row + 1) // ratio * ratio, row + 1)
        )
        q, gate = case["q"][row].astype(np.float64), case["gate"][row].reshape(case["heads"], -1).astype(np.float64)
        out = ref.attend(q, case["k"].astype(np.float64), case["v"].astype(np.float64), gate, tokens, case["d"] ** -0.5)
        close(attended[row], out.reshape(-1))


@pytest.mark.parametrize(("fault", "expected"), [(0, [0, 1, 2]), (2, [7, 8, 9])])
def test_equal_block_scores_choose_the_lower_index(fault: int, expected: list[int]) -> None:
    n, ratio = 40, 4
    arrays = {
        "iq": np.ones((1, 1, 4), np.float32), "pooled": np.ones((PAGE_TOKENS // ratio, 4), np.float32), "pages": np.zeros((1, 1), np.int32),
        "rows": rows_table((0, n - 1, 1)), "after": np.zeros((1, 1), np.float32),
    }  # fmt: skip
    with OpBench(arrays) as bench:
        got = bench.run(
            lambda c, t: luce.ggml_luce_qsa_select(
                c, t["iq"], t["pooled"], t["after"], t["pages"], t["rows"], ratio, 3, 16, fault
            ),
            np.int32,
        )[0, 0]
    assert got[0].tolist() == [3, *expected]


def test_ple_of_one_sequence_in_pieces() -> None:
    taps, dilation, n = 4, 3, 25
    key, value, residual = rand(n, S * H), rand(n, H, seed=1), rand(n, S * H, seed=2)
    gains = tuple(rand(S * H, seed=3 + i) for i in range(3))
    conv = rand(taps, S * H, seed=8)
    expected = ref.ple(
        key.astype(np.float64), value.astype(np.float64), residual.astype(np.float64),
        tuple(g.astype(np.float64) for g in gains), conv.astype(np.float64), dilation, S,
    )  # type: ignore[arg-type]  # fmt: skip
    history = np.full((1, (taps - 1) * dilation + 2, S * H), np.nan, np.float32)
    at = 0
    for count in (1, 2, 13, 1, 1, 7):
        part = slice(at, at + count)
        arrays = {
            "key": key[part], "value": value[part], "residual": residual[part], "conv": conv, "history": history,
            "rows": rows_table((0, at, count)), **{f"gain{i}": g for i, g in enumerate(gains)},
        }  # fmt: skip
        with OpBench(arrays) as bench:

            def build(c: int, t: dict[str, int]) -> int | None:
                gated = luce.ggml_luce_ple_gate(
                    c, t["key"], t["value"], t["residual"], t["gain0"], t["gain1"], t["gain2"], S, EPS
                )
                return luce.ggml_luce_ple_conv(
                    c, gated or 0, t["residual"], t["conv"], t["history"], t["rows"], dilation
                )

            close(bench.run(build)[0, 0], expected[part], 5e-5)
            history = bench.read("history", history)
        at += count


def test_route_and_combine() -> None:
    n_expert, used = 32, 5
    logits = rand(T, n_expert, scale=3.0)
    logits[3, [4, 9, 20]] = 50.0  # equal: the lower index first
    arrays = {"logits": logits, "picks": rand(T, used, H), "shared": rand(T, H, seed=1), "gate": rand(T, 1, seed=2)}
    with OpBench(arrays) as bench:
        ids = bench.run(lambda c, t: luce.ggml_luce_route(c, t["logits"], used), np.int32)[0, 0]
        got = bench.run(
            lambda c, t: luce.ggml_luce_moe_combine(
                c, t["picks"], t["logits"], luce.ggml_luce_route(c, t["logits"], used) or 0, t["shared"], t["gate"]
            )
        )[0, 0]
    order = np.argsort(-logits, axis=-1, kind="stable")[:, :used]
    assert ids.tolist() == order.tolist() and ids[3, :3].tolist() == [4, 9, 20]
    close(
        got,
        ref.moe(*(arrays[n].astype(np.float64) for n in ("picks", "logits")), order, arrays["shared"], arrays["gate"]),
    )


def test_padding_rows_write_no_state_and_give_zeros() -> None:
    nk, nv, d, taps = 1, 2, 8, 4
    channels = (2 * nk + nv) * d
    rows = rows_table((0, 0, 2), (-1, 0, 2))
    state = np.full((1, 2, nv * d * d), 7.0, np.float32)
    arrays = {
        "qkv": rand(4, channels), "z": rand(4, nv * d), "beta": rand(4, nv), "alpha": rand(4, nv), "conv": rand(taps, channels),
        "misc": -np.abs(rand(2 * nv + d)), "state": state, "history": np.zeros((1, 5, channels), np.float32), "rows": rows,
    }  # fmt: skip
    with OpBench(arrays) as bench:
        got = bench.run(
            lambda c, t: luce.ggml_luce_gdn(
                c,
                t["qkv"],
                t["z"],
                t["beta"],
                t["alpha"],
                t["conv"],
                t["misc"],
                t["state"],
                t["history"],
                t["rows"],
                nk,
                EPS,
                False,
                0,
            )
        )[0, 0]
        after = bench.read("state", state)
    assert not got[2:].any() and got[:2].any()
    assert (after[0, 1] == 7.0).all() and not (after[0, 0] == 7.0).any()


def test_a_wrong_shape_is_refused_not_computed() -> None:
    arrays = {"x": rand(T, S * H), "norm": rand(S * H + 1), "gate": rand(T + 1, S * H)}
    with OpBench(arrays) as bench:
        with pytest.raises(AssertionError, match="refused"):
            bench.run(lambda c, t: luce.ggml_luce_hc_norm(c, t["x"], t["norm"], S, EPS))
        with pytest.raises(AssertionError, match="refused"):
            bench.run(lambda c, t: luce.ggml_luce_hc_mix(c, t["x"], t["gate"], S))
        with pytest.raises(AssertionError, match="refused"):
            bench.run(lambda c, t: luce.ggml_luce_route(c, t["x"], S * H + 1), np.int32)
