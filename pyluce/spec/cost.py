"""What a step costs, by its size, from measured steps; a shape stands in for sizes that were not measured lately.

Constants and rules are the reference system's. A sample is a step that replayed its graphs: building one says nothing about the next.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

WARM_UP: Final = 4
TRUSTED: Final = 4
WINDOW: Final = 16
OUTLIER: Final = 1.25
STALE_AFTER: Final = 64
OWN_WEIGHT: Final = 16
BORROWED_WEIGHT: Final = 4
FAR: Final = 3  # sizes between two means, from which on the line through them counts alone
RANGES: Final = (2048, 8192, 32768)

Shape = Callable[[int], float]


def step_shape(rows: int) -> float:
    """Relative cost of a step by its rows: the reference system's measured line for this model."""
    return 45.0 + 20.0 * (rows - 1)


def draft_shape(depth: int) -> float:
    """Relative cost of `depth` draft steps, in the units of `step_shape`: one layer and the output matrix of 48 layers."""
    return 3.0 * depth


@dataclass(slots=True)
class _Entry:
    skipped: int = 0
    samples: int = 0
    mean: float = 0.0
    timed_at: int = 0


class CostTable:
    """Mean seconds by size. Each size skips its first samples, clips outliers, and starts anew when it was not timed for long."""

    def __init__(self, shape: Shape, base: CostTable | None = None) -> None:
        """`base`: whose scale a size of this table takes while nothing of its own is trusted."""
        self._shape = shape
        self._base = base
        self._entries: dict[int, _Entry] = {}
        self._timed = 0

    def observe(self, size: int, seconds: float) -> None:
        """A step of this size took so long."""
        self._timed += 1
        entry = self._entries.setdefault(size, _Entry())
        if entry.samples and self._timed - entry.timed_at > STALE_AFTER:
            entry.samples = 0
        entry.timed_at = self._timed
        if entry.skipped < WARM_UP:
            entry.skipped += 1
            return
        if entry.samples:
            seconds = min(seconds, OUTLIER * entry.mean)
        entry.samples = min(entry.samples + 1, WINDOW)
        entry.mean += (seconds - entry.mean) / entry.samples

    def price(self, size: int) -> float:
        """Expected seconds (or the shape's units, before anything was measured) of a step of this size.

        Measured sizes cost their mean; a mean that is old no more than the others say. Other sizes lie on the line through the
        two nearest means, or, with one mean only, on the shape through it.
        """
        entry = self._entries.get(size)
        if entry is None or entry.samples < TRUSTED:
            return self._guess(size, self._trusted())
        fresh = [other for other in self._trusted() if other != size and not self._stale(self._entries[other])]
        if self._stale(entry) and fresh:
            return min(entry.mean, self._guess(size, fresh))
        return entry.mean

    def scale(self) -> float:
        """Seconds a unit of the shape, at the smallest size that is trusted."""
        trusted = self._trusted()
        return self._entries[trusted[0]].mean / self._shape(trusted[0]) if trusted else 1.0

    def _trusted(self) -> list[int]:
        return sorted(size for size, entry in self._entries.items() if entry.samples >= TRUSTED)

    def _guess(self, size: int, known: list[int]) -> float:
        if not known:
            return self._shape(size) * (self._base.scale() if self._base is not None else 1.0)
        a, *others = sorted(known, key=lambda other: (abs(other - size), other))
        mean = self._entries[a].mean
        if not others:
            return self._shape(size) * mean / self._shape(a)
        b = others[0]
        drawn = self._shape(size) * mean / self._shape(a)
        slope = max(0.0, (self._entries[b].mean - mean) / (b - a))
        trust = min(1.0, abs(b - a) / FAR) * min(1.0, self._entries[b].samples / WINDOW)
        return trust * (mean + slope * (size - a)) + (1 - trust) * drawn

    def borrow(self, other: CostTable) -> None:
        """Begin with the means of another table, which weigh less than samples of one's own."""
        for size, entry in other._entries.items():
            if entry.samples >= TRUSTED:
                self._entries[size] = _Entry(WARM_UP, min(entry.samples, BORROWED_WEIGHT), entry.mean, self._timed)

    def means(self) -> dict[int, float]:
        """Seconds of the sizes that are trusted."""
        return {size: entry.mean for size, entry in sorted(self._entries.items()) if entry.samples >= TRUSTED}

    def _stale(self, entry: _Entry) -> bool:
        return self._timed - entry.timed_at > STALE_AFTER


@dataclass(slots=True)
class StepCosts:
    """What steps cost at one range of context lengths: the rows, and the draft steps before them."""

    verify: CostTable
    draft: CostTable

    @classmethod
    def new(cls, shape: Shape = step_shape) -> StepCosts:
        """Nothing measured yet."""
        verify = CostTable(shape)
        return cls(verify, CostTable(draft_shape, base=verify))

    def of_rows(self, rows: int) -> float:
        """Of verifying so many rows."""
        return self.verify.price(rows)

    def of_drafting(self, depth: int) -> float:
        """Of so many draft steps."""
        return self.draft.price(depth) if depth else 0.0


class CostMemory:
    """Costs by range of context length: below 2,048 tokens, 8,192, 32,768, and beyond. A new range begins with the nearest known one's."""

    def __init__(self) -> None:
        self._ranges: dict[int, StepCosts] = {}

    def at(self, n_tokens: int) -> StepCosts:
        """The costs for sequences of so many tokens."""
        index = sum(n_tokens >= bound for bound in RANGES)
        found = self._ranges.get(index)
        if found is None:
            found = self._ranges[index] = StepCosts.new()
            known = [i for i in self._ranges if i != index]
            if known:
                nearest = self._ranges[min(known, key=lambda i: (abs(i - index), i))]
                found.verify.borrow(nearest.verify)
                found.draft.borrow(nearest.draft)
        return found

    @property
    def ranges(self) -> dict[int, StepCosts]:
        """By number of the range."""
        return dict(self._ranges)
