"""How often each expert of each layer was picked."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Counts = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class RouteShape:
    """The routed layers of a model: layers of its trunk, experts of a layer, experts that a row picks."""

    n_layer: int
    n_expert: int
    n_used: int

    def __str__(self) -> str:
        return f"{self.n_layer} layers of {self.n_expert} experts, {self.n_used} of them used"


def no_counts(shape: RouteShape) -> Counts:
    """Zeros [n_layer, n_expert]."""
    return np.zeros((shape.n_layer, shape.n_expert), np.uint64)


@dataclass(slots=True)
class RouteCounter:
    """Adds up picks: one for each picked expert, row and layer, as the reference system counts them.

    Every row that a step computes counts, a prompt's and a draft's that was not accepted too: its experts were read. The
    draft head's own layer is not among them.
    """

    shape: RouteShape
    counts: Counts = field(init=False)
    n_rows: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.counts = no_counts(self.shape)

    def add(self, picks: npt.NDArray[np.int32]) -> None:
        """Count picks [n_layer, rows, n_used], expert ids. Raises ValueError for another shape or an id out of range."""
        s = self.shape
        if picks.ndim != 3 or (picks.shape[0], picks.shape[2]) != (s.n_layer, s.n_used):
            raise ValueError(f"expected picks [{s.n_layer}, rows, {s.n_used}], found {list(picks.shape)}")
        if not picks.size:
            return
        if picks.min() < 0 or picks.max() >= s.n_expert:
            raise ValueError(f"expected ids from 0 to {s.n_expert - 1}, found {picks.min()} to {picks.max()}")
        firsts = (np.arange(s.n_layer, dtype=np.int64) * s.n_expert)[:, None, None]
        found = np.bincount((picks + firsts).ravel(), minlength=s.n_layer * s.n_expert)
        self.counts += found.astype(np.uint64).reshape(self.counts.shape)
        self.n_rows += picks.shape[1]


def coverage(counts: Counts, n_hottest: int) -> npt.NDArray[np.float64]:
    """For each layer the share of its picks that its `n_hottest` most picked experts hold; 0 where nothing was picked."""
    ordered = -np.sort(-counts.astype(np.float64), axis=1)
    total = ordered.sum(axis=1)
    held = ordered[:, : max(0, n_hottest)].sum(axis=1)
    shares: npt.NDArray[np.float64] = np.divide(held, total, out=np.zeros_like(held), where=total > 0)
    return shares
