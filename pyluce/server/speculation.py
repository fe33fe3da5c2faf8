"""Speculation as /props and /metrics show it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from pyluce.engine.stats import EngineStats
from pyluce.spec.stats import SpecStats
from pyluce.speculation import Speculation


def mode(speculation: Speculation) -> str:
    """`off`, or the sources of drafts: `mtp`, `lookup`, `mtp+lookup`."""
    return "+".join(speculation.options.sources) if speculation.options.enabled else "off"


def section(speculation: Speculation, stats: EngineStats) -> dict[str, Any]:
    """The `speculative` section of /props. Depth 1 is the first of a list; `reached` counts drafts all of whose shallower ones were accepted."""
    found = stats.speculation or SpecStats()
    reason = speculation.mtp_reason or None
    drafted, tokens = speculation.draft_vocabulary
    return {
        "enabled": speculation.options.enabled,
        "ddtree_budget": None,
        "sources": list(speculation.options.sources) if speculation.options.enabled else [],
        "verify_width": speculation.options.width,
        "mtp": {
            "enabled": speculation.uses_head,
            "reason": reason,
            "path": speculation.draft_path,
            "max_tokens": speculation.head_tokens,
            "vocabulary": {"drafted": drafted, "tokens": tokens} if speculation.uses_head else None,
        },
        "drafted": found.drafted,
        "accepted": found.accepted,
        "by_source": {
            name: {"drafted": source.drafted, "reached": list(source.reached), "accepted": list(source.accepted)}
            for name, source in found.sources.items()
        },
        "steps_by_width": {str(width): count for width, count in found.widths.items()},
        "step_ms_by_rows": {str(rows): round(1000 * s, 3) for rows, s in found.step_seconds.items()},
        "draft_ms_by_depth": {str(depth): round(1000 * s, 3) for depth, s in found.draft_seconds.items()},
    }


def metrics(stats: EngineStats) -> Iterator[Metric]:
    """The families of /metrics; without speculation none has a sample."""
    found = stats.speculation or SpecStats()
    drafted = CounterMetricFamily("luce_drafted_tokens", "Drafts that were verified.", labels=("source",))
    reached = CounterMetricFamily(
        "luce_reached_drafts", "Drafts all of whose shallower ones were accepted.", labels=("source", "depth")
    )
    accepted = CounterMetricFamily(
        "luce_accepted_drafts", "Drafts that became part of an answer.", labels=("source", "depth")
    )
    for name, source in found.sources.items():
        drafted.add_metric((name,), source.drafted)
        for depth, (tried, right) in enumerate(zip(source.reached, source.accepted, strict=True), 1):
            reached.add_metric((name, str(depth)), tried)
            accepted.add_metric((name, str(depth)), right)
    widths = CounterMetricFamily("luce_verify_steps", "Steps of a sequence by its rows.", labels=("width",))
    for width, count in found.widths.items():
        widths.add_metric((str(width),), count)
    step = GaugeMetricFamily("luce_step_seconds", "Mean time of a row graph by its rows.", labels=("rows",))
    for rows, seconds in found.step_seconds.items():
        step.add_metric((str(rows),), seconds)
    draft = GaugeMetricFamily("luce_draft_seconds", "Mean time of drafting by its depth.", labels=("depth",))
    for depth, seconds in found.draft_seconds.items():
        draft.add_metric((str(depth),), seconds)
    yield from (drafted, reached, accepted, widths, step, draft)
