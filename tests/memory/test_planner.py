"""The planner's decisions, over a meter whose sizes are easy to add up, and over the real one for the published model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pyluce.memory.experts import expert_bytes, plan_hot, route_shape, routed_experts, split_graph_bytes
from pyluce.memory.facts import ModelFacts, TensorFact, load_published, published_names, read_facts
from pyluce.memory.machine import DeviceMemory, Machine, MemoryKind
from pyluce.memory.meter import Meter
from pyluce.memory.parts import Place
from pyluce.memory.planner import MemoryPlan, PlanError, Request, largest_fit, make_plan
from pyluce.placement.counts import RouteShape
from pyluce.placement.hot import choose_hot
from pyluce.placement.options import PlacementOptions
from pyluce.placement.table_file import RoutesError, write_routes
from pyluce.state.layout import StateOptions, page_bytes, recurrent_bytes
from pyluce.weights import ModelError
from pyluce.weights.ggml_types import F16
from tests.support.models import luce_tiny_path
from tools.published_facts import TARGET, document

GIB = 1 << 30
MIB = 1 << 20


def state(n_ctx: int, n_slots: int) -> StateOptions:
    return StateOptions(n_slots=n_slots, n_ctx=n_ctx, kv_type="f16", reach=0, ring=1, conv_margin=1, ple_margin=1)


SIZES = read_facts(luce_tiny_path()).hparams
PAGE = page_bytes(SIZES, state(4096, 1))


class SimpleMeter:
    """State: 1 MiB a slot and 1 KiB a token of it; a row of a chunk: 4 KiB; no workspace. Pages are as large as they are."""

    derived_bytes = 1000

    def repacked_bytes(self, tensors: list[TensorFact]) -> int:
        return sum(t.n_bytes for t in tensors if t.name != "token_embd.weight")

    def copied_bytes(self, tensors: list[TensorFact]) -> int:
        return sum(t.n_bytes for t in tensors)

    def state_bytes(self, options: StateOptions) -> int:
        return options.n_slots * (MIB + 1024 * options.n_ctx) + PAGE * options.cache_pages

    def graph_bytes(self, options: StateOptions, rows: int) -> int:
        return 4096 * rows

    def work_bytes(self, options: StateOptions, rows: int) -> int:
        return 0

    def draft_bytes(self, options: StateOptions) -> int:
        return 0


def facts() -> ModelFacts:
    """luce-tiny's sizes, with 3 MiB of matrices, of which 1 MiB is the embedding, and a table of 5 MiB."""
    sizes = {
        "token_embd.weight": 1,
        "output.weight": 1,
        "blk.0.ffn_up_exps.weight": 1,
        "per_layer_token_embd.weight": 5,
    }
    tensors = {name: TensorFact(name, (1024, 512 * mib), F16) for name, mib in sizes.items()}
    return ModelFacts("simple", SIZES, tensors)


def cpu(free: int) -> Machine:
    return Machine(DeviceMemory("cpu", MemoryKind.CPU, free), free)


def plan(request: Request, machine: Machine, model: ModelFacts | None = None) -> MemoryPlan:
    return make_plan(model or facts(), request, machine, SimpleMeter())


def sizes(made: MemoryPlan) -> dict[str, int]:
    return {part.what: part.n_bytes for part in made.parts}


NOTHING_KEPT = Request(n_ctx=4096, n_slots=2, chunk=512, prefix_cache_bytes=0)
TABLES = 4096 * 16 * 4 + 2 * 64 * 4
FIXED = 2 * MIB + 1000 + 2 * (MIB + 4096 * 1024) + TABLES


def test_every_part_is_there() -> None:
    assert sizes(plan(NOTHING_KEPT, cpu(GIB))) == {
        "weights, mapped": MIB, "weights, repacked": 2 * MIB, "weights, derived": 1000, "n-gram table": 5 * MIB,
        "state": 2 * (MIB + 4096 * 1024), "graphs": 512 * 4096, "tables": TABLES,
    }  # fmt: skip


def test_a_plan_fits_to_the_byte() -> None:
    needed = FIXED + 512 * 4096
    least = -(-needed * 10 // 9)
    while (least - 1) - (least - 1) // 10 >= needed:
        least -= 1
    made = plan(NOTHING_KEPT, cpu(least))
    assert made.budget_bytes == needed
    assert len(made.warnings) == 1 and "are mapped" in made.warnings[0]
    assert plan(NOTHING_KEPT, cpu(least + 2 * MIB)).warnings == ()
    with pytest.raises(
        PlanError, match="max_concurrency: the state of 2 sequences of 4096 tokens takes .* at most 1 would"
    ):
        plan(NOTHING_KEPT, cpu(least - 2))


def test_the_largest_really_is() -> None:
    for free in (8 * MIB, 12 * MIB, 16 * MIB, 100 * MIB):
        found = largest_fit(facts(), NOTHING_KEPT, cpu(free), SimpleMeter())
        for request, fits in (
            (replace(NOTHING_KEPT, n_slots=found.n_slots), True),
            (replace(NOTHING_KEPT, n_slots=found.n_slots + 1), False),
            (replace(NOTHING_KEPT, n_ctx=found.n_ctx), True),
            (replace(NOTHING_KEPT, n_ctx=found.n_ctx + 256), False),
        ):
            if request.n_slots in (0, 65) or request.n_ctx == 0 or request.n_ctx > SIZES.n_ctx_train:
                continue
            if fits:
                plan(request, cpu(free))
            else:
                with pytest.raises(PlanError):
                    plan(request, cpu(free))
    nothing = largest_fit(facts(), NOTHING_KEPT, cpu(MIB), SimpleMeter())
    assert (nothing.n_ctx, nothing.n_slots) == (0, 0)


def test_chosen_rows_and_what_is_kept() -> None:
    request = Request(n_ctx=4096, n_slots=2)
    made = plan(request, cpu(GIB))
    assert made.chunk_tokens == 4096
    full = 64 * page_bytes(SIZES, state(4096, 2)) + recurrent_bytes(SIZES, state(4096, 2))
    assert made.prefix_cache_bytes == 6 * (full + 4 * SIZES.n_vocab)
    small = plan(request, cpu(28 * MIB))
    assert 256 <= small.chunk_tokens < 4096 and small.chunk_tokens % 256 == 0
    assert small.total(Place.TARGET, Place.HOST) <= small.budget_bytes
    assert plan(Request(n_ctx=4096, n_slots=1), cpu(4 * GIB)).chunk_tokens == 4096, "never more rows than the context"
    assert plan(Request(n_ctx=100, n_slots=1), cpu(4 * GIB)).chunk_tokens == 64


def test_what_was_asked_to_be_kept_is_kept_or_refused() -> None:
    asked = replace(NOTHING_KEPT, prefix_cache_bytes=8 * MIB)
    assert plan(asked, cpu(GIB)).prefix_cache_bytes == 8 * MIB
    with pytest.raises(PlanError, match=r"prefix_cache_mib: 8 MiB do not fit .* at most \d MiB would|at most \d would"):
        plan(asked, cpu(20 * MIB))


def test_devices() -> None:
    apart = Machine(DeviceMemory("cuda:0", MemoryKind.DISCRETE, GIB), 64 * GIB)
    made = plan(NOTHING_KEPT, apart)
    assert sizes(made)["weights"] == 2 * MIB
    assert sizes(made)["token embedding, mapped"] == MIB
    assert {p.place for p in made.parts if p.what in ("tables", "token embedding, mapped")} == {Place.HOST}
    shared = Machine(DeviceMemory("hip:0", MemoryKind.UNIFIED, 96 * GIB), 20 * MIB)
    assert shared.available_bytes == 20 * MIB, "unified memory is the host's"
    assert Machine(DeviceMemory("hip:0", MemoryKind.DISCRETE, GIB), 20 * MIB).available_bytes == GIB
    with pytest.raises(PlanError, match="device: the weights take .* cuda:0"):
        plan(NOTHING_KEPT, Machine(DeviceMemory("cuda:0", MemoryKind.DISCRETE, 2 * MIB), 64 * GIB))


def split(kind: MemoryKind = MemoryKind.UNIFIED, there: int = GIB, host: int = 64 * GIB) -> Machine:
    target = DeviceMemory("cuda:0", MemoryKind.DISCRETE, GIB)
    return Machine(target, host, DeviceMemory("hip:1", kind, there), hot_bytes=123)


def test_experts_on_a_second_device() -> None:
    parts = plan(NOTHING_KEPT, split()).parts
    graphs = split_graph_bytes(SIZES, 512)
    assert graphs == 512 * 4 * (SIZES.n_embd + SIZES.n_expert_used * (3 * SIZES.n_ff_exp + SIZES.n_embd + 1))
    assert [(p.what, p.n_bytes) for p in parts if p.place is Place.EXPERT] == [
        ("routed experts", MIB),
        ("graphs, by formula", graphs),
    ]
    assert {p.what: p.n_bytes for p in parts if p.place is Place.TARGET}["hot experts"] == 123
    needed = MIB + graphs
    least = needed * 10 // 9 + 2
    assert plan(NOTHING_KEPT, split(there=least)).chunk_tokens == 512
    for machine in (split(there=needed), split(host=needed)):
        with pytest.raises(PlanError, match="expert_device: the routed experts and their graphs take .* hip:1"):
            plan(NOTHING_KEPT, machine)
    assert plan(NOTHING_KEPT, split(MemoryKind.DISCRETE, host=needed)).chunk_tokens == 512, "its memory is its own"


def test_the_expert_device_limits_the_chunk() -> None:
    room = MIB + split_graph_bytes(SIZES, 1000)
    made = plan(Request(n_ctx=4096, prefix_cache_bytes=0), split(there=room * 10 // 9 + 2))
    assert made.chunk_tokens == 768
    assert plan(Request(n_ctx=4096, prefix_cache_bytes=0), split()).chunk_tokens == 4096


def test_kept_prompts_and_unified_experts_share_the_host() -> None:
    """Half of what is kept lies on the host, beside the experts where those are the host's too."""
    asked = Request(n_ctx=4096, chunk=256, prefix_cache_bytes=200 * MIB)
    host = 113 * MIB
    plan(asked, split(MemoryKind.DISCRETE, host=host))
    needs = 200 * MIB // 2 + MIB + split_graph_bytes(SIZES, 256)
    assert needs > host - host // 10
    with pytest.raises(PlanError, match="prefix_cache_mib: 200 MiB do not fit"):
        plan(asked, split(host=host))


def test_a_cpu_gives_its_experts_away() -> None:
    """The pair that a test can have: the CPU, and a device behind RPC."""
    machine = replace(split(MemoryKind.DISCRETE), target=DeviceMemory("cpu", MemoryKind.CPU, GIB), hot_bytes=0)
    made = plan(NOTHING_KEPT, machine)
    assert [sizes(made)[what] for what in ("weights, mapped", "weights, repacked", "routed experts")] == [MIB] * 3


def test_the_experts_of_a_draft_head_stay() -> None:
    model = facts()
    head = TensorFact(f"blk.{SIZES.n_layer}.ffn_up_exps.weight", (1024, 512), F16)
    model = replace(model, tensors={**model.tensors, head.name: head})
    assert [t.name for t in routed_experts(model)] == ["blk.0.ffn_up_exps.weight"]
    assert expert_bytes(model) == (MIB // SIZES.n_expert, *[0] * (SIZES.n_layer - 1))
    assert sizes(plan(NOTHING_KEPT, split(), model))["weights"] == 2 * MIB, "output and the head's experts"


def test_the_hot_set_of_a_placement(tmp_path: Path) -> None:
    model = read_facts(luce_tiny_path())
    size, shape = expert_bytes(model), route_shape(SIZES)
    counts = np.zeros((shape.n_layer, shape.n_expert), np.uint64)
    counts[0, 3], counts[1, 2] = 7, 3
    table = tmp_path / "routes.csv"
    write_routes(table, shape, counts)
    asked = PlacementOptions("cpu", "rpc:localhost:1", str(table), 1)
    found = plan_hot(model, asked)
    assert found is not None and found.hot == choose_hot(counts, size, MIB) and found.n_bytes <= MIB
    assert found.coverage == 1.0 and not found.learns
    learning = plan_hot(model, replace(asked, expert_placement=f"auto:{table}"))
    assert learning is not None and learning.hot == found.hot and learning.learns
    nothing = plan_hot(model, replace(asked, expert_placement="auto"))
    assert nothing is not None and nothing.coverage is None and nothing.n_bytes <= MIB
    assert plan_hot(model, PlacementOptions("cpu", "rpc:localhost:1")) is None
    write_routes(table, RouteShape(2, 4, 2), counts[:2, :4])
    with pytest.raises(RoutesError, match="expected the model's"):
        plan_hot(model, asked)


def test_half_of_what_is_kept_lies_on_the_host_of_a_discrete_device() -> None:
    asked = Request(n_ctx=4096, n_slots=1, chunk=256, prefix_cache_bytes=400 * MIB)
    target = DeviceMemory("cuda:0", MemoryKind.DISCRETE, 260 * MIB)
    made = plan(asked, Machine(target, 64 * GIB))
    on_host = sum(p.n_bytes for p in made.parts if p.place is Place.HOST and p.what.startswith("prefix"))
    assert 200 * MIB <= on_host <= 201 * MIB
    with pytest.raises(PlanError, match="prefix_cache_mib"):
        plan(asked, Machine(target, 100 * MIB))


def test_graphs_depend_on_the_context_by_their_span_only() -> None:
    """What lets the meter measure one graph for all contexts of a span."""
    model = read_facts(luce_tiny_path())
    found = []
    for n_ctx in (4100, 5000, 8192):
        with Meter(model) as meter:
            options = state(n_ctx, 2)
            found.append((meter.graph_bytes(options, 256), meter.work_bytes(options, 256)))
    assert len(set(found)) == 1
    with Meter(model) as meter:
        assert meter.work_bytes(state(300, 2), 256) <= found[0][1]


# the published model


@pytest.fixture(scope="module")
def published() -> Iterator[tuple[ModelFacts, Meter]]:
    model = load_published("ud-q4_k_xl")
    with Meter(model, on_cpu=False) as meter:
        yield model, meter


def test_the_shipped_facts_are_what_the_tool_writes() -> None:
    assert TARGET.read_text(encoding="utf-8") == document()
    with pytest.raises(ValueError, match="like: expected one of gsq-rco, iq4_nl, ud-q4_k_xl, found 'x'"):
        load_published("x")


@pytest.mark.parametrize(("tokens", "expected"), [(65_536, 2_231_967_744), (131_072, 4_345_896_960)])
def test_published_sizes_of_snapshots(tokens: int, expected: int) -> None:
    h = load_published("iq4_nl").hparams
    assert tokens // 64 * page_bytes(h, state(tokens, 1)) + recurrent_bytes(h, state(tokens, 1)) == expected


def test_the_large_model_without_its_file(published: tuple[ModelFacts, Meter]) -> None:
    model, meter = published
    machine = Machine(DeviceMemory("hip:0", MemoryKind.UNIFIED, 96 * GIB), 96 * GIB)
    made = make_plan(model, Request(n_ctx=131072), machine, meter)
    parts = sizes(made)
    assert parts["weights"] == 77 * GIB
    assert made.chunk_tokens >= 256 and made.chunk_tokens % 256 == 0
    assert made.total(Place.TARGET, Place.HOST) <= made.budget_bytes
    found = largest_fit(model, Request(n_ctx=131072), machine, meter)
    assert found.n_ctx == 262144 and found.n_slots >= 1
    with pytest.raises(PlanError, match="device: the weights take 77.01 GiB"):
        make_plan(model, Request(n_ctx=131072), Machine(replace(machine.target, free_bytes=64 * GIB), 64 * GIB), meter)


def test_the_split_of_the_large_model(published: tuple[ModelFacts, Meter]) -> None:
    model, meter = published
    card = DeviceMemory("hip:0", MemoryKind.DISCRETE, 32 * GIB)
    machine = Machine(card, 96 * GIB, DeviceMemory("hip:1", MemoryKind.UNIFIED, 96 * GIB), 8 * GIB)
    made = make_plan(model, Request(n_ctx=131072), machine, meter)
    assert made.chunk_tokens <= 8192
    assert round(sizes(made)["routed experts"] / GIB, 1) == 71.7
    hot = plan_hot(model, PlacementOptions("hip:0", "hip:1", "auto"))
    assert hot is not None and hot.hot.n_hot == 2742 and hot.n_bytes <= 8 * GIB
    with pytest.raises(ValueError, match="no split can be planned"):
        make_plan(load_published("iq4_nl"), Request(n_ctx=131072), machine, meter)
    assert published_names() == ["gsq-rco", "iq4_nl", "ud-q4_k_xl"]


def test_a_file_that_ends_behind_its_header(tmp_path: Path) -> None:
    whole = luce_tiny_path()
    expected = read_facts(whole)
    from pyluce.weights.shards import Shard

    with Shard(whole) as shard:
        offset = shard.header.data_offset
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(whole.read_bytes()[:offset])
    assert read_facts(cut) == expected
    short = tmp_path / "short.gguf"
    short.write_bytes(whole.read_bytes()[: offset // 2])
    with pytest.raises(ModelError, match="short.gguf"):
        read_facts(short)
    from pyluce.weights import open_model

    with pytest.raises(ModelError, match="data of tensor"):
        open_model(cut)
