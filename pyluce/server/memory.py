"""The `memory` section of GET /props: the engine's last report in the reference system's shape. Nothing here asks the engine.

Missing numbers are null, never guessed: while a model is parked `available` is false and only `process` is known.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import psutil

from pyluce.engine.stats import EngineStats


def memory_section(stats: EngineStats) -> dict[str, Any]:
    """See `schemas.props.MemoryProps` for every field. `process` is sampled now."""
    report: Mapping[str, Any] = stats.memory
    known = all(isinstance(report.get(name), Mapping) for name in ("weights", "state", "device"))
    return {
        "available": known,
        "cache": _cache(stats) if known else None,
        "snapshots": _snapshots(report) if known else None,
        "process": process_memory(),
        "devices": _devices(report) if known else [],
        "weights": _weights(report) if known else None,
        "workspaces": _workspaces(report) if known else None,
        "parked_devices": list(report.get("parked_devices", ())),
        "engine": to_plain(report),
    }


def process_memory() -> dict[str, int | None]:
    """Resident memory of this process now, and its peak where the system tells."""
    rss = psutil.Process().memory_info().rss
    return {"rss_bytes": rss, "peak_rss_bytes": _peak_rss()}


def to_plain(value: object) -> Any:
    """A report as JSON can hold it."""
    if hasattr(value, "items"):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(item) for item in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def _location(report: Mapping[str, Any]) -> str:
    return "host" if report["device"]["kind"] == "cpu" else "device"


def _cache(stats: EngineStats) -> dict[str, Any]:
    report: Mapping[str, Any] = stats.memory
    state = report["state"]
    hidden = state.get("hidden_size", 0)
    recurrent = state["recurrent_bytes"] - hidden
    one = stats.slots[0] if len(stats.slots) == 1 else None
    return {
        "location": _location(report),
        "capacity_tokens": state["capacity_tokens"],
        "live_tokens": one.prompt_done + one.generated if one is not None else None,
        "kv_bytes": state["kv_bytes"],
        "recurrent_bytes": recurrent,
        "draft_feature_bytes": hidden,
        "other_bytes": state["total_bytes"] - state["kv_bytes"] - recurrent - hidden,
        "host_state_bytes": report.get("host_bytes", 0),
    }


def _snapshots(report: Mapping[str, Any]) -> dict[str, Any]:
    kept: Mapping[str, Any] = report.get("snapshots") or {}
    cache: Mapping[str, Any] = report.get("prefix_cache") or {}
    own, location = kept.get("own_size", 0), _location(report)
    entries = [
        {
            "slot": index,
            "role": "prefill_cache" if entry["whole_prompt"] else "prefix",
            "tokens": entry["tokens"],
            "bytes": entry["page_size"] + entry["own_size"],
            "location": location,
            "host_copy_bytes": entry["own_size"],
        }
        for index, entry in enumerate(kept.get("entries", ()))
    ]
    pages = cache.get("n_bytes", 0) - own
    return {
        "count": cache.get("entries", 0),
        "entries": entries,
        "device_bytes": pages if location == "device" else 0,
        "host_bytes": own if location == "device" else own + pages,
        "budget_bytes": cache.get("budget_bytes", 0),
    }


def _weights(report: Mapping[str, Any]) -> dict[str, int]:
    weights = report["weights"]
    return {
        "device_bytes": weights["device_bytes"],
        "mapped_bytes": weights["mapped_bytes"],
        "repacked_bytes": weights["repacked_bytes"],
        "derived_bytes": weights["derived_bytes"],
        "disk_bytes": weights["ple_table_bytes"],
    }


def _workspaces(report: Mapping[str, Any]) -> dict[str, int]:
    draft: Mapping[str, Any] = report.get("draft") or {}
    return {
        "graph_bytes": report["graph_bytes"],
        "draft_graph_bytes": draft.get("graph_bytes", 0),
        "work_buffer_bytes": report["workspace_bytes"],
    }


def _devices(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The device that computes, the one that has the routed experts, and, where the first is not the CPU, the host."""
    device, weights, snapshots = report["device"], report["weights"], _snapshots(report)
    workspaces = sum(_workspaces(report).values())
    experts: Mapping[str, Any] = report.get("experts") or {}
    on_host = weights["mapped_bytes"] + weights["repacked_bytes"]
    first = {
        "name": device["name"],
        "kind": device["kind"],
        "free_bytes": device["free"],
        "total_bytes": device["total"],
        "weights_bytes": weights["device_bytes"] + weights["derived_bytes"] + experts.get("hot_bytes", 0),
        "cache_bytes": report["state"]["total_bytes"],
        "snapshots_bytes": snapshots["device_bytes"],
        "workspaces_bytes": workspaces,
    }
    host = {
        "name": "host",
        "kind": "host",
        "free_bytes": None,
        "total_bytes": None,
        "weights_bytes": on_host,
        "cache_bytes": report.get("host_bytes", 0),
        "snapshots_bytes": snapshots["host_bytes"],
        "workspaces_bytes": 0,
    }
    second = {
        "name": experts.get("device"),
        "kind": "experts",
        "free_bytes": experts.get("free"),
        "total_bytes": experts.get("total"),
        "weights_bytes": experts.get("bytes", 0),
        "cache_bytes": 0,
        "snapshots_bytes": 0,
        "workspaces_bytes": experts.get("graph_bytes", 0),
    }
    beside = [second] if experts else []
    if device["kind"] != "cpu":
        return [first, *beside, host]
    for name in ("weights_bytes", "cache_bytes", "snapshots_bytes"):
        first[name] += host[name]
    return [first, *beside]


def _peak_rss() -> int | None:
    try:
        with open("/proc/self/status", encoding="ascii") as lines:
            for line in lines:
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        return None
    return None
