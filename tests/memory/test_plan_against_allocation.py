"""The plan from a header against what a runner of the same options really takes: luce-tiny and two random shapes, on LUCE_TEST_DEVICE."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pyluce.graph import TrunkRunner
from pyluce.memory.load import load_request, open_meter, read_load, runner_options
from pyluce.memory.machine import DeviceMemory, Machine, MemoryKind
from pyluce.memory.parts import Place
from pyluce.memory.planner import MemoryPlan, make_plan
from pyluce.options import LoadOptions
from tests.support.device import DEVICE, ON_GPU
from tests.support.models import TEST_SHAPE, ModelCache, luce_tiny_path

PLENTY = Machine(DeviceMemory(DEVICE, MemoryKind.DISCRETE if ON_GPU else MemoryKind.CPU, 64 << 30), 64 << 30)
OTHER_SHAPE = replace(
    TEST_SHAPE, n_layer=8, full_interval=4, n_embd=512, n_vocab=777, n_head=6, n_head_kv=2, head_dim=32, rope_dim=8, mtp=True,
    rope_sections=(2, 1, 1, 0), n_expert=6, n_ff_exp=96, n_ff_shexp=160, hc_low_rank=64 if ON_GPU else 48, ssm_k_heads=3, ssm_v_heads=6,
    indexer_dim=48, ple_heads=8, ple_base=127, fused_gate_up=True,
)  # fmt: skip
"""Odd sizes; a GPU's products of rows take widths that are multiples of 32, which 48 is not."""
NO_TABLE = replace(TEST_SHAPE, ple_layer=None, n_ff_exp=512, ssm_state=32, n_layer=3, hc_count=2)
TOLERANCE = 0.02


@pytest.fixture(scope="module", params=["luce-tiny", "other", "no-table"])
def model(request: pytest.FixtureRequest, model_cache: ModelCache) -> Path:
    if request.param == "luce-tiny":
        return luce_tiny_path()
    shape = OTHER_SHAPE.with_type("Q8_0") if request.param == "other" else NO_TABLE.with_type("Q4_K")
    return model_cache.write(f"plan-{request.param}.gguf", shape, 11)


def plan_of(model: Path, options: LoadOptions) -> MemoryPlan:
    facts, speculation = read_load(model, options)
    with open_meter(facts, options) as meter:
        return make_plan(facts, load_request(facts, options, speculation), PLENTY, meter)


def planned(plan: MemoryPlan, *names: str) -> int:
    return sum(part.n_bytes for part in plan.parts if part.what in names)


def close_to(found: int, expected: int) -> bool:
    return abs(found - expected) <= TOLERANCE * expected


@pytest.mark.parametrize(
    "options",
    [
        LoadOptions(max_ctx=700, threads=1, chunk=64, max_concurrency=3),
        LoadOptions(
            max_ctx=1024,
            threads=2,
            chunk=256,
            max_concurrency=1,
            kv_type="f32",
            prefix_cache_mib=0,
            repack=False,
            verify_width=1,
        ),
    ],
    ids=["3-slots", "repack-off"],
)
def test_plan_and_allocation_agree(model: Path, options: LoadOptions) -> None:
    if ON_GPU:
        options = replace(options, device=DEVICE, threads=None)
    drafting = options.verify_width != 1 and "no-table" not in model.name
    if drafting:
        options = replace(options, spec=("mtp",))
    plan = plan_of(model, options)
    with TrunkRunner(model, runner_options(plan, options)) as runner:
        states = [runner.new_sequence() for _ in range(options.max_concurrency)]
        for state in states:
            runner.prefill(state, [1 + i % 250 for i in range(2 * options.chunk)])
        runner.decode([(state, 5) for state in states])
        if plan.request.mtp:
            runner.draft([(state, 5, plan.request.max_rollback) for state in states])
            runner.decode([(state, 5) for state in states for _ in range(1 + plan.request.max_rollback)])
        report = runner.memory_report()
        for state in states:
            state.free()
    assert plan.request.mtp == (report["draft"] is not None) == drafting
    if report["draft"] is not None:
        assert planned(plan, "draft graphs") == report["draft"]["graph_bytes"] > 0
    weights, state_bytes = report["weights"], report["state"]["total_bytes"]
    assert planned(plan, "weights, derived") == weights["derived_bytes"]
    assert planned(plan, "n-gram table") == weights["ple_table_bytes"]
    assert planned(plan, "state", "prefix cache, pages") == state_bytes
    assert planned(plan, "graphs") == report["graph_bytes"]
    assert planned(plan, "workspace") == report["workspace_bytes"]
    on_device = weights["device_bytes"] + weights["repacked_bytes"] + weights["derived_bytes"]
    real = on_device + state_bytes + report["graph_bytes"] + report["workspace_bytes"]
    if report["draft"] is not None:
        real += report["draft"]["graph_bytes"]
    assert close_to(plan.total(Place.TARGET, mapped=False), real)
    if ON_GPU:
        assert close_to(planned(plan, "weights"), weights["device_bytes"])
        assert planned(plan, "token embedding, mapped") == weights["mapped_bytes"]
        return
    assert planned(plan, "weights, mapped") == weights["mapped_bytes"]
    assert planned(plan, "weights, repacked") == weights["repacked_bytes"]
    assert close_to(planned(plan, "tables"), report["host_bytes"])
