"""Simulated serving: the engine's speculator with sequences that come and go, on a device whose steps cost what a line says.

A graph that was not used before is built, which takes long. Deterministic by seed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from pyluce.spec import SpecOptions
from pyluce.spec.cost import Seed
from pyluce.spec.speculator import Candidate, Speculator
from tests.support.spec_sim import accepted_of


@dataclass(frozen=True)
class Device:
    """Times as shares of a step of one row: a row more, a draft step of one sequence, of each further one, building a graph."""

    row: float
    draft: float
    beside: float
    build: float


CPU = Device(row=0.6, draft=0.22, beside=0.5, build=1.5)
"""luce-tiny's shares on a CPU, about."""
GPU = Device(row=0.08, draft=0.08, beside=0.03, build=15.0)


@dataclass
class Machine:
    """Stands for a runner and its clock."""

    device: Device
    rng: np.random.Generator
    now: float = 0.0
    graphs_built: int = 0
    draft_steps: int = 0
    _keys: set[tuple[int, ...]] = field(default_factory=set)

    def clock(self) -> float:
        return self.now

    def draft(self, requests: Sequence[tuple[int, int, int]]) -> list[list[int]]:
        depth, n = max(count for _, _, count in requests), len(requests)
        self._spend((n, depth), self.device.draft * depth * (1.0 + self.device.beside * (n - 1)))
        self.draft_steps += 1
        return [[0] * count for _, _, count in requests]

    def decode(self, rows: int) -> float:
        before = self.now
        self._spend((rows,), 1.0 + self.device.row * (rows - 1))
        return self.now - before

    def _spend(self, key: tuple[int, ...], seconds: float) -> None:
        if key not in self._keys:
            self._keys.add(key)
            self.graphs_built += 1
            seconds += self.device.build
        noise = 1.0 + 0.08 * self.rng.standard_normal()
        self.now += seconds * (max(noise, 0.5) + (1.0 if self.rng.random() < 0.02 else 0.0))


@dataclass
class Served:
    """What a run of the simulation came to; `probes`: steps of a sequence with drafts."""

    tokens: float
    seconds: float
    steps: int
    drafted_steps: int

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def serve(
    device: Device,
    rates: Callable[[np.random.Generator], Sequence[float]],
    width: int,
    n_slots: int,
    n_steps: int,
    seed: int,
    length: int = 60,
    after: int = 0,
) -> Served:
    """`n_steps` steps of `n_slots` slots, those from `after` on being counted. Answers are about `length` tokens long, each with rates
    of acceptance of its own."""
    rng = np.random.default_rng(seed)
    machine = Machine(device, np.random.default_rng(seed + 1))
    guess = Seed(row=device.row, draft=device.draft, beside=device.beside)
    speculator: Speculator[int] = Speculator(SpecOptions(("mtp",), width), machine.clock, guess)
    slots: list[tuple[int, Sequence[float], int] | None] = [None] * n_slots
    served, begun, number = Served(0.0, 0.0, 0, 0), 0.0, 0
    for step in range(n_steps):
        if step == after:
            served, begun = Served(0.0, 0.0, 0, 0), machine.now
        for i, slot in enumerate(slots):
            if slot is None and rng.random() < 0.5:
                number += 1
                slots[i] = (number, rates(rng), int(rng.integers(length // 3, 2 * length)))
        live = [slot for slot in slots if slot is not None]
        if not live:
            continue
        candidates = [Candidate(n, n, 0, (), 100, left - 1) for n, _, left in live]
        drafts = speculator.drafts(machine, candidates)
        rows = len(live) + sum(len(mine) for mine in drafts)
        speculator.computed(machine, rows, machine.decode(rows))
        served.steps += 1
        served.drafted_steps += any(drafts)
        for (n, chances, left), mine in zip(live, drafts, strict=True):
            accepted = accepted_of(chances, len(mine), rng)
            speculator.verified(n, accepted)
            served.tokens += 1.0 + float(np.cumprod(chances[: len(mine)]).sum())
            at = next(i for i, slot in enumerate(slots) if slot is not None and slot[0] == n)
            slots[at] = (n, chances, left - accepted - 1)
            if left - accepted - 1 <= 0:
                speculator.end(n)
                slots[at] = None
    served.seconds = machine.now - begun
    return served
