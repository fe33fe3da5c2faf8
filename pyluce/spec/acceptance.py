"""How often drafts are right, by depth: depth 1 is the draft of the token after the next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

PRIOR_TRIALS: Final = 16.0
PRIOR_RATE: Final = 0.90
WINDOW: Final = 128.0
POOL_WINDOW: Final = 1024.0
CARRIED_TRIALS: Final = 32.0
SURVIVAL_FLOOR: Final = 0.05


class Counts:
    """Trials and hits by depth. From `window` trials of a depth on, old ones fade.

    A trial of a depth is a draft all of whose shallower ones were accepted: the reference system's reached-depth rates.
    """

    def __init__(self, max_depth: int, window: float) -> None:
        self._window = window
        self.trials = [0.0] * max_depth
        self.hits = [0.0] * max_depth

    def observe(self, accepted: int, offered: int) -> None:
        """Of `offered` drafts the first `accepted` were right; the one after them was the last that was reached."""
        for depth in range(min(accepted + 1, offered)):
            if self.trials[depth] >= self._window:
                self.trials[depth] /= 2
                self.hits[depth] /= 2
            self.trials[depth] += 1
            self.hits[depth] += depth < accepted


class AcceptancePool:
    """What all sequences of an engine have in common. Depths start as if `PRIOR_TRIALS` drafts had been tried at `prior_rate`."""

    def __init__(self, max_depth: int, prior_rate: float = PRIOR_RATE) -> None:
        self._prior_rate = prior_rate
        self.counts = Counts(max_depth, POOL_WINDOW)

    @property
    def max_depth(self) -> int:
        """Depths that are counted."""
        return len(self.counts.trials)

    def rate(self, depth: int) -> float:
        """Of depth 1, 2, ..."""
        hits = self.counts.hits[depth - 1] + PRIOR_TRIALS * self._prior_rate
        return hits / (self.counts.trials[depth - 1] + PRIOR_TRIALS)


class Acceptance:
    """One sequence's rates: its own trials, and the pool's rates as if they were `CARRIED_TRIALS` more of each depth.

    The reference system hands a request's rates on to the next one, worth as many trials; rates of 32 trials are off by 0.09 at
    0.5, the pool's by a fifth of that, and sequences beside each other learn from one another's drafts at once.
    """

    def __init__(self, pool: AcceptancePool) -> None:
        self._pool = pool
        self._own = Counts(pool.max_depth, WINDOW)

    def observe(self, accepted: int, offered: int) -> None:
        """Of `offered` drafts the first `accepted` were right; the one after them was the last that was reached."""
        self._own.observe(accepted, offered)
        self._pool.counts.observe(accepted, offered)

    def rate(self, depth: int) -> float:
        """Of depth 1, 2, ..."""
        hits = self._own.hits[depth - 1] + CARRIED_TRIALS * self._pool.rate(depth)
        return hits / (self._own.trials[depth - 1] + CARRIED_TRIALS)

    def survival(self, count: int, alive: float = 1.0) -> list[float]:
        """For depths 1 .. count, how probable it is that the draft and all before it are accepted; ends below `SURVIVAL_FLOOR`.

        `alive`: how probable it is that depth 1 is reached.
        """
        out: list[float] = []
        for depth in range(1, min(count, self._pool.max_depth) + 1):
            alive *= self.rate(depth)
            if alive < SURVIVAL_FLOOR and out:
                break
            out.append(alive)
        return out

    def counts(self) -> Sequence[tuple[float, float]]:
        """The sequence's own (trials, hits) of depth 1, 2, ..."""
        return list(zip(self._own.trials, self._own.hits, strict=True))
