"""Requests on two devices: four at once, parked and loaded again, and a server that is killed in the middle of an answer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyluce import Luce
from pyluce.graph import swapping
from pyluce.luce import Completion
from pyluce.native.errors import DeviceLostError
from pyluce.placement.counts import RouteShape
from pyluce.placement.table_file import write_routes
from pyluce.server.memory import memory_section
from tests.serving.test_park import Running, request, wait
from tests.serving.test_prefix_cache import OPTIONS, prompt, run, same
from tests.split.schedule import model
from tests.split.server import RpcServer
from tests.support.device import only_cpu
from tests.support.models import TEST_SHAPE, ModelCache

pytestmark = only_cpu

WANTED = [request(50, 1, 40), request(65, 2, 30), request(130, 3, 20), request(33, 5, 30)]


@pytest.fixture(scope="module")
def path(model_cache: ModelCache) -> Path:
    return model(model_cache, "Q8_0")


@pytest.fixture(scope="module")
def expected(path: Path) -> list[Completion]:
    with Luce.load(path, max_concurrency=1, prefix_cache_mib=0, repack=False, verify_width=1, **OPTIONS) as luce:
        return [Completion.collect(one, luce.run(one)) for one in WANTED]


@pytest.fixture
def routes(tmp_path: Path) -> Path:
    """A table by which some experts of every layer fit into 1 MiB."""
    shape = RouteShape(TEST_SHAPE.n_layer, TEST_SHAPE.n_expert, TEST_SHAPE.n_expert_used)
    counts = np.random.default_rng(0).integers(1, 1000, (shape.n_layer, shape.n_expert)).astype(np.uint64)
    table = tmp_path / "routes.csv"
    write_routes(table, shape, counts)
    return table


@pytest.fixture
def own_server() -> Iterator[RpcServer]:
    running = RpcServer()
    yield running
    running.kill()


def load(path: Path, server: RpcServer, **options: Any) -> Luce:
    return Luce.load(path, **{"max_concurrency": 4, "expert_device": server.device, **OPTIONS, **options})


def test_four_at_once_with_drafts_and_parked_on_the_way(
    path: Path, server: RpcServer, routes: Path, expected: list[Completion], tmp_path: Path
) -> None:
    options = {"expert_placement": str(routes), "expert_budget_mib": 1, "prefix_cache_mib": 64}
    with load(path, server, cache_dir=tmp_path, **options) as luce:
        assert any("repack: off" in warning for warning in luce.info.warnings)
        before = luce.memory_report()["experts"]
        assert isinstance(before, dict) and 0 < before["hot_experts"] < TEST_SHAPE.n_layer * TEST_SHAPE.n_expert
        link = before["link"]
        assert link["peer_access"] is False and 0 < link["latency_s"] < 1 and link["bytes_s"] > 1e6
        first, second = memory_section(luce.stats())["devices"]
        assert first["name"] == "cpu" and first["weights_bytes"] >= before["hot_bytes"]
        assert (second["name"], second["kind"]) == (server.device, "experts")
        assert second["weights_bytes"] == before["bytes"] and second["workspaces_bytes"] == before["graph_bytes"] > 0
        running = [Running(luce, one) for one in WANTED]
        wait(lambda: running[0].n_tokens >= 5)
        assert luce.park() and luce.unpark()
        for one, answer in zip(running, expected, strict=True):
            assert same(one.result(), answer)
        after = luce.memory_report()["experts"]
        assert isinstance(after, dict) and after["hot_experts"] == before["hot_experts"], "resident again"
        again = run(luce, (*WANTED[2].prompt, *prompt(20, seed=8)), cuts=(len(WANTED[2].prompt),))
        assert again.timings.cached_tokens == len(WANTED[2].prompt)
        assert luce.stats().invariant_violations == 0


@pytest.mark.parametrize("begin", ["auto", "auto:table"])
def test_hot_experts_are_learned_while_it_answers(
    path: Path, server: RpcServer, routes: Path, expected: list[Completion], begin: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Swaps all the time, at any speed; answers stay the same, and what was learned is resident again after a park."""
    monkeypatch.setattr(swapping, "PROPOSE_EVERY_S", 0.0)
    options = {
        "expert_placement": begin.replace("table", str(routes)),
        "expert_budget_mib": 1,
        "expert_swap_mib_s": 1e6,
    }
    with load(path, server, prefix_cache_mib=0, **options) as luce:
        first = luce._engine._core.resources.runner.hot_experts  # type: ignore[attr-defined]
        for one, answer in zip([Running(luce, one) for one in WANTED], expected, strict=True):
            assert same(one.result(), answer)
        report = luce.memory_report()["experts"]
        assert isinstance(report, dict) and 0 < report["coverage"] < 1
        learned = luce._engine._core.resources.runner.hot_experts  # type: ignore[attr-defined]
        assert learned.n_hot == first.n_hot
        if begin == "auto":  # a table weighs more than these few rows
            assert report["swaps"] > 3 and learned != first
        assert luce.park() and luce.unpark()
        assert luce._engine._core.resources.runner.hot_experts == learned  # type: ignore[attr-defined]
        assert same(Running(luce, WANTED[1]).result(), expected[1])


def test_prompts_in_streams(path: Path, server: RpcServer, tmp_path: Path) -> None:
    """Chunks that are computed at once are kept and found like others; a request's own cut ends a wave."""
    first = prompt(400, seed=4)
    wanted = [
        (first, ()),
        ((*first[:320], *prompt(90, seed=5)), ()),
        (prompt(300, seed=6), (100,)),
        (prompt(30, seed=7), ()),
    ]
    with Luce.load(path, max_concurrency=1, prefix_cache_mib=0, repack=False, **OPTIONS) as luce:
        cold = [run(luce, tokens, cuts) for tokens, cuts in wanted]
    with load(path, server, prompt_streams=3, prefix_cache_mib=64, cache_dir=tmp_path) as luce:
        report = luce.memory_report()["experts"]
        assert isinstance(report, dict) and report["prompt_streams"] == 3
        for (tokens, cuts), answer in zip(wanted, cold, strict=True):
            assert same(run(luce, tokens, cuts), answer)
        again = run(luce, (*wanted[2][0][:100], *prompt(50, seed=9)), (100,))
        assert again.timings.cached_tokens == 100
        assert same(run(luce, first), cold[0]) and luce.stats().invariant_violations == 0


def test_killed_in_the_middle_of_an_answer(path: Path, own_server: RpcServer, expected: list[Completion]) -> None:
    with load(path, own_server, prefix_cache_mib=0) as luce:
        running = Running(luce, request(50, 1, 400))
        wait(lambda: running.n_tokens >= 5)
        own_server.kill()
        with pytest.raises(DeviceLostError, match="has gone in the middle of a step"):
            running.result()
        with pytest.raises(Exception, match="expected `luce rpc-server`"):
            Running(luce, WANTED[0]).result()
        own_server.start()
        for one, answer in zip(WANTED, expected, strict=True):
            assert same(Running(luce, one).result(), answer)
        assert luce.stats().invariant_violations == 0
