"""What a step costs, by its size, from measured steps: a line through all of them, and what each size lies beside it.

A sample is a step that replayed its graphs: building one says nothing about the next. Constants are the reference system's
where it has them; it keeps a mean for each size alone, which noise of a tenth makes useless where a row more costs a thirtieth.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Final

WARM_UP: Final = 1
TRUSTED: Final = 4
WINDOW: Final = 64
OUTLIER: Final = 1.25
STALE_AFTER: Final = 64
BORROWED_WEIGHT: Final = 4
EARLY: Final = 5
SURPRISES: Final = 4
NEW_GRAPH: Final = 1.02
SLOPE_TRUST: Final = 3.0
OWN_TRUST: Final = 32.0
RANGES: Final = (2048, 8192, 32768)
BESIDE_ALPHA: Final = 0.2
MOST_BESIDE: Final = 1.5

Shape = Callable[[int], float]


@dataclass(frozen=True, slots=True)
class Seed:
    """What costs look like before anything is measured, as shares of a step of one row: a row more, and a draft step.

    The row's share is the reference system's measured line for this model; a draft step is one layer and the output matrix of 48 layers.
    beside: what a draft step costs more for a further sequence, as a share of a draft step of one.
    """

    row: float = 20.0 / 45.0
    draft: float = 3.0 / 45.0
    beside: float = 0.1

    def of_rows(self, rows: int) -> float:
        """Relative cost of a step by its rows."""
        return 1.0 + self.row * (rows - 1)

    def of_drafting(self, depth: int) -> float:
        """Relative cost of so many draft steps."""
        return self.draft * depth


@dataclass(slots=True)
class _Entry:
    skipped: int = 0
    weight: float = 0.0
    mean: float = 0.0
    timed_at: int = 0


class CostTable:
    """Expected seconds by size. A size's first `WARM_UP` samples do not count.

    The line is the weighted least-squares one with the shape's slope as `SLOPE_TRUST` samples one size away; a size's own mean counts
    against it with as many samples as it has against `OWN_TRUST`. Means are of the last `WINDOW` samples and
    fade by half every `STALE_AFTER` samples of other sizes; a sample far above its price is clipped, and several of them in a row
    make everything that was measured nearly worthless.
    """

    def __init__(self, shape: Shape, base: CostTable | None = None) -> None:
        """`shape`: a line; `base`: whose scale this table takes while nothing is measured."""
        self._shape = shape
        self._slope = shape(2) - shape(1)
        self._base = base
        self._entries: dict[int, _Entry] = {}
        self._early: list[tuple[int, float]] = []
        self._fit: tuple[float, float, float] | None = None  # at the size x the line is at y, with this slope
        self._prices: dict[int, float] = {}  # since the last sample: a plan asks for the same ones again and again
        self._timed = 0
        self._surprises = 0

    def observe(self, size: int, seconds: float) -> None:
        """A step of this size took so long."""
        self._timed += 1
        self._prices.clear()
        entry = self._entries.setdefault(size, _Entry())
        if entry.skipped < WARM_UP:
            entry.skipped += 1
            return
        if self._fit is None:
            self._early.append((size, seconds))
            if len(self._early) == EARLY:
                scale = self.scale()
                for early, took in self._early:
                    self._add(self._entries[early], min(took, OUTLIER * scale * self._shape(early)))
                self._draw()
            return
        most = OUTLIER * self.price(size)
        self._surprises = self._surprises + 1 if seconds > most else 0
        if self._surprises == SURPRISES:
            self._surprises = 0
            for other in self._entries.values():
                other.weight = min(other.weight, 1.0)
        self._add(entry, min(seconds, most))
        self._draw()

    def price(self, size: int) -> float:
        """Expected seconds of a step of this size; in the shape's units before anything was measured."""
        known = self._prices.get(size)
        if known is not None:
            return known
        if self._fit is None:
            return self._shape(size) * self.scale()
        x, y, slope = self._fit
        found = line = y + slope * (size - x)
        entry = self._entries.get(size)
        if entry is not None and entry.weight:
            weight = self._weight(entry)
            found = line + (entry.mean - line) * weight / (weight + OWN_TRUST)
        self._prices[size] = found
        return found

    def has(self, size: int) -> bool:
        """Steps of this size were timed."""
        return size in self._entries

    @property
    def measured(self) -> bool:
        """Prices are seconds."""
        return self._fit is not None

    def scale(self) -> float:
        """Seconds a unit of the shape."""
        if self._fit is not None:
            return self._fit[1] / self._shape_at(self._fit[0])
        if self._early:
            return median(seconds / self._shape(size) for size, seconds in self._early)
        return self._base.scale() if self._base is not None else 1.0

    def borrow(self, other: CostTable) -> None:
        """Begin with the means of another table, which weigh less than samples of one's own."""
        for size, entry in other._entries.items():
            if entry.weight:
                mean = other.price(size)
                self._entries[size] = _Entry(WARM_UP, min(entry.weight, BORROWED_WEIGHT), mean, self._timed)
        if any(entry.weight for entry in self._entries.values()):
            self._draw()

    def means(self) -> dict[int, float]:
        """Seconds of the sizes that were measured at least `TRUSTED` times."""
        return {size: entry.mean for size, entry in sorted(self._entries.items()) if entry.weight >= TRUSTED}

    def _add(self, entry: _Entry, seconds: float) -> None:
        entry.weight = min(self._weight(entry) + 1.0, WINDOW)
        entry.mean += (seconds - entry.mean) / entry.weight
        entry.timed_at = self._timed

    def _weight(self, entry: _Entry) -> float:
        """Samples that the mean is worth now."""
        return entry.weight * math.pow(0.5, max(0, self._timed - entry.timed_at - 1) / STALE_AFTER)

    def _draw(self) -> None:
        """The line through the means."""
        weights = [(size, self._weight(entry), entry.mean) for size, entry in self._entries.items() if entry.weight]
        total = sum(weight for _, weight, _ in weights)
        x = sum(weight * size for size, weight, _ in weights) / total
        y = sum(weight * mean for _, weight, mean in weights) / total
        self._prices.clear()
        spread = sum(weight * (size - x) ** 2 for size, weight, _ in weights)
        lean = sum(weight * (size - x) * (mean - y) for size, weight, mean in weights)
        drawn = self._slope * y / self._shape_at(x)
        self._fit = (x, y, max(0.0, (lean + SLOPE_TRUST * drawn) / (spread + SLOPE_TRUST)))

    def _shape_at(self, size: float) -> float:
        return self._shape(1) + self._slope * (size - 1.0)


class DraftCosts:
    """Seconds of draft steps: a table by depth for one sequence, times a factor that grows by `beside` with every further one."""

    def __init__(self, seed: Seed, verify: CostTable) -> None:
        self._beside = seed.beside
        self.seen: set[tuple[int, int]] = set()
        self._alone: Counter[int] = Counter()
        self.table = CostTable(seed.of_drafting, base=verify)

    def observe(self, depth: int, n_seqs: int, seconds: float) -> None:
        """So many draft steps of so many sequences took so long."""
        self.seen.add((depth, n_seqs))
        if n_seqs == 1:
            self._alone[depth] += 1
            self.table.observe(depth, seconds)
            return
        known = self.table.means().get(depth)
        if known:
            found = (seconds / known - 1.0) / (n_seqs - 1)
            self._beside += (min(max(found, 0.0), MOST_BESIDE) - self._beside) * BESIDE_ALPHA
        if (
            self._alone[depth] <= TRUSTED
        ):  # else the table holds what a sequence alone takes, and only the factor is learned
            self.table.observe(depth, seconds / self._factor(n_seqs))

    def price(self, depth: int, n_seqs: int) -> float:
        """Expected seconds, or the shape's units."""
        return self.table.price(depth) * self._factor(n_seqs)

    def borrow(self, other: DraftCosts) -> None:
        """Begin with what another one learned."""
        self._beside = other._beside
        self.seen |= other.seen
        self.table.borrow(other.table)

    def _factor(self, n_seqs: int) -> float:
        return 1.0 + self._beside * (n_seqs - 1)


@dataclass(slots=True)
class StepCosts:
    """What steps cost at one range of context lengths: the rows, and the draft steps before them."""

    verify: CostTable
    draft: DraftCosts

    @classmethod
    def new(cls, seed: Seed = Seed()) -> StepCosts:  # noqa: B008  (frozen)
        """Nothing measured yet."""
        verify = CostTable(seed.of_rows)
        return cls(verify, DraftCosts(seed, verify))

    def of_rows(self, rows: int) -> float:
        """Of verifying so many rows."""
        return self.verify.price(rows) * (1.0 if self.verify.has(rows) else NEW_GRAPH)

    def of_drafting(self, depth: int, n_seqs: int) -> float:
        """Of so many draft steps of so many sequences."""
        if not depth:
            return 0.0
        price = self.draft.price(depth, n_seqs)
        return price if (depth, n_seqs) in self.draft.seen else price + (NEW_GRAPH - 1.0) * self.verify.price(1)


class CostMemory:
    """Costs by range of context length: below 2,048 tokens, 8,192, 32,768, and beyond. A new range begins with the nearest known one's."""

    def __init__(self, seed: Seed = Seed()) -> None:  # noqa: B008  (frozen)
        self._seed = seed
        self._ranges: dict[int, StepCosts] = {}

    def at(self, n_tokens: int) -> StepCosts:
        """The costs for sequences of so many tokens."""
        index = sum(n_tokens >= bound for bound in RANGES)
        found = self._ranges.get(index)
        if found is None:
            found = self._ranges[index] = StepCosts.new(self._seed)
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
