"""What a step costs, by its size, from measured steps; a shape stands in for sizes that were not measured lately.

Constants and rules are the reference system's. A sample is a step that replayed its graphs: building one says nothing about the next.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Final

WARM_UP: Final = 4
TRUSTED: Final = 4
WINDOW: Final = 16
OUTLIER: Final = 1.25
STALE_AFTER: Final = 64
BORROWED_WEIGHT: Final = 4
GUESS_AGAIN: Final = 4
MANY: Final = 4
FAR: Final = 3  # sizes between two means from which on the line through them counts alone
RANGES: Final = (2048, 8192, 32768)

Shape = Callable[[int], float]


@dataclass(frozen=True, slots=True)
class Seed:
    """What costs look like before anything is measured, as shares of a step of one row: a row more, and a draft step.

    The row's share is the reference system's measured line for this model; a draft step is one layer and the output matrix of 48 layers.
    """

    row: float = 20.0 / 45.0
    draft: float = 3.0 / 45.0

    def of_rows(self, rows: int) -> float:
        """Relative cost of a step by its rows."""
        return 1.0 + self.row * (rows - 1)

    def of_drafting(self, depth: int) -> float:
        """Relative cost of so many draft steps."""
        return self.draft * depth


@dataclass(slots=True)
class _Entry:
    skipped: int = 0
    samples: int = 0
    mean: float = 0.0
    timed_at: int = 0
    early: list[float] = field(default_factory=list)


class CostTable:
    """Mean seconds by size. Each size skips its first samples, begins with the median of the next ones, clips what is far above the
    mean from then on, and starts anew when it was not timed for long."""

    def __init__(self, shape: Shape, base: CostTable | None = None, warm_up: int = WARM_UP) -> None:
        """`base`: whose scale a size of this table takes while nothing of its own is trusted; `warm_up`: samples a size skips."""
        self._warm_up = warm_up
        self._shape = shape
        self._base = base
        self._entries: dict[int, _Entry] = {}
        self._guesses: dict[int, float] = {}  # made anew every few samples: they cost more than they change
        self._timed = 0

    def observe(self, size: int, seconds: float) -> None:
        """A step of this size took so long."""
        self._timed += 1
        if self._timed % GUESS_AGAIN == 0 or len(self._entries) <= 1:
            self._guesses.clear()
        entry = self._entries.setdefault(size, _Entry())
        if entry.samples and self._timed - entry.timed_at > STALE_AFTER:
            entry.samples = 0
            entry.early.clear()
        entry.timed_at = self._timed
        if entry.skipped < self._warm_up:
            entry.skipped += 1
            return
        if entry.samples < TRUSTED:
            entry.early.append(seconds)
            entry.samples = len(entry.early)
            entry.mean = median(entry.early)
            return
        entry.samples = min(entry.samples + 1, WINDOW)
        entry.mean += (min(seconds, OUTLIER * entry.mean) - entry.mean) / entry.samples

    def price(self, size: int) -> float:
        """Expected seconds (or the shape's units, before anything was measured) of a step of this size.

        Measured sizes cost their mean; a mean that is old no more than the others say. Other sizes lie on a line through what was
        measured, or on the shape.
        """
        entry = self._entries.get(size)
        if entry is None or entry.samples < TRUSTED:
            if size not in self._guesses:
                self._guesses[size] = self._guess(size, self._known(TRUSTED))
            return self._guesses[size]
        if not self._stale(entry):
            return entry.mean
        fresh = [other for other in self._known(TRUSTED) if other != size and not self._stale(self._entries[other])]
        return min(entry.mean, self._guess(size, fresh)) if fresh else entry.mean

    def scale(self) -> float:
        """Seconds a unit of the shape, at the smallest size that is trusted."""
        trusted = self._known(TRUSTED)
        return self._entries[trusted[0]].mean / self._shape(trusted[0]) if trusted else 1.0

    def _known(self, samples: int) -> list[int]:
        """Sizes with at least so many samples."""
        return sorted(size for size, entry in self._entries.items() if entry.samples >= samples)

    def _guess(self, size: int, known: list[int]) -> float:
        """The shape through the nearest mean, and the line through the two nearest, which counts the more the farther apart they lie;
        with many means the line through all of them."""
        if not known:
            return self._shape(size) * (self._base.scale() if self._base is not None else 1.0)
        if len(known) >= MANY:
            return self._line(size, known)
        nearest, *others = sorted(known, key=lambda other: (abs(other - size), other))
        mean = self._entries[nearest].mean
        drawn = self._shape(size) * mean / self._shape(nearest)
        if not others:
            return drawn
        second = self._entries[others[0]]
        apart = others[0] - nearest
        trust = min(1.0, abs(apart) / FAR) * min(1.0, second.samples / WINDOW)
        slope = max(0.0, (second.mean - mean) / apart)
        return trust * (mean + slope * (size - nearest)) + (1.0 - trust) * drawn

    def _line(self, size: int, known: list[int]) -> float:
        """The line through many means, near ones and those of many samples counting more."""
        weight = {s: self._entries[s].samples / (1.0 + abs(s - size)) for s in known}
        total = sum(weight.values())
        mid = sum(w * s for s, w in weight.items()) / total
        mean = sum(w * self._entries[s].mean for s, w in weight.items()) / total
        spread = sum(w * (s - mid) ** 2 for s, w in weight.items())
        slope = sum(w * (s - mid) * (self._entries[s].mean - mean) for s, w in weight.items()) / spread
        return mean + max(0.0, slope) * (size - mid)

    def borrow(self, other: CostTable) -> None:
        """Begin with the means of another table, which weigh less than samples of one's own."""
        for size, entry in other._entries.items():
            if entry.samples >= TRUSTED:
                self._entries[size] = _Entry(
                    self._warm_up, min(entry.samples, BORROWED_WEIGHT), entry.mean, self._timed
                )

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
    def new(cls, seed: Seed = Seed(), warm_up: int = WARM_UP) -> StepCosts:  # noqa: B008  (frozen)
        """Nothing measured yet."""
        verify = CostTable(seed.of_rows, warm_up=warm_up)
        return cls(verify, CostTable(seed.of_drafting, base=verify, warm_up=warm_up))

    def of_rows(self, rows: int) -> float:
        """Of verifying so many rows."""
        return self.verify.price(rows)

    def of_drafting(self, depth: int) -> float:
        """Of so many draft steps."""
        return self.draft.price(depth) if depth else 0.0


class CostMemory:
    """Costs by range of context length: below 2,048 tokens, 8,192, 32,768, and beyond. A new range begins with the nearest known one's."""

    def __init__(self, seed: Seed = Seed(), warm_up: int = WARM_UP) -> None:  # noqa: B008  (frozen)
        self._seed = seed
        self._warm_up = warm_up
        self._ranges: dict[int, StepCosts] = {}

    def at(self, n_tokens: int) -> StepCosts:
        """The costs for sequences of so many tokens."""
        index = sum(n_tokens >= bound for bound in RANGES)
        found = self._ranges.get(index)
        if found is None:
            found = self._ranges[index] = StepCosts.new(self._seed, self._warm_up)
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
