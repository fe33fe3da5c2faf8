"""What a runner takes, read from the buffers that exist. Published by the engine thread; see docs/memory.md for every field."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Final

import psutil

from pyluce.graph.drafting import Drafter
from pyluce.graph.inputs import InputWriter
from pyluce.graph.layers import TrunkWeights
from pyluce.graph.results import ResultReader
from pyluce.native.backend import Backend
from pyluce.native.devices import device_memory
from pyluce.state import SnapshotStore, StatePool
from pyluce.state.memory import available_bytes
from pyluce.weights import Weights

ENTRIES_SHOWN: Final = 64


def weights_report(placed: Weights, trunk: TrunkWeights) -> dict[str, int]:
    """Bytes and numbers of weights by place, with the tensors that were derived while loading."""
    return {**asdict(placed.report()), "derived_bytes": trunk.derived_bytes}


def device_report(backend: Backend) -> dict[str, Any]:
    """The device that computes: its name, and what its driver (for a CPU the system) says of its memory now."""
    if backend.is_cpu:
        return {
            "name": backend.name,
            "kind": "cpu",
            "free": available_bytes(),
            "total": int(psutil.virtual_memory().total),
        }
    free, total = device_memory(backend.name)
    return {"name": backend.name, "kind": "gpu", "free": free, "total": total}


def host_bytes(inputs: InputWriter, results: ResultReader, drafter: Drafter | None, pool: StatePool) -> int:
    """Memory of the host beside weights: rotation angles, page tables, inputs on their way to a device and results from it."""
    drafts = drafter.host_bytes if drafter is not None else 0
    return inputs.host_bytes + results.host_bytes + drafts + pool.host_bytes


def snapshot_report(store: SnapshotStore, page_bytes: int) -> dict[str, Any]:
    """Kept prompts: `own_size` bytes beside the pages, and the entries used last, newest first, at most `ENTRIES_SHOWN`.

    Pages that entries share count in each.
    """
    entries = [
        {
            "tokens": entry.snapshot.length,
            "whole_prompt": entry.snapshot.logits is not None,
            "page_size": len(set(entry.snapshot.pages)) * page_bytes,
            "own_size": entry.snapshot.own_bytes,
        }
        for entry in store.newest_entries(ENTRIES_SHOWN)
    ]
    return {"own_size": store.own_bytes, "entries": entries}
