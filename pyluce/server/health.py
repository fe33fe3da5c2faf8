"""What the engine's published numbers say about its health."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from pyluce.engine.stats import Activity, EngineStats


@dataclass(frozen=True, slots=True)
class Health:
    """`status` is "ok" (idle), "busy", "parked", "stalled" (no heartbeat for too long) or "failed" (the engine is gone)."""

    status: str
    ready: bool
    heartbeat_age_s: float

    def as_dict(self, stats: EngineStats) -> dict[str, Any]:
        """For JSON."""
        return {
            "status": self.status,
            "live": True,
            "ready": self.ready,
            "heartbeat_age_s": round(self.heartbeat_age_s, 3),
            "activity": stats.activity.value,
            "slots": len(stats.slots),
            "busy_slots": stats.busy_slots,
            "queue_length": stats.queue_length,
            "parked": stats.parked,
        }


def judge(stats: EngineStats, heartbeat_limit_s: float, now: float | None = None) -> Health:
    """The health of an engine that published `stats`. An idle engine beats once a second, one at work at each native call."""
    age = max(0.0, (time.perf_counter() if now is None else now) - stats.heartbeat)
    if stats.activity is Activity.CLOSED:
        return Health("failed", False, age)
    if age > heartbeat_limit_s:
        return Health("stalled", False, age)
    if stats.parked is not None:
        return Health("parked", stats.unparks_on_request, age)
    busy = stats.activity is not Activity.IDLE or stats.busy_slots > 0 or stats.queue_length > 0
    return Health("busy" if busy else "ok", True, age)
