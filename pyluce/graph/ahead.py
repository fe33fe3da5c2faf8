"""Inputs of the chunk that comes next, prepared by a thread of their own while the device computes the one before."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from pyluce.weights import GatherCounts


@dataclass(frozen=True, slots=True)
class Stretch:
    """A chunk, as far as its inputs depend on it: its tokens, where it begins, the tokens before that the n-gram hash reads.

    n_rows: rows of its graph, padding included. Whose sequence it is does not matter, so what was prepared for one stretch is
    right for every equal one, whatever happened meanwhile.
    """

    before: tuple[int, ...]
    first: int
    tokens: tuple[int, ...]
    n_rows: int


class Ahead:
    """At most one stretch at a time, in one of the two blocks of staging memory; the other one is the next step's."""

    def __init__(self, fill: Callable[[Stretch, int], GatherCounts]) -> None:
        """fill(stretch, block): write its embedding and n-gram rows into the block; runs on the thread."""
        self._fill = fill
        self._thread: ThreadPoolExecutor | None = None
        self._job: tuple[Stretch, int, Future[GatherCounts]] | None = None
        self.used = 0

    @property
    def free_block(self) -> int:
        """A block that nothing is prepared in."""
        return 0 if self._job is None else 1 - self._job[1]

    def take(self, stretch: Stretch) -> tuple[int, GatherCounts] | None:
        """The block that holds this stretch, which is the caller's now, and what its gather did; None if it was not prepared.

        Waits for the thread, and raises what it raised.
        """
        if self._job is None or self._job[0] != stretch:
            return None
        _, block, future = self._job
        self._job = None
        counts = future.result()
        self.used += 1
        return block, counts

    def start(self, stretch: Stretch, current: int) -> None:
        """Prepare a stretch beside the step whose inputs are in block `current`; what else was prepared is dropped."""
        if self._job is not None and self._job[0] == stretch:
            return
        self.drop()
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="inputs-ahead")
        block = 1 - current
        self._job = (stretch, block, self._thread.submit(self._fill, stretch, block))

    def drop(self) -> None:
        """Forget what is prepared, its errors too; nothing is written into a block after this."""
        if self._job is not None:
            self._job[2].exception()
            self._job = None

    def close(self) -> None:
        """Stop the thread. Idempotent."""
        self.drop()
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None
