"""Upstream's kernels on the interpreter, against ggml's CPU: they run on real hardware every day, so they are its test."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from pyluce.native.ggml import (
    GGMLType,
    ggml_dsv4_hc_comb,
    ggml_dsv4_hc_post,
    ggml_dsv4_hc_pre,
    ggml_dsv4_hc_pre_gated,
    ggml_gated_delta_net,
    ggml_mul_mat,
    ggml_rms_norm,
    ggml_rope_ext,
    ggml_top_k,
)
from pyluce.selftest.bench import Array, OpBench, Weight
from pyluce.selftest.cases import normal
from tests.rdna.fakehip.build import built
from tests.rdna.kernels.device import FakeDevice

rng = np.random.default_rng(5)


@dataclass(frozen=True)
class Op:
    """`kernel`: part of the name of what must have been launched; `bound`: error over the largest value."""

    source: str
    kernel: str
    arrays: Callable[[], dict[str, Array | Weight]]
    build: Callable[[int, dict[str, int]], int | None]
    bound: float = 2e-6
    dtype: Any = np.float32
    wmma: bool = False


def rope(c: int, x: dict[str, int]) -> int:
    return ggml_rope_ext(c, x["x"], x["pos"], None, 32, 2, 0, 10000.0, 1.0, 0.0, 1.0, 0.0, 0.0)


def products(type_name: str, n_in: int, n_out: int, n_rows: int) -> dict[str, Array | Weight]:
    values = normal(rng, n_out, n_in) / np.float32(np.sqrt(n_in))
    return {"w": Weight.of(GGMLType[type_name], values), "x": normal(rng, n_rows, n_in)}


def product(
    source: str, kernel: str, type_name: str, sizes: tuple[int, int, int], bound: float, wmma: bool = False
) -> Op:
    return Op(
        source,
        kernel,
        lambda: products(type_name, *sizes),
        lambda c, x: ggml_mul_mat(c, x["w"], x["x"]),
        bound,
        wmma=wmma,
    )


HC = {"x": normal(rng, 3, 4, 80), "w": normal(rng, 3, 4), "gate": normal(rng, 3, 4, 80)}
GDN_T, GDN_D, GDN_K, GDN_V = 5, 32, 2, 4
GDN = {
    "q": normal(rng, 1, GDN_T, GDN_K, GDN_D) * np.float32(0.2), "k": normal(rng, 1, GDN_T, GDN_K, GDN_D) * np.float32(0.2),
    "v": normal(rng, 1, GDN_T, GDN_V, GDN_D), "g": -np.abs(normal(rng, 1, GDN_T, GDN_V, 1)),
    "beta": rng.random((1, GDN_T, GDN_V, 1), np.float32), "state": normal(rng, 1, GDN_V, GDN_D, GDN_D),
}  # fmt: skip
OPS = {
    "rms_norm": Op("norm.cu", "rms_norm_f32", lambda: {"x": normal(rng, 3, 1100)}, lambda c, x: ggml_rms_norm(c, x["x"], 1e-6)),
    "rope": Op(
        "rope.cu", "rope_neox", lambda: {"x": normal(rng, 3, 2, 64), "pos": np.array([0, 7, 300], np.int32)}, rope, 1e-5
    ),
    "top_k": Op(
        "top-k.cu", "", lambda: {"x": normal(rng, 3, 200)}, lambda c, x: ggml_top_k(c, x["x"], 7), 0.0, np.int32
    ),
    "dsv4_hc_comb": Op(
        "dsv4-hc.cu", "hc_comb",
        lambda: {"mixes": normal(rng, 3, 24), "scale": normal(rng, 3), "base": normal(rng, 24)},
        lambda c, x: ggml_dsv4_hc_comb(c, x["mixes"], x["scale"], x["base"], 1e-6, 5),
    ),
    "dsv4_hc_pre": Op("dsv4-hc.cu", "hc_pre", lambda: HC, lambda c, x: ggml_dsv4_hc_pre(c, x["x"], x["w"])),
    "dsv4_hc_pre_gated": Op(
        "dsv4-hc.cu", "hc_pre", lambda: HC, lambda c, x: ggml_dsv4_hc_pre_gated(c, x["x"], x["gate"], 0.25)
    ),
    "dsv4_hc_post": Op(
        "dsv4-hc.cu", "hc_post",
        lambda: {"x": normal(rng, 3, 80), "r": normal(rng, 3, 4, 80), "post": normal(rng, 3, 4), "comb": normal(rng, 3, 4, 4)},
        lambda c, x: ggml_dsv4_hc_post(c, x["x"], x["r"], x["post"], x["comb"]),
    ),
    "gated_delta_net": Op(
        "gated_delta_net.cu", "gated_delta_net", lambda: GDN,
        lambda c, x: ggml_gated_delta_net(c, x["q"], x["k"], x["v"], x["g"], x["beta"], x["state"], 1
        ), 1e-5,
    ),
    **{
        f"mul_mat_vec_q {name} {n}": product("mmvq.cu", "mul_mat_vec_q", name, (512, 20, n), 2e-2)
        for name in ("Q8_0", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ3_S") for n in (1, 4)
    },
    "mul_mat_q Q8_0": product("template-instances/mmq-instance-q8_0.cu", "mul_mat_q", "Q8_0", (512, 128, 64), 2e-2, wmma=True),
    "mul_mat_f F16": product("template-instances/mmf-instance-ncols_16.cu", "mul_mat_f", "F16", (256, 64, 16), 3e-3, wmma=True),
}  # fmt: skip


@pytest.mark.parametrize("name", OPS)
def test_upstreams_kernels_give_what_the_cpu_gives(executed: FakeDevice, device: str, name: str) -> None:
    op = OPS[name]
    if op.source not in built():
        pytest.skip(f"{op.source} was left out of this build: python -m tests.rdna.fakehip.build --upstream all")
    arrays = op.arrays()
    with OpBench(arrays, device=device) as bench:
        found = bench.run(op.build, op.dtype)
    executed.check()
    assert any(op.kernel in launch.name for launch in executed.launches), executed.launches
    if op.wmma:
        assert sum(launch.stats.wmma for launch in executed.launches if launch.stats) > 0
    with OpBench(arrays) as bench:
        expected = bench.run(op.build, op.dtype)
    if op.dtype is np.int32:  # in any order
        assert np.array_equal(np.sort(found, -1), np.sort(expected, -1))
    else:
        assert np.abs(found - expected).max() <= op.bound * max(1.0, np.abs(expected).max())
