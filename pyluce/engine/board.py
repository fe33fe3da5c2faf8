"""What a batch core shows of itself: counters, activity and the last published snapshot, which other threads read."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from pyluce.engine.admission import AdmissionGate
from pyluce.engine.live import Live
from pyluce.engine.protocols import Runner
from pyluce.engine.scheduler import Phase, ScheduledSequence
from pyluce.engine.stats import Activity, Counters, EngineStats, SlotState, SlotStats
from pyluce.spec.stats import SpecStats

log = logging.getLogger(__name__)

Slot = tuple[Live[Any] | None, ScheduledSequence | None]


class Board:
    """Written by the engine thread; `stats` may be called from any."""

    def __init__(
        self, gate: AdmissionGate, speculation: Callable[[], SpecStats | None], clock: Callable[[], float]
    ) -> None:
        """`speculation`: what drafting did so far. `clock`: seconds."""
        self.counters = Counters(clock())
        self._gate = gate
        self._speculation = speculation
        self._clock = clock
        self._memory: Mapping[str, object] = MappingProxyType({})
        self._activity = (Activity.IDLE, clock())
        self._heartbeat = clock()
        self._published = EngineStats(started_at=self._heartbeat, heartbeat=self._heartbeat)

    def stats(self) -> EngineStats:
        """The last published numbers, with what the engine does at this moment."""
        published = self._published
        activity, since = self._activity
        inside = self._gate.entered - sum(published.requests.values())
        return replace(
            published,
            heartbeat=self._heartbeat,
            activity=activity,
            activity_since=since,
            queue_length=0 if activity is Activity.CLOSED else inside - published.busy_slots,
            refused=self._gate.refused,
        )

    def act(self, activity: Activity) -> None:
        """The engine begins this now."""
        now = self._clock()
        self._heartbeat = now
        if self._activity[0] is not activity:
            self._activity = (activity, now)

    def publish(self, slots: Iterable[Slot | None]) -> None:
        """Show the numbers as they are. `slots`: each one's request and place in the schedule, None for a free one."""
        now = self._heartbeat = self._clock()
        shown = tuple(_slot_stats(slot, now) for slot in slots)
        self._published = self.counters.snapshot(now, shown, self._memory, self._gate.max_queue, self._speculation())

    def ask_memory(self, runner: Runner[Any]) -> None:
        """Renew the memory report."""
        try:
            self._memory = MappingProxyType(runner.memory_report())
        except Exception as failure:  # a number less to show is no reason to stop
            log.error("no memory report: %s: %s", type(failure).__name__, failure)

    def violated(self, message: str) -> None:
        """Count and log an invariant that does not hold."""
        self.counters.violations += 1
        log.error("invariant violated: %s", message)


def _slot_stats(slot: Slot | None, now: float) -> SlotStats:
    live, sequence = slot if slot is not None else (None, None)
    if live is None or sequence is None:
        return SlotStats()
    generation = live.generation
    return SlotStats(
        state=SlotState.DECODE if sequence.phase is Phase.DECODE else SlotState.PREFILL,
        request_id=live.ticket.id,
        prompt_done=sequence.prompt_done,
        prompt_total=sequence.prompt_length,
        generated=generation.count,
        tokens_per_second=generation.tokens_per_second(now),
    )
