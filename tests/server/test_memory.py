"""Memory as people see it: every byte count of the runner's report is a number in the status, in /props and in /metrics."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx

from pyluce.luce import Luce
from pyluce.options import LoadOptions
from tests.support.echo_service import running_server


def byte_counts(report: Any, path: str = "") -> dict[str, int]:
    found: dict[str, int] = {}
    for name, value in report.items():
        inner = f"{path}.{name}" if path else name
        if isinstance(value, dict):
            found.update(byte_counts(value, inner))
        elif name.endswith("_bytes"):
            found[inner] = value
    return found


def test_every_byte_count_is_a_number(tiny_model: Path) -> None:
    options = LoadOptions(max_ctx=128, threads=1, max_concurrency=2)
    with Luce.load_with(tiny_model, options) as luce, running_server(luce, options) as server:
        counts = byte_counts(luce.memory_report())
        assert {"weights.mapped_bytes", "weights.ple_table_bytes", "state.kv_bytes", "graph_bytes"} <= set(counts)
        assert counts["weights.mapped_bytes"] > 0
        status = httpx.get(server.url + "/status/json").json()
        assert byte_counts(status["memory"]) == counts
        assert byte_counts(httpx.get(server.url + "/props").json()["memory"]["engine"]) == counts
        metrics = httpx.get(server.url + "/metrics").text
        places = re.findall(r'^luce_memory_bytes\{place="([^"]+)"\} (\S+)$', metrics, flags=re.MULTILINE)
        assert {place: int(float(value)) for place, value in places} == counts
