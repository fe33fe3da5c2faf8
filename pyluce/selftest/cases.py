"""Every luce op kind as cases of random sizes: what to compute on a device, and what the formulas give in float64.

Sizes come from a seeded generator, or are the model's own (`MODEL`). State is left as NaN where a sequence must not read it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from pyluce.native import luce
from pyluce.native.luce import ATTN_PHASE_PARAM, PAGE_TOKENS, Phase
from pyluce.native.tensors import tensor_struct
from pyluce.selftest import reference as ref
from pyluce.selftest.bench import Array, Build, OpBench, Weight
from pyluce.selftest.reference import EPS

Open = Callable[[Mapping[str, Array | Weight]], OpBench]
Rng = np.random.Generator


@dataclass(frozen=True, slots=True)
class Case:
    """One op at one size. `compute` gives what a device makes of it, `expected` the same in float64 (integers: exactly).

    `bound`: largest error over the largest value (at least 1) on a CPU; a GPU's fast exp and sums in trees get `GPU_SLACK` times it,
    or `gpu_bound`: matrix units take F16 keys with queries and weights rounded to F16, 2^-11 of each, and a score is a few units.
    """

    kind: str
    shape: str
    compute: Callable[[Open], list[Array]]
    expected: list[Array]
    bound: float = 2e-5
    gpu_bound: float | None = None

    def bound_on(self, gpu: bool) -> float:
        """The largest error that is fine there."""
        return self.bound if not gpu else self.gpu_bound or GPU_SLACK * self.bound

    def error(self, found: list[Array]) -> float:
        """Largest error over the largest value, at least 1; infinite for another integer or a value that is not finite."""
        worst = 0.0
        for got, want in zip(found, self.expected, strict=True):
            if got.shape != want.shape or (want.dtype.kind == "i" and not np.array_equal(got, want)):
                return float("inf")
            if not np.isfinite(got).all():
                return float("inf")
            worst = max(worst, float(np.abs(got - want).max() / max(1.0, float(np.abs(want).max()))))
        return worst


GPU_SLACK: Final = 10.0


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a case is made for; `rows` T, hidden size `h`, streams `s`, heads over K/V heads of `d`, indexer heads of `di`."""

    rows: int
    h: int
    s: int
    heads: int
    n_kv: int
    d: int
    n_rot: int
    di: int
    hi: int
    n_top: int
    tokens: int
    gd: int
    nk: int
    nv: int
    experts: int
    used: int

    def __str__(self) -> str:
        return f"T {self.rows}, H {self.h}x{self.s}"


MODEL: Final = Sizes(
    rows=5, h=2560, s=4, heads=24, n_kv=2, d=256, n_rot=64, di=128, hi=4, n_top=512, tokens=2600, gd=128, nk=16, nv=48,
    experts=512, used=10,
)  # fmt: skip
"""The widths of the real model, and more tokens than it may attend to."""


def random_sizes(rng: Rng) -> Sizes:
    """Small sizes, odd where the ops allow it."""

    def pick(*choices: int) -> int:
        return int(rng.choice(choices))

    n_kv, nk, experts = pick(1, 2, 3), pick(1, 2, 4), int(rng.integers(8, 70))
    d, di = pick(16, 32, 64, 128), pick(8, 16, 32, 64)
    return Sizes(
        rows=int(rng.integers(1, 20)), h=int(rng.integers(8, 300)), s=pick(1, 2, 3, 4), heads=n_kv * pick(1, 2, 3, 4), n_kv=n_kv,
        d=d, n_rot=pick(4, 8, 16), di=di, hi=pick(1, 2, 4), n_top=int(rng.integers(2, 20)), tokens=int(rng.integers(20, 300)),
        gd=pick(16, 32, 64), nk=nk, nv=nk * pick(1, 2, 3), experts=experts, used=int(rng.integers(1, 8)),
    )  # fmt: skip


def all_cases(rng: Rng, z: Sizes) -> Iterator[Case]:
    """Every kind at these sizes."""
    yield from hyper_connections(rng, z)
    yield norm_rope(rng, z)
    yield gdn(rng, z)
    yield from attention(rng, z)
    yield from ngram(rng, z)
    yield from experts(rng, z)


def wide(arrays: Mapping[str, Array]) -> dict[str, Array]:
    """As float64."""
    return {name: np.asarray(array, np.float64) for name, array in arrays.items()}


def rows_table(*runs: tuple[int, int, int]) -> npt.NDArray[np.int32]:
    """Rows for runs of (slot, first position, count)."""
    return np.array([(slot, first + i, 0, 0) for slot, first, count in runs for i in range(count)], np.int32)


def normal(rng: Rng, *shape: int, scale: float = 1.0) -> npt.NDArray[np.float32]:
    """Normally distributed values."""
    return np.asarray(rng.standard_normal(shape, np.float32) * np.float32(scale))


def hyper_connections(rng: Rng, z: Sizes) -> Iterator[Case]:
    """The five ops around the residual streams."""
    t, h, s = z.rows, z.h, z.s
    arrays = {
        "embd": normal(rng, t, h), "residual": normal(rng, t, s * h), "block": normal(rng, t, h), "inject": normal(rng, t, s),
        "norm": normal(rng, s * h), "gate": normal(rng, t, s * h, scale=3.0),
    }  # fmt: skip
    a, shape = wide(arrays), str(z)
    start = np.tile(a["embd"], (1, s))
    weights = 2 * ref.sigmoid(a["inject"] / s)
    new = (a["residual"].reshape(t, s, h) + a["block"][:, None] * weights[:, :, None]).reshape(t, s * h)

    def case(kind: str, build: Build, expected: Array) -> Case:
        def compute(open_bench: Open) -> list[Array]:
            with open_bench(arrays) as bench:
                return [bench.run(build)[0, 0]]

        return Case(kind, shape, compute, [expected])

    yield case(
        "hc_init",
        lambda c, x: luce.ggml_luce_hc_init(c, x["embd"], x["norm"], s, EPS),
        np.concatenate([start, ref.stream_rms(start, a["norm"], s)]),
    )
    yield case(
        "hc_norm",
        lambda c, x: luce.ggml_luce_hc_norm(c, x["residual"], x["norm"], s, EPS),
        ref.stream_rms(a["residual"], a["norm"], s),
    )
    yield case(
        "hc_mix",
        lambda c, x: luce.ggml_luce_hc_mix(c, x["residual"], x["gate"], s),
        (a["residual"] * ref.sigmoid(a["gate"])).reshape(t, s, h).mean(1),
    )
    yield case(
        "hc_combine",
        lambda c, x: luce.ggml_luce_hc_combine(c, x["residual"], x["block"], x["inject"], x["norm"], EPS),
        np.concatenate([new, ref.stream_rms(new, a["norm"], s)]),
    )
    yield case(
        "hc_combine",
        lambda c, x: luce.ggml_luce_hc_combine(c, x["residual"], x["block"], x["inject"], None, EPS),
        new,
    )
    yield case("silu_scale", lambda c, x: luce.ggml_luce_silu_scale(c, x["gate"], 0.25), ref.silu(a["gate"] * 0.25))


def norm_rope(rng: Rng, z: Sizes) -> Case:
    """Heads that lie apart, as the query's do beside its gate."""
    stride = 2 * z.d
    arrays = {
        "x": normal(rng, z.rows, z.heads * stride),
        "norm": normal(rng, z.d),
        "rope": normal(rng, z.rows, z.n_rot),
    }
    a = wide(arrays)
    heads = a["x"].reshape(z.rows, z.heads, stride)[:, :, : z.d]
    expected = ref.rotate(ref.rms(heads, a["norm"]), a["rope"][:, None, :])

    def compute(open_bench: Open) -> list[Array]:
        with open_bench(arrays) as bench:
            return [
                bench.run(lambda c, x: luce.ggml_luce_norm_rope(c, x["x"], x["norm"], x["rope"], z.heads, stride, EPS))[
                    0
                ]
            ]

    return Case("norm_rope", f"T {z.rows}, {z.heads} heads of {z.d}", compute, [expected])


def gdn(rng: Rng, z: Sizes) -> Case:
    """Two sequences: a chunk of the first, then rows of both in mixed company; padding rows at the end of the chunk."""
    d, nk, nv, taps, ring = z.gd, z.nk, z.nv, 4, 5
    channels = (2 * nk + nv) * d
    chunk = int(rng.integers(20, 150))
    steps = [[(0, 0, chunk), (-1, 0, 3)], [(1, 0, 3), (0, chunk, 2)], [(0, chunk + 2, 1), (1, 3, 5)]]
    widths = {"qkv": channels, "z": nv * d, "beta": nv, "alpha": nv}
    a = {name: normal(rng, 2, chunk + 8, width) for name, width in widths.items()}
    conv, misc = normal(rng, taps, channels, scale=0.5), normal(rng, 2 * nv + d)
    misc[nv : 2 * nv] = -np.abs(misc[nv : 2 * nv])
    kernel, more = conv.astype(np.float64), misc.astype(np.float64)
    inputs: list[list[Any]] = [[a[name][i].astype(np.float64) for name in widths] for i in range(2)]
    whole = [ref.gdn(qkv, gate, beta, alpha, kernel, more, nk) for qkv, gate, beta, alpha in inputs]
    expected = [
        np.concatenate([np.zeros((n, nv * d)) if slot < 0 else whole[slot][p : p + n] for slot, p, n in runs])
        for runs in steps
    ]

    def compute(open_bench: Open) -> list[Array]:
        state = np.full((2, ring, nv * d * d), np.nan, np.float32)
        history = np.full((2, ring + taps - 1, channels), np.nan, np.float32)
        found = []
        for number, runs in enumerate(steps):
            arrays: dict[str, Array | Weight] = {
                n: np.concatenate([a[n][slot, p : p + k] for slot, p, k in runs]) for n in a
            }
            arrays |= {"conv": conv, "misc": misc, "state": state, "history": history, "rows": rows_table(*runs)}
            keep = number > 0
            with open_bench(arrays) as bench:

                def build(c: int, x: dict[str, int], keep: bool = keep) -> int | None:
                    return luce.ggml_luce_gdn(
                        c, x["qkv"], x["z"], x["beta"], x["alpha"], x["conv"], x["misc"], x["state"], x["history"], x["rows"],
                        nk, EPS, keep, 0,
                    )  # fmt: skip

                found.append(bench.run(build)[0, 0])
                state, history = bench.read("state", state), bench.read("history", history)
        return found

    return Case("gdn", f"{chunk} tokens and rows, {nk}/{nv} heads of {d}", compute, expected, 1e-4)


def attention(rng: Rng, z: Sizes) -> Iterator[Case]:
    """Pooling, choice of blocks and attention, each from exact inputs; the sequence's pages lie in a random order."""
    n, ratio, slot = z.tokens, 4, 1
    n_pages = -(-n // PAGE_TOKENS)
    pages = np.zeros((2, n_pages), np.int32)
    pages[slot] = rng.permutation(n_pages) + 1
    n_cells = (n_pages + 2) * PAGE_TOKENS
    at = np.arange(n)
    cells = pages[slot][at // PAGE_TOKENS] * PAGE_TOKENS + at % PAGE_TOKENS
    block_cells, n_blocks = cells[::ratio][: n // ratio] // ratio, n // ratio
    keys, norm, n_rot = normal(rng, n, z.di), normal(rng, z.di), min(z.n_rot, z.di)
    rope = normal(rng, n, n_rot)
    first_rope = rope[::ratio].astype(np.float64)
    blocks = ref.pooled_keys(keys.astype(np.float64), norm.astype(np.float64), first_rope, ratio)

    def pool(open_bench: Open) -> list[Array]:
        raw, pooled = (
            np.full((n_cells, z.di), np.nan, np.float32),
            np.full((n_cells // ratio, z.di), np.nan, np.float32),
        )
        for first, last in ((0, n // 2), (n // 2, n)):
            arrays: dict[str, Array | Weight] = {
                "key": keys[first:last], "norm": norm, "rope": np.ascontiguousarray(rope[at[first:last] // ratio * ratio]),
                "raw": raw, "pooled": pooled, "pages": pages, "rows": rows_table((slot, first, last - first)),
            }  # fmt: skip
            with open_bench(arrays) as bench:

                def build(c: int, x: dict[str, int]) -> int | None:
                    return luce.ggml_luce_qsa_pool(
                        c, x["key"], x["norm"], x["rope"], x["raw"], x["pooled"], x["pages"], x["rows"], ratio, EPS
                    )

                bench.run(build)
                raw, pooled = bench.read("raw", raw), bench.read("pooled", pooled)
        return [raw[cells], pooled[block_cells]]

    yield Case("qsa_pool", f"{n} tokens of {z.di}", pool, [keys, blocks])

    # a run a slot, as a step has them; all slots share the pages
    starts = [
        (0, 1),
        (ratio - 2, 3),
        (int(rng.integers(0, n)), 1),
        (int(rng.integers(0, n // 2)), 7),
        (max(0, n - 40), 40),
        (n - 1, 1),
    ]
    runs = [(index, first, min(count, n - first)) for index, (first, count) in enumerate(starts)]
    pages = np.repeat(pages[slot : slot + 1], len(runs), axis=0)
    table = rows_table(*runs)
    chosen_rows = table[:, 1]
    queries = normal(rng, len(table), z.hi, z.di)
    pooled = np.full((n_cells // ratio, z.di), np.nan, np.float32)
    pooled[block_cells] = blocks
    exact = pooled[block_cells].astype(np.float64)
    n_block_max = n_pages * PAGE_TOKENS // ratio
    picked = [
        ref.select(q.astype(np.float64), exact, int(p), ratio, z.n_top)
        for q, p in zip(queries, chosen_rows, strict=True)
    ]
    selected = np.zeros((len(table), 1 + z.n_top), np.int32)
    for row, choice in enumerate(picked):
        selected[row, : 1 + len(choice)] = [len(choice), *choice]

    def select(open_bench: Open) -> list[Array]:
        arrays: dict[str, Array | Weight] = {
            "q": queries, "pooled": pooled, "after": np.zeros((len(table), 1), np.float32), "pages": pages, "rows": table,
        }  # fmt: skip
        with open_bench(arrays) as bench:

            def build(c: int, x: dict[str, int]) -> int | None:
                return luce.ggml_luce_qsa_select(
                    c, x["q"], x["pooled"], x["after"], x["pages"], x["rows"], ratio, z.n_top, n_block_max, 0
                )

            found = bench.run(build, np.int32)[0, 0]
        for row, choice in enumerate(picked):
            found[row, 1 + len(choice) :] = 0  # beyond the count nothing is promised
        return [found]

    yield Case("qsa_select", f"{z.n_top} of {n_blocks} blocks, {z.hi} heads of {z.di}", select, [selected])

    q, gate = normal(rng, len(table), z.heads, z.d), normal(rng, len(table), z.heads * z.d)
    wide_q, wide_gate = q.astype(np.float64), gate.reshape(q.shape).astype(np.float64)
    for kind in (np.float32, np.float16):
        k, v = (np.full((n_cells, z.n_kv * z.d), np.nan, kind) for _ in range(2))
        k[cells], v[cells] = normal(rng, n, z.n_kv * z.d), normal(rng, n, z.n_kv * z.d)
        wide_k, wide_v = (array[cells].reshape(n, z.n_kv, z.d).astype(np.float64) for array in (k, v))
        attended = [
            ref.attend(q64, wide_k, wide_v, gate64, attended_tokens(choice, int(p), ratio), z.d**-0.5).reshape(-1)
            for q64, gate64, choice, p in zip(wide_q, wide_gate, picked, chosen_rows, strict=True)
        ]
        arrays: dict[str, Array | Weight] = {
            "q": q, "k": k, "v": v, "selected": selected, "gate": gate, "pages": pages, "rows": table,
        }  # fmt: skip

        def attend(open_bench: Open, arrays: Mapping[str, Array | Weight] = arrays) -> list[Array]:
            with open_bench(arrays) as bench:

                def build(c: int, x: dict[str, int], phase: Phase) -> int | None:
                    node = luce.ggml_luce_qsa_attn(
                        c, x["q"], x["k"], x["v"], x["selected"], x["gate"], x["pages"], x["rows"],
                        ratio, z.d, z.d**-0.5, 0,
                    )  # fmt: skip
                    if node:
                        tensor_struct(node).op_params[ATTN_PHASE_PARAM] = int(phase)
                    return node

                return [bench.run(partial(build, phase=phase))[0, 0] for phase in (Phase.ROW, Phase.CHUNK)]

        name = f"{np.dtype(kind).name} K/V, {z.heads}/{z.n_kv} heads of {z.d}, {n} tokens"
        yield Case("qsa_attn", name, attend, [np.stack(attended)] * 2, gpu_bound=2e-3 if kind is np.float16 else None)


def attended_tokens(blocks: list[int], position: int, ratio: int) -> list[int]:
    """The tokens of the chosen blocks and of the incomplete one at the end."""
    tail = range((position + 1) // ratio * ratio, position + 1)
    return [block * ratio + i for block in blocks for i in range(ratio)] + list(tail)


def ngram(rng: Rng, z: Sizes) -> Iterator[Case]:
    """The n-gram layer's gate, and its convolution over one sequence in pieces."""
    taps, dilation, n, s, h = 4, 3, 25, z.s, z.h
    key, value, residual = normal(rng, n, s * h), normal(rng, n, h), normal(rng, n, s * h)
    gains = [normal(rng, s * h) for _ in range(3)]
    conv = normal(rng, taps, s * h)
    a, b, c, g0, g1, g2, kernel = (x.astype(np.float64) for x in (key, value, residual, *gains, conv))
    expected = ref.ple(a, b, c, (g0, g1, g2), kernel, dilation, s)
    pieces = (1, 2, 13, 1, 8)

    def compute(open_bench: Open) -> list[Array]:
        history, found, first = np.full((1, (taps - 1) * dilation + 2, s * h), np.nan, np.float32), [], 0
        for count in pieces:
            part = slice(first, first + count)
            arrays: dict[str, Array | Weight] = {
                "key": key[part], "value": value[part], "residual": residual[part], "conv": conv, "history": history,
                "rows": rows_table((0, first, count)), "g0": gains[0], "g1": gains[1], "g2": gains[2],
            }  # fmt: skip
            with open_bench(arrays) as bench:

                def build(ctx: int, x: dict[str, int]) -> int | None:
                    gated = luce.ggml_luce_ple_gate(
                        ctx, x["key"], x["value"], x["residual"], x["g0"], x["g1"], x["g2"], s, EPS
                    )
                    return luce.ggml_luce_ple_conv(
                        ctx, gated or 0, x["residual"], x["conv"], x["history"], x["rows"], dilation
                    )

                found.append(bench.run(build)[0, 0])
                history = bench.read("history", history)
            first += count
        return [np.concatenate(found)]

    yield Case("ple_gate, ple_conv", f"25 tokens, H {h}x{s}", compute, [expected], 5e-5)


def experts(rng: Rng, z: Sizes) -> Iterator[Case]:
    """The choice of experts, with ties, and their weighted sum with the shared one."""
    t, h = z.rows, z.h
    logits = normal(rng, t, z.experts, scale=3.0)
    ties = rng.choice(z.experts, min(3, z.experts), replace=False)
    logits[0, ties] = 50.0
    order = np.argsort(-logits, axis=-1, kind="stable")[:, : z.used].astype(np.int32)
    arrays: dict[str, Any] = {
        "logits": logits, "picks": normal(rng, t, z.used, h), "shared": normal(rng, t, h), "gate": normal(rng, t, 1), "ids": order,
    }  # fmt: skip
    a = wide({name: array for name, array in arrays.items() if name != "ids"})
    shape = f"T {t}, {z.used} of {z.experts}"

    def route(open_bench: Open) -> list[Array]:
        with open_bench(arrays) as bench:
            return [bench.run(lambda c, x: luce.ggml_luce_route(c, x["logits"], z.used), np.int32)[0, 0]]

    def combine(open_bench: Open) -> list[Array]:
        def build(c: int, x: dict[str, int]) -> int | None:
            return luce.ggml_luce_moe_combine(c, x["picks"], x["logits"], x["ids"], x["shared"], x["gate"])

        with open_bench(arrays) as bench:
            return [bench.run(build)[0, 0]]

    yield Case("route", shape, route, [order])
    yield argmax(rng, z)
    expected = ref.moe(a["picks"], a["logits"], order, a["shared"], a["gate"])
    yield Case("moe_combine", f"{shape}, H {h}", combine, [expected])


def argmax(rng: Rng, z: Sizes) -> Case:
    """The best token of each row: the lowest of equal ones, -1 for a row with a NaN."""
    width = int(rng.integers(1, 4000)) if z.h < MODEL.h else 248_320
    logits = normal(rng, z.rows, width)
    logits[0, rng.integers(0, width, 3)] = 9.0
    expected = logits.argmax(-1).astype(np.int32)[:, None]
    if z.rows > 1:
        logits[1, width // 2] = np.nan
        expected[1] = -1

    def compute(open_bench: Open) -> list[Array]:
        with open_bench({"logits": logits}) as bench:
            return [bench.run(lambda c, x: luce.ggml_luce_argmax(c, x["logits"]), np.int32).reshape(-1, 1)]

    return Case("argmax", f"T {z.rows}, {width} values", compute, [expected])
