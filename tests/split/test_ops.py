"""The ops of split picks, on the device under test: which picks are where, skipped experts, and sums in two parts."""

from __future__ import annotations

import numpy as np
import pytest

from pyluce.native import luce
from pyluce.native.luce import Phase
from pyluce.selftest.products import Product, Shape
from tests.support.device import DEVICE, load
from tests.support.op_bench import OpBench

T, USED, H, E = 11, 5, 48, 32


def rand(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def random_ids(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).random((T, E)).argsort(1)[:, :USED].astype(np.int32)


def test_picks_are_split_and_merged() -> None:
    ids = random_ids()
    slots = np.full(E, -1, np.int32)
    hot = np.random.default_rng(3).permutation(E)[:11]
    slots[hot] = np.arange(11)
    here, there = rand(T, USED, H), rand(T, USED, H, seed=1)
    with OpBench({"ids": ids, "slots": slots, "here": here, "there": there, "places": slots[ids]}) as bench:
        both = bench.run(lambda c, t: luce.ggml_luce_pick_split(c, t["ids"], t["slots"]), np.int32)[0, 0]
        merged = bench.run(lambda c, t: luce.ggml_luce_pick_merge(c, t["here"], t["there"], t["places"]))[0]
    assert both[:T].tolist() == slots[ids].tolist()
    assert both[T:].tolist() == np.where(slots[ids] < 0, ids, -1).tolist()
    assert 0 < (both[:T] < 0).sum() < T * USED
    assert merged.tobytes() == np.where(slots[ids][..., None] < 0, there, here).tobytes()


def test_an_id_that_is_no_expert_is_nowhere() -> None:
    ids = np.array([[E, -1, 3, 2**30, -5]], np.int32)
    with OpBench({"ids": ids, "slots": np.zeros(E, np.int32)}) as bench:
        both = bench.run(lambda c, t: luce.ggml_luce_pick_split(c, t["ids"], t["slots"]), np.int32)[0, 0]
    assert both.tolist() == [[-1, -1, 0, -1, -1], [-1] * 5]


@pytest.mark.parametrize("width", [H, 45, 2560])
def test_a_sum_in_two_parts_has_the_same_bits(width: int) -> None:
    arrays = {
        "picks": rand(T, USED, width), "logits": rand(T, E), "ids": random_ids(), "shared": rand(T, width, seed=1), "gate": rand(T, 1),
    }  # fmt: skip
    with OpBench(arrays) as bench:
        whole = bench.run(
            lambda c, t: luce.ggml_luce_moe_combine(c, t["picks"], t["logits"], t["ids"], t["shared"], t["gate"])
        )

        def parts(c: int, t: dict[str, int]) -> int | None:
            routed = luce.ggml_luce_moe_combine(c, t["picks"], t["logits"], t["ids"], None, None)
            return luce.ggml_luce_moe_join(c, routed or 0, t["shared"], t["gate"])

        assert bench.run(parts).tobytes() == whole.tobytes() and np.isfinite(whole).all()


@pytest.mark.parametrize("shape", [Shape(512, 64, 8, 3), Shape(256, 48, 8, 3, shared_input=False)], ids=str)
@pytest.mark.parametrize("type_name", ["F32", "F16", "Q8_0", "Q4_K", "Q5_K", "IQ4_NL"])
def test_a_row_product_skips_experts_that_are_not_here(type_name: str, shape: Shape) -> None:
    load()
    with Product(type_name, shape, Phase.ROW, 8, DEVICE) as product:
        whole = product.rows(0, 8)
        away = np.random.default_rng(1).random(product.ids.shape) < 0.4
        away[3] = True
        product.bench.set("ids", np.where(away, -1, product.ids).astype(np.int32))
        for first, count in ((0, 8), (3, 1), (2, 3)):
            rows, part = slice(first, first + count), product.rows(first, count)
            assert not part[away[rows]].any()
            assert part[~away[rows]].tobytes() == whole[rows][~away[rows]].tobytes()


def test_what_does_not_fit_is_refused() -> None:
    arrays = {"ids": random_ids(), "slots": np.zeros((2, E), np.int32), "x": rand(T, H), "gate": rand(T, 1)}
    with OpBench(arrays) as bench:
        with pytest.raises(AssertionError, match="refused"):
            bench.run(lambda c, t: luce.ggml_luce_pick_split(c, t["ids"], t["slots"]), np.int32)
        with pytest.raises(AssertionError, match="refused"):
            bench.run(lambda c, t: luce.ggml_luce_moe_join(c, t["x"], t["gate"], t["gate"]))
