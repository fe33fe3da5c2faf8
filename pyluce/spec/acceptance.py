"""How often drafts are right, by depth: depth 1 is the draft of the token after the next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

PRIOR_TRIALS: Final = 16.0
PRIOR_RATE: Final = 0.90
WINDOW: Final = 128.0
CARRIED_TRIALS: Final = 32.0
SURVIVAL_FLOOR: Final = 0.05


class Acceptance:
    """Rates at which a depth's draft is accepted once every shallower one was (the reference system's reached-depth rates).

    A depth starts as if `PRIOR_TRIALS` drafts had been tried at `prior_rate`. From `WINDOW` trials on old ones fade.
    """

    def __init__(self, max_depth: int, prior_rate: float = PRIOR_RATE) -> None:
        self._trials = [PRIOR_TRIALS] * max_depth
        self._hits = [PRIOR_TRIALS * prior_rate] * max_depth

    @property
    def max_depth(self) -> int:
        """Depths that are counted."""
        return len(self._trials)

    def observe(self, accepted: int, offered: int) -> None:
        """Of `offered` drafts the first `accepted` were right; the one after them was the last that was reached."""
        for depth in range(min(accepted + 1, offered)):
            if self._trials[depth] >= WINDOW:
                self._trials[depth] /= 2
                self._hits[depth] /= 2
            self._trials[depth] += 1
            self._hits[depth] += depth < accepted

    def rate(self, depth: int) -> float:
        """Of depth 1, 2, ..."""
        return self._hits[depth - 1] / self._trials[depth - 1]

    def survival(self, count: int) -> list[float]:
        """For depths 1 .. count, how probable it is that the draft and all before it are accepted; ends below `SURVIVAL_FLOOR`."""
        out: list[float] = []
        alive = 1.0
        for depth in range(1, min(count, self.max_depth) + 1):
            alive *= self.rate(depth)
            if alive < SURVIVAL_FLOOR and out:
                break
            out.append(alive)
        return out

    def carry(self, trials: float = CARRIED_TRIALS) -> Acceptance:
        """A copy for the next request: the same rates, each depth worth at most so many trials."""
        other = Acceptance(self.max_depth)
        for depth, count in enumerate(self._trials):
            share = min(1.0, trials / count)
            other._trials[depth] = count * share
            other._hits[depth] = self._hits[depth] * share
        return other

    def counts(self) -> Sequence[tuple[float, float]]:
        """(trials, hits) of depth 1, 2, ..."""
        return list(zip(self._trials, self._hits, strict=True))
