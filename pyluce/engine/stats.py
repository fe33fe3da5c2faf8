"""What the engine shows of itself: one frozen value, published by the engine thread, read by anybody without a lock."""

from __future__ import annotations

import enum
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from pyluce.spec.stats import SpecStats

RATE_WINDOW_S: Final = 10.0
RATE_STEP_S: Final = 0.25


class Activity(enum.Enum):
    """What the engine thread is doing."""

    IDLE = "idle"
    PREFILL = "prefill"
    DECODE = "decode"
    PARKED = "parked"
    LOADING = "loading"
    CLOSED = "closed"


class SlotState(enum.Enum):
    """What a slot is used for."""

    FREE = "free"
    PREFILL = "prefill"
    DECODE = "decode"


class Outcome(enum.Enum):
    """How a request ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class SlotStats:
    """One slot. `prompt_done` of `prompt_total` tokens are computed; `tokens_per_second` since the answer's first token."""

    state: SlotState = SlotState.FREE
    request_id: int | None = None
    prompt_done: int = 0
    prompt_total: int = 0
    generated: int = 0
    tokens_per_second: float = 0.0


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot after a step. Times are `time.perf_counter` seconds; counters never fall.

    * heartbeat: when the engine thread last began a native call, ended one, or looked for work (once a second when idle).
    * activity, activity_since: what it does now, and since when. `heartbeat` of an engine at work may be one chunk old.
    * queue_length: requests submitted that have no slot yet. requests: answered ones by outcome; refused: those that found the queue full.
    * prompt_tokens_total, generated_tokens_total: computed, also for requests that did not end well; cached_tokens_total: prompt
      tokens that came from the prefix cache instead; idle_tokens_total: computed while nobody waited, for later.
    * decode_steps, decode_rows, prefill_chunks: native calls, and rows of the former.
    * speculation: what drafting did, None without it.
    * invariant_violations: what the engine found wrong with itself; 0 or a bug.
    * prompt_tokens_per_second, generated_tokens_per_second: over the last 10 seconds.
    * memory: the runner's report, renewed after each request.
    * parked: why the model is parked, None when it is not (`activity` is PARKED then, or LOADING while it comes back);
      unparks_on_request: a request brings it back.
    """

    started_at: float
    heartbeat: float
    activity: Activity = Activity.IDLE
    activity_since: float = 0.0
    slots: tuple[SlotStats, ...] = ()
    queue_length: int = 0
    max_queue: int = 0
    requests: Mapping[Outcome, int] = field(default_factory=lambda: MappingProxyType({}))
    refused: int = 0
    prompt_tokens_total: int = 0
    generated_tokens_total: int = 0
    cached_tokens_total: int = 0
    idle_tokens_total: int = 0
    decode_steps: int = 0
    decode_rows: int = 0
    prefill_chunks: int = 0
    speculation: SpecStats | None = None
    invariant_violations: int = 0
    prompt_tokens_per_second: float = 0.0
    generated_tokens_per_second: float = 0.0
    memory: Mapping[str, object] = field(default_factory=lambda: MappingProxyType({}))
    parked: str | None = None
    unparks_on_request: bool = False

    @property
    def busy_slots(self) -> int:
        """Slots that a request holds."""
        return sum(slot.state is not SlotState.FREE for slot in self.slots)


class RateWindow:
    """Events a second over the last `RATE_WINDOW_S`, added up in steps of `RATE_STEP_S`."""

    def __init__(self, started_at: float) -> None:
        self._started_at = started_at
        self._steps: deque[tuple[float, int]] = deque()
        self._sum = 0

    def add(self, now: float, count: int) -> None:
        """`count` events happened."""
        if self._steps and now - self._steps[-1][0] < RATE_STEP_S:
            begin, before = self._steps.pop()
            self._steps.append((begin, before + count))
        else:
            self._steps.append((now, count))
        self._sum += count
        self._forget(now)

    def rate(self, now: float) -> float:
        """Events a second; before the window is full, over the time since the start."""
        self._forget(now)
        seconds = min(RATE_WINDOW_S, now - self._started_at)
        return self._sum / seconds if seconds > 0.0 else 0.0

    def _forget(self, now: float) -> None:
        while self._steps and now - self._steps[0][0] > RATE_WINDOW_S:
            self._sum -= self._steps.popleft()[1]


class Counters:
    """The numbers that a core adds up; `snapshot` makes them part of an EngineStats."""

    def __init__(self, started_at: float) -> None:
        self.started_at = started_at
        self.requests: Counter[Outcome] = Counter(dict.fromkeys(Outcome, 0))
        self.prompt_tokens = 0
        self.generated_tokens = 0
        self.cached_tokens = 0
        self.idle_tokens = 0
        self.decode_steps = 0
        self.decode_rows = 0
        self.prefill_chunks = 0
        self.violations = 0
        self._prompt_rate = RateWindow(started_at)
        self._generated_rate = RateWindow(started_at)

    def add_chunk(self, now: float, n_tokens: int) -> None:
        """A chunk was computed."""
        self.prefill_chunks += 1
        self.prompt_tokens += n_tokens
        self._prompt_rate.add(now, n_tokens)

    def add_rows(self, n_rows: int) -> None:
        """A row graph was computed."""
        self.decode_steps += 1
        self.decode_rows += n_rows

    def add_token(self, now: float) -> None:
        """A token was chosen."""
        self.generated_tokens += 1
        self._generated_rate.add(now, 1)

    def snapshot(
        self,
        now: float,
        slots: tuple[SlotStats, ...],
        memory: Mapping[str, object],
        max_queue: int,
        speculation: SpecStats | None = None,
    ) -> EngineStats:
        """All of it at one moment."""
        return EngineStats(
            started_at=self.started_at,
            heartbeat=now,
            slots=slots,
            max_queue=max_queue,
            requests=MappingProxyType(dict(self.requests)),
            prompt_tokens_total=self.prompt_tokens,
            generated_tokens_total=self.generated_tokens,
            cached_tokens_total=self.cached_tokens,
            idle_tokens_total=self.idle_tokens,
            decode_steps=self.decode_steps,
            decode_rows=self.decode_rows,
            prefill_chunks=self.prefill_chunks,
            speculation=speculation,
            invariant_violations=self.violations,
            prompt_tokens_per_second=self._prompt_rate.rate(now),
            generated_tokens_per_second=self._generated_rate.rate(now),
            memory=memory,
        )
