"""The door of the engine: how many requests may be inside, decided on the threads that bring them."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from pyluce.engine.errors import QueueFullError

REMEMBERED_ANSWERS: Final = 32
RETRY_S: Final = (1.0, 60.0)


class AdmissionGate:
    """Counts requests from submission to answer. Safe from any thread; nothing here waits for the engine."""

    def __init__(self, n_slots: int, max_queue: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self.n_slots = n_slots
        self.max_queue = max_queue
        self._clock = clock
        self._lock = threading.Lock()
        self._entered = 0
        self._left = 0
        self._refused = 0
        self._answered: deque[float] = deque([clock()], maxlen=REMEMBERED_ANSWERS)

    @property
    def entered(self) -> int:
        """Requests that were submitted so far."""
        return self._entered

    @property
    def refused(self) -> int:
        """Requests that found the queue full."""
        return self._refused

    def enter(self) -> None:
        """One more request. Raises QueueFullError when every slot and every place in the queue is taken."""
        with self._lock:
            if self._entered - self._left >= self.n_slots + self.max_queue:
                self._refused += 1
                raise QueueFullError(self.n_slots, self.max_queue, self._retry_after_s())
            self._entered += 1

    def leave(self) -> None:
        """A request was answered."""
        with self._lock:
            self._left += 1
            self._answered.append(self._clock())

    def _retry_after_s(self) -> float:
        """When a place should be free: one is each time that a request is answered, so the mean time between answers lately."""
        shortest, longest = RETRY_S
        return min(longest, max(shortest, (self._clock() - self._answered[0]) / len(self._answered)))
