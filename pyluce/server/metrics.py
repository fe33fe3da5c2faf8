"""GET /metrics: what the engine published, and what the HTTP side counted, in Prometheus' text format."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator
from typing import TypeAlias

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pyluce.engine.stats import Activity, EngineStats, SlotState
from pyluce.server import speculation
from pyluce.server.protocols import Service

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_BUCKETS = (0.005, 0.02, 0.1, 0.5, 2.0, 10.0, 60.0, 300.0)

log = logging.getLogger(__name__)

_Number: TypeAlias = "tuple[str, str, float]"


class HttpCounters:
    """The registry of one application, and its HTTP counters."""

    def __init__(self, service: Service) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(EngineCollector(service))
        self.requests = Counter(
            "luce_http_requests", "HTTP requests by route and status.", ("route", "status"), registry=self.registry
        )
        self.seconds = Histogram(
            "luce_http_request_seconds", "Time to the end of the response.", ("route",), buckets=_BUCKETS,
            registry=self.registry,
        )  # fmt: skip

    def text(self) -> bytes:
        """Everything, as Prometheus reads it."""
        return generate_latest(self.registry)


class EngineCollector(Collector):
    """All of the engine's numbers of one scrape come from one snapshot."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def describe(self) -> Iterable[Metric]:
        """Nothing in advance: the engine is not asked before the first scrape."""
        return []

    def collect(self) -> Iterator[Metric]:
        """The metric families."""
        stats = self._service.stats()
        for name, help_text, value in _counters(stats):
            yield CounterMetricFamily(name, help_text, value=value)
        for name, help_text, value in _gauges(stats):
            yield GaugeMetricFamily(name, help_text, value=value)
        requests = CounterMetricFamily("luce_requests", "Requests answered, by outcome.", labels=("outcome",))
        for outcome, count in stats.requests.items():
            requests.add_metric((outcome.value,), count)
        yield requests
        yield from speculation.metrics(stats)
        slots = GaugeMetricFamily("luce_slots", "Slots by state.", labels=("state",))
        for state in SlotState:
            slots.add_metric((state.value,), sum(slot.state is state for slot in stats.slots))
        yield slots
        memory = GaugeMetricFamily("luce_memory_bytes", "Bytes by place.", labels=("place",))
        for place, size in flatten_bytes(stats.memory):
            memory.add_metric((place,), size)
        yield memory


class CountRequests:
    """Counts requests by route: unknown paths are one route, so that nobody can make up labels. Logs those that are work."""

    def __init__(self, app: ASGIApp, counters: HttpCounters, paths: Iterable[str]) -> None:
        self._app = app
        self._counters = counters
        self._paths = frozenset(paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        route = scope["path"] if scope["path"] in self._paths else "other"
        status = "none"
        begin = time.perf_counter()

        async def watch(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = str(message["status"])
            await send(message)

        try:
            await self._app(scope, receive, watch)
        finally:
            seconds = time.perf_counter() - begin
            self._counters.requests.labels(route, status).inc()
            self._counters.seconds.labels(route).observe(seconds)
            level = logging.INFO if scope["method"] == "POST" else logging.DEBUG
            log.log(level, "%s %s %s %.2f s", scope["method"], route, status, seconds)


def flatten_bytes(report: object, prefix: str = "") -> Iterator[tuple[str, float]]:
    """The numbers of a nested report whose names end in `bytes`, or that stand below such a name, as `a.b_bytes`."""
    if isinstance(report, dict) or hasattr(report, "items"):
        for key, value in report.items():
            yield from flatten_bytes(value, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(report, (int, float)) and not isinstance(report, bool) and "bytes" in prefix:
        yield prefix, float(report)


def _counters(stats: EngineStats) -> tuple[_Number, ...]:
    return (
        ("luce_prompt_tokens", "Prompt tokens computed.", stats.prompt_tokens_total),
        ("luce_cached_prompt_tokens", "Prompt tokens taken from the prefix cache.", stats.cached_tokens_total),
        ("luce_idle_prompt_tokens", "Prompt tokens computed while nobody waited.", stats.idle_tokens_total),
        ("luce_generated_tokens", "Tokens generated.", stats.generated_tokens_total),
        ("luce_requests_refused", "Requests that found the queue full.", stats.refused),
        ("luce_decode_steps", "Row graphs computed.", stats.decode_steps),
        ("luce_decode_rows", "Rows of those graphs.", stats.decode_rows),
        ("luce_prefill_chunks", "Prompt chunks computed.", stats.prefill_chunks),
        ("luce_invariant_violations", "What the engine found wrong with itself.", stats.invariant_violations),
    )


def _gauges(stats: EngineStats) -> tuple[_Number, ...]:
    now = time.perf_counter()
    return (
        ("luce_queue_length", "Requests waiting for a slot.", stats.queue_length),
        ("luce_queue_limit", "Places in the queue.", stats.max_queue),
        ("luce_busy", "1 while the engine computes.", float(stats.activity in (Activity.PREFILL, Activity.DECODE))),
        ("luce_parked", "1 while the model is parked.", float(stats.parked is not None)),
        ("luce_heartbeat_age_seconds", "Since the engine thread was last heard of.", max(0.0, now - stats.heartbeat)),
        ("luce_uptime_seconds", "Since the engine started.", max(0.0, now - stats.started_at)),
        ("luce_prompt_tokens_per_second", "Over the last 10 seconds.", stats.prompt_tokens_per_second),
        ("luce_generated_tokens_per_second", "Over the last 10 seconds.", stats.generated_tokens_per_second),
    )
