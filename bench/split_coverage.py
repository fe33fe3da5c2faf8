"""The share of picks that hot experts hold, by the memory that they may take: assumed, by a law, or from a routing table."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Final

import numpy as np

from bench import split_parameters as p

ASSUMED_COVERAGE: Final = 0.25
BUDGET: Final = 8192
LUCE_TINY: Final = Path(__file__).with_name("luce_tiny_routes.csv")
"""luce-tiny's picks, by `luce routes collect --prompts bench/routes_prompts.jsonl -n 128`."""
Coverage = Callable[[float], float]
"""From MiB of hot experts to the share of picks that they hold."""


def skewed(exponent: float) -> Coverage:
    """Experts picked in proportion to rank^-exponent (Zipf's law), every layer alike; 0: all alike."""
    weights = np.arange(1, p.N_EXPERT + 1, dtype=np.float64) ** -exponent
    return _curve(np.concatenate(([0.0], weights.cumsum() / weights.sum())))


def assumed() -> Coverage:
    """The skew with which the default budget holds `ASSUMED_COVERAGE` of the picks."""
    low, high = 0.0, 2.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if skewed(middle)(BUDGET) < ASSUMED_COVERAGE else (low, middle)
    return skewed(low)


def from_table(path: Path) -> Coverage:
    """By the greedy rule from a routing table of the real model. Raises RoutesError."""
    from pyluce.placement.counts import RouteShape
    from pyluce.placement.hot import choose_hot
    from pyluce.placement.table_file import read_routes_for

    counts = read_routes_for(path, RouteShape(p.N_LAYER, p.N_EXPERT, p.N_USED))
    sizes = [round(p.EXPERT_BYTES)] * p.N_LAYER
    return cache(lambda mib: choose_hot(counts, sizes, int(mib * 2**20)).coverage(counts))


def by_share(path: Path) -> Coverage:
    """From a routing table of another model: what a share of its experts holds, a share as large holds here. Raises RoutesError.

    The greedy rule with experts of one size, which takes the largest counts, whatever their layer.
    """
    from pyluce.placement.table_file import RoutesError, read_routes

    _, counts = read_routes(path)
    ordered = np.sort(counts.astype(np.float64), axis=None)[::-1]
    if not ordered.sum():
        raise RoutesError(f"{path}: expected counts of picks, found zeros only")
    return _curve(np.concatenate(([0.0], ordered.cumsum() / ordered.sum())))


def _curve(held: np.ndarray) -> Coverage:
    """`held`: the share of the picks that so many of the experts hold, from none to all; straight lines between."""
    whole = p.EXPERT_BYTES * p.N_LAYER * p.N_EXPERT
    shares = np.linspace(0.0, 1.0, len(held))
    return lambda mib: float(np.interp(mib * 2**20 / whole, shares, held))


CURVES: Final[dict[str, Callable[[], Coverage]]] = {
    "even": lambda: skewed(0.0),
    "luce-tiny's, by share of the experts": lambda: by_share(LUCE_TINY),
    "assumed": assumed,
    "Zipf, exponent 0.5": lambda: skewed(0.5),
    "Zipf, exponent 1": lambda: skewed(1.0),
}
"""What docs/split.md compares."""
