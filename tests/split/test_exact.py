"""Split output is unsplit output, bit for bit, wherever each expert lives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pyluce.graph import experts
from pyluce.native import ggml
from pyluce.native.backend import GraphAllocator
from pyluce.native.luce import Phase
from pyluce.placement.hot import HotSet
from tests.split.schedule import N_EXPERT, N_LAYER, OPTIONS, model, results, tokens
from tests.support.device import ON_GPU
from tests.support.models import ModelCache
from tests.support.runs import open_runner

Expected = Callable[[str], dict[str, bytes]]


def random_hot(seed: int) -> HotSet:
    """Any number of experts of every layer, in any order."""
    rng = np.random.default_rng(seed)
    return HotSet(
        tuple(tuple(rng.permutation(N_EXPERT)[: rng.integers(0, N_EXPERT + 1)].tolist()) for _ in range(N_LAYER))
    )


PLACEMENTS = {
    "none": None,
    "one": HotSet(((3,),) * N_LAYER),
    "half": HotSet(((6, 0, 4, 2),) * N_LAYER),
    "all": HotSet((tuple(range(N_EXPERT)),) * N_LAYER),
    "all but some layers": HotSet(((), tuple(range(N_EXPERT))[::-1]) * (N_LAYER // 2)),
    "random": random_hot(1),
    "random again": random_hot(2),
}


@pytest.fixture(scope="session")
def expected(model_cache: ModelCache) -> Expected:
    known: dict[str, dict[str, bytes]] = {}

    def of(weight_type: str) -> dict[str, bytes]:
        if weight_type not in known:
            with open_runner(model(model_cache, weight_type), **OPTIONS) as runner:
                known[weight_type] = results(runner)
        return known[weight_type]

    return of


def differing(found: dict[str, bytes], expected: dict[str, bytes]) -> list[str]:
    assert set(found) == set(expected)
    return [name for name, value in expected.items() if found[name] != value]


@pytest.mark.parametrize(
    ("weight_type", "placement"),
    [*(("F32", name) for name in PLACEMENTS), *(("Q4_K", name) for name in ("none", "half", "random"))],
)
def test_every_placement(
    weight_type: str, placement: str, expert_device: str, model_cache: ModelCache, expected: Expected
) -> None:
    path = model(model_cache, weight_type)
    with open_runner(path, expert_device=expert_device, hot_experts=PLACEMENTS[placement], **OPTIONS) as runner:
        found = results(runner)
    assert differing(found, expected(weight_type)) == []


def test_fused_gate_and_up(expert_device: str, model_cache: ModelCache, expected: Expected) -> None:
    hot = PLACEMENTS["half"]
    with open_runner(model(model_cache, "fused"), expert_device=expert_device, hot_experts=hot, **OPTIONS) as runner:
        assert differing(results(runner), expected("fused")) == []


@pytest.mark.parametrize(("n_streams", "chunk"), [(2, 48), (2, 16), (4, 16)])
def test_chunks_at_the_same_time(n_streams: int, chunk: int, expert_device: str, model_cache: ModelCache) -> None:
    """Streams of a prompt, each at a layer of its own on either device, with the draft head and logits of every token."""
    options = {**OPTIONS, "chunk_tokens": chunk}
    with open_runner(model(model_cache, "F32"), **options) as runner:
        one = results(runner)
    options |= {"expert_device": expert_device, "hot_experts": PLACEMENTS["half"], "prompt_streams": n_streams}
    with open_runner(model(model_cache, "F32"), **options) as runner:
        assert differing(results(runner), one) == []
        if n_streams == 2 and chunk == 16:
            state = runner.new_sequence()
            cut = runner.prefill(state, tokens(70, 0), want="all", cuts=[17, 20, 64])
            assert cut is not None and (ON_GPU or cut.tobytes() == one["prompt 0"])


def test_layers_that_need_different_memory(
    expert_device: str, model_cache: ModelCache, expected: Expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Graph memory that grows at a later layer moves before any layer has its place in it."""
    once = experts.LayerGraphs._picks

    def more_and_more(graphs: Any, g: Any, h: Any, routed: Any, layer: int, x: int, ids: int) -> int:
        for _ in range(layer):
            again = once(graphs, g, h, routed, layer, x, ids)
            ggml.ggml_set_output(again)
            g.graph.expand(again)
        return once(graphs, g, h, routed, layer, x, ids)

    class Steady(GraphAllocator):
        def alloc(self, graph: Any) -> None:
            before = self.epoch
            super().alloc(graph)
            assert self.epoch == before, "memory moved while layers got their places"

    monkeypatch.setattr(experts, "GraphAllocator", Steady)
    monkeypatch.setattr(experts, "LAYER_NODES", 64)
    monkeypatch.setattr(experts.LayerGraphs, "_picks", more_and_more)
    options = {**OPTIONS, "expert_device": expert_device, "hot_experts": PLACEMENTS["one"], "prompt_streams": 2}
    with open_runner(model(model_cache, "F32"), **options) as runner:
        assert differing(results(runner), expected("F32")) == []


def test_a_slot_that_is_one_off_shows(expert_device: str, model_cache: ModelCache, expected: Expected) -> None:
    """The negative control: with two hot experts exchanged, rows differ; prompts, which do not use them, do not."""
    options = {**OPTIONS, "expert_device": expert_device, "hot_experts": PLACEMENTS["half"], "debug_fault": "hot_slot"}
    with open_runner(model(model_cache, "F32"), **options) as runner:
        wrong = differing(results(runner), expected("F32"))
    assert {"four rows", "verify"} <= set(wrong) and "prompt 0" not in wrong


def test_experts_are_exchanged_between_steps(expert_device: str, model_cache: ModelCache, expected: Expected) -> None:
    """A swap after every step changes nothing but who computes."""
    hot = HotSet(((0, 1),) * N_LAYER)
    with open_runner(model(model_cache, "F32"), expert_device=expert_device, hot_experts=hot, **OPTIONS) as runner:
        rng = np.random.default_rng(5)
        seen = set()

        def swap() -> None:
            current = runner.hot_experts
            assert current is not None
            seen.add(current.layers)
            layer, slot = int(rng.integers(N_LAYER)), int(rng.integers(2))
            cold = [e for e in range(N_EXPERT) if e not in current.layers[layer]]
            runner.replace_hot(layer, slot, int(rng.choice(cold)))

        runner.on_launch = swap  # the engine does it between steps, too
        found = results(runner)
        with pytest.raises(ValueError, match="expected an expert that is not hot"):
            runner.replace_hot(0, 0, runner.hot_experts.layers[0][1])  # type: ignore[union-attr]
    assert differing(found, expected("F32")) == [] and len(seen) > 8


def test_what_travels(expert_device: str, model_cache: ModelCache) -> None:
    """A row sends its input and ids and gets its picks back, a chunk gets a row for a row."""
    with open_runner(model(model_cache, "F32"), expert_device=expert_device, **OPTIONS) as runner:
        state = runner.new_sequence()
        runner.prefill(state, [1] * 16, want="none")
        runner.decode([(state, 1)])
        h = runner.hparams
        traffic = runner._graphs.link_bytes()
    row, ids = 4 * h.n_embd, 4 * h.n_expert_used
    assert traffic[Phase.ROW, 1] == (h.n_layer * (row + ids), h.n_layer * h.n_expert_used * row)
    assert traffic[Phase.CHUNK, 16] == (16 * h.n_layer * (row + ids + 4 * h.n_expert), 16 * h.n_layer * row)
