"""Follows what is asked: which expert should take whose slot among the hot ones, within a limit of bytes a second.

Results never depend on where an expert lives, so the learner may be wrong without harm. It sees picks and a clock and nothing else,
and proposes the same for the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from pyluce.placement.counts import Counts, RouteShape
from pyluce.placement.hot import choose_hot, even_hot

HALF_LIFE_ROWS: Final = 8192.0
"""Rows after which a pick counts half."""
MARGIN: Final = 1.25
"""A swap must promise so many times the picks of the expert that goes: near ties are not worth their bytes."""
MIN_GAIN: Final = 4.0
"""And so many picks more, in counts that decay: a few rows are no evidence."""
DEFAULT_SWAP_MIB_S: Final = 64
BURST_S: Final = 1.0
"""Bytes that were not used for so long may be used at once."""
RESCALE_AT: Final = 1e12
MIB: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class LearnerOptions:
    """`swap_mib_s`: MiB a second that swaps may move; the rest is described at the defaults. Raises ValueError."""

    swap_mib_s: float = DEFAULT_SWAP_MIB_S
    half_life_rows: float = HALF_LIFE_ROWS
    margin: float = MARGIN
    min_gain: float = MIN_GAIN

    def __post_init__(self) -> None:
        if not 0.0 <= self.swap_mib_s < float("inf"):
            raise ValueError(f"swap_mib_s: expected at least 0, found {self.swap_mib_s}")
        if not self.half_life_rows > 0.0 or not self.margin >= 1.0 or not self.min_gain >= 0.0:
            raise ValueError(
                f"expected a half life above 0, a margin of at least 1, a gain of at least 0, found {self}"
            )


@dataclass(frozen=True, slots=True)
class Swap:
    """In `layer`, `expert` should take the slot of `replaced`. `n_bytes` have to be copied to the target."""

    layer: int
    slot: int
    expert: int
    replaced: int
    n_bytes: int


class HotLearner:
    """Counts that decay, and the hot set as it is. `done` tells it of a swap that was carried out."""

    def __init__(
        self,
        shape: RouteShape,
        expert_bytes: Sequence[int],
        budget_bytes: int,
        options: LearnerOptions | None = None,
        counts: Counts | None = None,
    ) -> None:
        """`counts` [n_layer, n_expert]: what is known before, which chooses the first hot set and how many slots a layer has.

        They weigh as much as a half life of rows. Without them the slots are spread evenly.
        """
        self.options = options or LearnerOptions()
        self._expert_bytes = tuple(expert_bytes)
        self._heat = np.zeros((shape.n_layer, shape.n_expert), np.float64)
        self._firsts = (np.arange(shape.n_layer, dtype=np.int64) * shape.n_expert)[:, None, None]
        self._weight = 1.0
        self._used = shape.n_used
        self._credit = 0.0
        self._seen_at: float | None = None
        self.n_swaps = 0
        self.swapped_bytes = 0
        if counts is None:
            self.hot = even_hot(shape, expert_bytes, budget_bytes)
            return
        self.hot = choose_hot(counts, expert_bytes, budget_bytes)
        total = counts.sum(axis=1, dtype=np.float64, keepdims=True)
        share = np.divide(counts, total, out=np.zeros_like(self._heat), where=total > 0)
        self._heat = share * (self._used * self.options.half_life_rows)

    def add(self, picks: npt.NDArray[np.int32]) -> None:
        """Count the picks [n_layer, rows, n_used] of a step; its rows count as one moment."""
        n_layer, rows, _ = picks.shape
        if not rows:
            return
        self._weight *= 2.0 ** (rows / self.options.half_life_rows)
        np.add.at(self._heat.reshape(-1), (picks + self._firsts[:n_layer]).reshape(-1), self._weight)
        if self._weight > RESCALE_AT:
            self._heat /= self._weight
            self._weight = 1.0

    def propose(self, now: float) -> list[Swap]:
        """Swaps that are worth it and allowed by the limit, best first. `now`: seconds of a clock that only goes forward.

        Each takes its bytes from the limit at once, whether it is carried out or not. At most one swap a layer is
        proposed, as the first changes what the second is worth.
        """
        self._refill(now)
        found = []
        for swap, _ in sorted(self._worthwhile(), key=lambda s: (-s[1] / s[0].n_bytes, s[0].layer)):
            if swap.n_bytes <= self._credit:
                self._credit -= swap.n_bytes
                found.append(swap)
        return found

    def done(self, swap: Swap) -> None:
        """The swap was carried out."""
        self.hot = self.hot.replaced(swap.layer, swap.slot, swap.expert)
        self.n_swaps += 1
        self.swapped_bytes += swap.n_bytes

    def coverage(self) -> float:
        """The share of the picks that are remembered whose expert is hot now."""
        total = float(self._heat.sum())
        held = sum(float(self._heat[layer, list(ids)].sum()) for layer, ids in enumerate(self.hot.layers) if ids)
        return held / total if total else 0.0

    def _refill(self, now: float) -> None:
        limit = self.options.swap_mib_s * MIB
        if self._seen_at is not None:
            if now < self._seen_at:
                raise ValueError(f"expected a time of at least {self._seen_at}, found {now}")
            self._credit += (now - self._seen_at) * limit
        # one expert must fit, or a limit below its size a second would never move anything
        self._credit = min(self._credit, max(limit * BURST_S, float(max(self._expert_bytes, default=0))))
        self._seen_at = now

    def _worthwhile(self) -> list[tuple[Swap, float]]:
        """The best swap of each layer that has one, with the picks that it gains."""
        options, found = self.options, []
        is_hot = np.zeros(self._heat.shape, bool)
        for layer, ids in enumerate(self.hot.layers):
            is_hot[layer, list(ids)] = True
        coldest = np.where(is_hot, self._heat, np.inf).argmin(axis=1)
        hottest = np.where(is_hot, -1.0, self._heat).argmax(axis=1)
        least = max(options.min_gain, float(np.finfo(np.float64).tiny))
        for layer, ids in enumerate(self.hot.layers):
            if not ids or len(ids) == self._heat.shape[1]:
                continue
            goes, comes = int(coldest[layer]), int(hottest[layer])
            have, get = float(self._heat[layer, goes]), float(self._heat[layer, comes])
            gain = (get - have) / self._weight
            if gain >= least and get >= options.margin * have:
                found.append((Swap(layer, ids.index(goes), comes, goes, self._expert_bytes[layer]), gain))
        return found
