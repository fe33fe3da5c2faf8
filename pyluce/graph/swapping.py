"""Lets the hot experts follow what is picked: reads weights beside the steps, and exchanges an expert between two of them."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from pyluce.placement.learner import HotLearner, Swap
from pyluce.weights.experts import HotExperts

PROPOSE_EVERY_S: Final = 0.25
"""Asking the learner takes about as long as a step's host work, so it is asked now and then."""

log = logging.getLogger(__name__)

Weights = list[npt.NDArray[np.uint8]]


class Swapper:
    """Carries out what a learner proposes, one swap after the other. Results do not change, only where they are computed."""

    def __init__(self, learner: HotLearner, hot: HotExperts, clock: Callable[[], float] = time.monotonic) -> None:
        """The hot set of `hot` is the learner's. `clock`: seconds."""
        if learner.hot != hot.hot:
            raise ValueError("expected the hot set of the learner, found another one on the device")
        self._learner = learner
        self._hot = hot
        self._clock = clock
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="hot-experts")
        self._waiting: deque[Swap] = deque()
        self._reading: tuple[Swap, Future[Weights]] | None = None
        self._asked_at: float | None = None

    def add(self, picks: npt.NDArray[np.int32]) -> None:
        """Count the picks [n_layer, rows, n_used] of a step."""
        self._learner.add(picks)

    def between_steps(self) -> None:
        """Put an expert whose weights have been read into its slot, and have the next one read. Nothing computes now."""
        if self._reading is not None and self._reading[1].done():
            swap, future = self._reading
            self._reading = None
            failure = future.exception()
            if failure is None:
                self._hot.put(swap.layer, swap.slot, swap.expert, future.result())
                self._learner.done(swap)
            else:
                log.error("expert %d of layer %d could not be read: %s", swap.expert, swap.layer, failure)
        if self._reading is None:
            self._read_next()

    def _read_next(self) -> None:
        now = self._clock()
        if not self._waiting and (self._asked_at is None or now - self._asked_at >= PROPOSE_EVERY_S):
            self._asked_at = now
            self._waiting.extend(self._learner.propose(now))
        if self._waiting:
            swap = self._waiting.popleft()
            self._reading = (swap, self._reader.submit(self._hot.read, swap.layer, swap.expert))

    def report(self) -> dict[str, Any]:
        """What was swapped, and the share of the remembered picks whose expert is hot."""
        learner = self._learner
        return {"swaps": learner.n_swaps, "swapped_bytes": learner.swapped_bytes, "coverage": learner.coverage()}

    def close(self) -> None:
        """Stop reading. Idempotent."""
        self._reader.shutdown()
        self._waiting.clear()
        self._reading = None
