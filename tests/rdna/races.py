"""Conflicting accesses of a workgroup's waves between two barriers.

For every granule (as wide as the kernel's narrowest store, at most 4 bytes) the last writer and the last two readers of
different waves are remembered, each with its wave, the number of barriers that its workgroup had passed, and its
instruction. Accesses of different workgroups to global memory are not compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.rdna.decode import Instruction
from tests.rdna.errors import RdnaError

WAVE_BITS = 12
MAX_WAVES = 1 << WAVE_BITS
MAX_WAITING = 1 << 27  # bytes of reads that are kept before they are entered


@dataclass(frozen=True)
class Race:
    """Two instructions that touched the same bytes; the later one first seen at ``place``."""

    first: str
    second: str
    place: str
    same_value: bool  # two stores, and the second stored what was there already

    def __str__(self) -> str:
        note = " (the same value)" if self.same_value else ""
        return f"{self.place}{note}:\n    {self.first}\n    {self.second}"


class Shadow:
    """What is remembered about one stretch of memory."""

    def __init__(self, nbytes: int, granule: int) -> None:
        count = -(-nbytes // granule)
        self.keys = np.zeros((3, count), np.uint32)  # writer, reader, another reader: epoch and wave, 0 for none
        self.who = np.zeros((3, count), np.uint16)  # their instructions
        self.last_write = 0  # the latest epoch of a write
        self.reads: list[tuple[Any, ...]] = []  # not entered yet: most memory that is read is never written


class Races:
    """One dispatch's record. ``epoch[wave]`` counts the barriers passed."""

    def __init__(self, granule: int, instructions: list[Instruction], atomic: list[bool]) -> None:
        self.granule = granule
        self.instructions, self.atomic = instructions, atomic
        self.shadows: dict[Any, Shadow] = {}
        self.found: dict[tuple[int, int], Race] = {}
        self.epoch = np.ones(0, np.uint32)
        self.lowest = 1
        self.group_of = np.zeros(0, np.int64)
        self.waiting_bytes = 0

    def next_chunk(self, group_of: np.ndarray) -> None:
        """Other waves now; nothing of the earlier ones can conflict with theirs."""
        self.lowest = int(self.epoch.max(initial=self.lowest)) + 1
        if self.lowest >> (31 - WAVE_BITS):  # start again before the numbers are too large for a key
            self.shadows.clear()
            self.lowest = 1
        self.epoch = np.full(len(group_of), self.lowest, np.uint32)
        self.group_of = group_of
        self._forget()

    def barrier(self, waves: np.ndarray) -> None:
        """These waves passed one ([n] of bool)."""
        self.epoch = self.epoch + waves.astype(np.uint32)  # a new array: reads that wait keep the old one
        self.lowest = int(self.epoch.min())
        if int(self.epoch.max()) >> (32 - WAVE_BITS):
            raise RdnaError("more barriers than the race record can tell apart: run with races=False.")

    def _forget(self) -> None:
        for shadow in self.shadows.values():
            shadow.reads.clear()
        self.waiting_bytes = 0

    def record(
        self, space: Any, nbytes: int, offsets: np.ndarray, size: int, waves: np.ndarray, number: int, write: bool, name: str,
        unchanged: Any = None,
    ) -> None:  # fmt: skip
        """Accesses of ``size`` bytes at ``offsets`` by ``waves`` (the same shape, kept); ``unchanged``: stores that store
        what was there."""
        shadow = self.shadows.get(space)
        if shadow is None:
            shadow = self.shadows[space] = Shadow(nbytes, self.granule)
        if write:
            self._enter_reads(shadow)
            shadow.last_write = int(self.epoch.max())
            for at, keys, inside in self._granules(offsets, size, waves, self.epoch):
                self._write(shadow, at, keys, number, name, unchanged if inside is None else unchanged[inside])
            return
        if shadow.last_write >= self.lowest:
            for at, keys, _ in self._granules(offsets, size, waves, self.epoch):
                self._against(shadow, 0, at, keys, number, name, None)
        shadow.reads.append((offsets, size, waves, self.epoch, number))
        self.waiting_bytes += offsets.nbytes + waves.nbytes
        if self.waiting_bytes > MAX_WAITING:
            for each in self.shadows.values():
                self._enter_reads(each)
            self.waiting_bytes = 0

    def _granules(self, offsets: Any, size: int, waves: Any, epoch: Any) -> Iterator[tuple[Any, Any, Any]]:
        """Granule and key of each access, once for each granule that the accesses cover."""
        first = offsets // self.granule
        last = (offsets + (size - 1)) // self.granule
        keys = (epoch[waves] << np.uint32(WAVE_BITS)) | waves.astype(np.uint32)
        for step in range(int((last - first).max()) + 1):
            at = first + step
            if step and (at > last).any():
                inside = at <= last
                yield at[inside], keys[inside], inside
            else:
                yield at, keys, None

    def _enter_reads(self, shadow: Shadow) -> None:
        """Enter the reads that can still conflict with a write."""
        for offsets, size, waves, epoch, number in shadow.reads:
            if int(epoch.max()) >= self.lowest:
                for at, keys, _ in self._granules(offsets, size, waves, epoch):
                    self._read(shadow, at, keys, number)
        shadow.reads.clear()

    @staticmethod
    def _read(shadow: Shadow, at: Any, keys: Any, number: int) -> None:
        before = shadow.keys[1][at]
        other = (before != keys) & ((before >> np.uint32(WAVE_BITS)) == (keys >> np.uint32(WAVE_BITS)))
        if other.any():
            shadow.keys[2][at[other]] = before[other]
            shadow.who[2][at[other]] = shadow.who[1][at[other]]
        shadow.keys[1][at] = keys
        shadow.who[1][at] = number
        beaten = shadow.keys[1][at] != keys  # by another wave of this very instruction
        if beaten.any():
            shadow.keys[2][at[beaten]] = keys[beaten]
            shadow.who[2][at[beaten]] = number

    def _write(self, shadow: Shadow, at: Any, keys: Any, number: int, name: str, unchanged: Any) -> None:
        for row in (0, 1, 2):
            self._against(shadow, row, at, keys, number, name, unchanged if row == 0 else None)
        shadow.keys[0][at] = keys
        shadow.who[0][at] = number
        beaten = shadow.keys[0][at] != keys
        if beaten.any():
            who = np.full(len(at), number, np.uint16)
            self._report(who, shadow.keys[0][at], keys, beaten, at, number, name, unchanged)

    def _against(self, shadow: Shadow, row: int, at: Any, keys: Any, number: int, name: str, unchanged: Any) -> None:
        before = shadow.keys[row][at]
        conflict = ((before >> np.uint32(WAVE_BITS)) == (keys >> np.uint32(WAVE_BITS))) & (before != keys)
        if conflict.any():
            self._report(shadow.who[row][at], before, keys, conflict, at, number, name, unchanged)

    def _report(
        self, who: Any, before: Any, keys: Any, conflict: Any, at: Any, number: int, name: str, unchanged: Any
    ) -> None:
        where = np.flatnonzero(conflict)
        one, two = (before[where] & (MAX_WAVES - 1)).astype(np.int64), (keys[where] & (MAX_WAVES - 1)).astype(np.int64)
        where = where[self.group_of[one] == self.group_of[two]]
        for k in where:
            pair = (int(who[k]), number)
            if self.atomic[pair[0]] and self.atomic[number]:
                continue
            if pair in self.found and not self.found[pair].same_value:
                continue
            same = unchanged is not None and bool(unchanged[k])
            if pair in self.found and same:
                continue
            waves = f"waves {int(before[k]) & (MAX_WAVES - 1)} and {int(keys[k]) & (MAX_WAVES - 1)}"
            place = f"{name} + {int(at[k]) * self.granule}, {waves}"
            self.found[pair] = Race(str(self.instructions[pair[0]]), str(self.instructions[number]), place, same)
