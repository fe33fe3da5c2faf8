"""GET /props `memory`: what the engine published, in the documented shape, and true."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from pyluce.engine.stats import EngineStats, SlotState, SlotStats
from pyluce.luce import Luce
from pyluce.options import LoadOptions
from pyluce.server.memory import memory_section
from pyluce.server.schemas.props import MemoryProps, Props
from tests.support.echo_service import echo_server, running_server

SHAPE = {
    "available": None,
    "cache": {
        "location", "capacity_tokens", "live_tokens", "kv_bytes", "recurrent_bytes", "draft_feature_bytes", "other_bytes",
        "host_state_bytes",
    },
    "snapshots": {"count", "entries", "device_bytes", "host_bytes", "budget_bytes"},
    "process": {"rss_bytes", "peak_rss_bytes"},
    "devices": {
        "name", "kind", "free_bytes", "total_bytes", "weights_bytes", "cache_bytes", "snapshots_bytes", "workspaces_bytes",
    },
    "weights": {"device_bytes", "mapped_bytes", "repacked_bytes", "derived_bytes", "disk_bytes"},
    "workspaces": {"graph_bytes", "draft_graph_bytes", "work_buffer_bytes"},
    "parked_devices": {"name", "context", "why"},
    "engine": None,
}  # fmt: skip
ENTRY = {"slot", "role", "tokens", "bytes", "location", "host_copy_bytes"}


def props_memory(url: str) -> dict[str, Any]:
    shown = httpx.get(url + "/props").json()
    Props.model_validate(shown)
    memory: dict[str, Any] = shown["memory"]
    return memory


def chat(url: str, text: str) -> None:
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 4}
    assert httpx.post(url + "/v1/chat/completions", json=body, timeout=30).status_code == 200


def test_the_shape_is_stable_and_the_numbers_are_those_of_the_buffers(tiny_model: Path) -> None:
    options = LoadOptions(max_ctx=256, threads=1, max_concurrency=1, chunk=64, prefix_cache_mib=16, idle_prefill=False)
    with Luce.load_with(tiny_model, options) as luce, running_server(luce, options) as server:
        memory = props_memory(server.url)
        assert set(memory) == set(SHAPE)
        for name, fields in SHAPE.items():
            if isinstance(fields, set):
                section = memory[name][0] if name == "devices" else memory[name]
                assert section == [] if name == "parked_devices" else set(section) == fields, name
        report = luce.memory_report()
        cache = memory["cache"]
        parts = ("kv_bytes", "recurrent_bytes", "draft_feature_bytes", "other_bytes")
        assert sum(cache[part] for part in parts) == report["state"]["total_bytes"]
        assert (cache["location"], cache["capacity_tokens"], cache["live_tokens"]) == ("host", 256, 0)
        assert memory["snapshots"]["count"] == 0 and memory["snapshots"]["entries"] == []
        chat(server.url, "hello")
        after = props_memory(server.url)
        assert {k: v for k, v in after["cache"].items() if k != "host_state_bytes"} == {
            k: v for k, v in cache.items() if k != "host_state_bytes"
        }, "the cache is allocated once"
        assert after["cache"]["host_state_bytes"] > 0
        kept = after["snapshots"]
        assert kept["count"] == len(kept["entries"]) >= 2
        assert {entry["role"] for entry in kept["entries"]} == {"prefix", "prefill_cache"}
        assert all(set(entry) == ENTRY for entry in kept["entries"])
        assert [entry["slot"] for entry in kept["entries"]] == list(range(kept["count"]))
        assert kept["host_bytes"] == luce.memory_report()["prefix_cache"]["n_bytes"] <= kept["budget_bytes"] == 16 << 20
        assert kept["device_bytes"] == 0
        assert sum(entry["host_copy_bytes"] for entry in kept["entries"]) <= kept["host_bytes"]
        assert max(entry["bytes"] for entry in kept["entries"]) <= kept["host_bytes"]
        (device,) = after["devices"]
        weights = after["weights"]
        assert device["weights_bytes"] == sum(size for place, size in weights.items() if place != "disk_bytes")
        assert weights["mapped_bytes"] + weights["repacked_bytes"] + weights["disk_bytes"] == luce.info.size_bytes
        assert device["workspaces_bytes"] == sum(after["workspaces"].values()) > 0
        assert after["workspaces"]["graph_bytes"] == luce.memory_report()["graph_bytes"]
        rss = psutil.Process().memory_info().rss
        assert 0.5 * rss < after["process"]["rss_bytes"] < 2 * rss


def test_live_tokens_of_one_slot_only() -> None:
    report = {
        "weights": {"device_bytes": 7, "mapped_bytes": 5, "repacked_bytes": 0, "derived_bytes": 1, "ple_table_bytes": 9},
        "state": {
            "kv_bytes": 40, "indexer_bytes": 8, "recurrent_bytes": 30, "hidden_size": 10, "total_bytes": 90, "capacity_tokens": 64,
        },
        "prefix_cache": {"entries": 1, "n_bytes": 25, "budget_bytes": 100},
        "snapshots": {
            "own_size": 5, "entries": [{"tokens": 3, "whole_prompt": False, "page_size": 20, "own_size": 5}],
        },
        "graph_bytes": 3, "workspace_bytes": 0, "host_bytes": 2, "draft": {"graph_bytes": 4},
        "device": {"name": "cuda:0", "kind": "gpu", "free": 1000, "total": 2000},
    }  # fmt: skip
    slot = SlotStats(state=SlotState.DECODE, prompt_done=5, prompt_total=5, generated=2)
    stats = EngineStats(started_at=0.0, heartbeat=0.0, slots=(slot,), memory=report)
    shown = MemoryProps.model_validate(memory_section(stats)).model_dump()
    assert shown["cache"] == {
        "location": "device", "capacity_tokens": 64, "live_tokens": 7, "kv_bytes": 40, "recurrent_bytes": 20,
        "draft_feature_bytes": 10, "other_bytes": 20, "host_state_bytes": 2,
    }  # fmt: skip
    assert shown["snapshots"] == {
        "count": 1, "device_bytes": 20, "host_bytes": 5, "budget_bytes": 100,
        "entries": [
            {"slot": 0, "role": "prefix", "tokens": 3, "bytes": 25, "location": "device", "host_copy_bytes": 5}
        ],
    }  # fmt: skip
    assert shown["devices"] == [
        {
            "name": "cuda:0", "kind": "gpu", "free_bytes": 1000, "total_bytes": 2000, "weights_bytes": 8, "cache_bytes": 90,
            "snapshots_bytes": 20, "workspaces_bytes": 7,
        },
        {
            "name": "host", "kind": "host", "free_bytes": None, "total_bytes": None, "weights_bytes": 5, "cache_bytes": 2,
            "snapshots_bytes": 5, "workspaces_bytes": 0,
        },
    ]  # fmt: skip
    two = EngineStats(started_at=0.0, heartbeat=0.0, slots=(slot, SlotStats()), memory=report)
    assert memory_section(two)["cache"]["live_tokens"] is None


def test_without_a_report_it_says_so() -> None:
    with echo_server() as (server, _, _):
        memory = props_memory(server.url)
    assert memory["available"] is False
    assert [memory[name] for name in ("cache", "snapshots", "weights", "workspaces")] == [None] * 4
    assert memory["devices"] == []
    assert memory["process"]["rss_bytes"] > 0


def test_what_a_park_left_of_a_gpu() -> None:
    left = [
        {"name": "cuda:0", "context": "released", "why": None},
        {"name": "cuda:1", "context": "kept", "why": "2 backends still use it"},
    ]
    stats = EngineStats(started_at=0.0, heartbeat=0.0, memory={"parked_devices": left}, parked="it was asked for")
    shown = MemoryProps.model_validate(memory_section(stats)).model_dump()
    assert shown["parked_devices"] == left and shown["available"] is False and shown["devices"] == []


def test_a_client_never_computes_it(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The report is taken on the engine's thread, at the start and after each request; /props returns the published one."""
    from pyluce.graph import TrunkRunner

    threads: list[str] = []
    real = TrunkRunner.memory_report

    def watched(self: TrunkRunner) -> dict[str, object]:
        threads.append(threading.current_thread().name)
        return real(self)

    monkeypatch.setattr(TrunkRunner, "memory_report", watched)
    options = LoadOptions(max_ctx=128, threads=1, max_concurrency=1, idle_prefill=False)
    with Luce.load_with(tiny_model, options) as luce, running_server(luce, options) as server:
        at_start = len(threads)
        assert at_start >= 1
        first = props_memory(server.url)
        for _ in range(5):
            assert props_memory(server.url)["engine"] == first["engine"]
        assert len(threads) == at_start
        chat(server.url, "a")
        assert len(threads) == at_start + 1
        assert props_memory(server.url)["engine"] != first["engine"]
    assert len(set(threads)) == 1 and "MainThread" not in threads


def test_it_is_described(client: httpx.Client) -> None:
    document = client.get("/openapi.json").json()
    schemas = document["components"]["schemas"]
    answer = document["paths"]["/props"]["get"]["responses"]["200"]["content"]["application/json"]["schema"]
    assert answer == {"$ref": "#/components/schemas/Props"}
    assert set(schemas["MemoryProps"]["properties"]) == set(SHAPE)
    for name, section in (
        ("cache", "CacheMemory"), ("snapshots", "SnapshotMemory"), ("process", "ProcessMemory"), ("devices", "DeviceMemory"),
        ("weights", "WeightMemory"), ("workspaces", "WorkspaceMemory"), ("parked_devices", "ParkedDevice"),
    ):  # fmt: skip
        assert set(schemas[section]["properties"]) == SHAPE[name]
        assert set(schemas[section]["required"]) == SHAPE[name]
    assert set(schemas["SnapshotEntry"]["properties"]) == ENTRY
    text = (Path(__file__).resolve().parents[2] / "docs" / "memory.md").read_text(encoding="utf-8")
    names = set(SHAPE) | ENTRY | {field for fields in SHAPE.values() for field in fields or ()}
    assert [name for name in sorted(names) if f"`{name}`" not in text] == []
