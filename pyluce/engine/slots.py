"""Which sequence holds which slot."""

from __future__ import annotations


class SlotTable:
    """A fixed number of slots, each held by one sequence or free. The lowest free slot is handed out first."""

    def __init__(self, n_slots: int) -> None:
        if n_slots < 1:
            raise ValueError(f"expected at least one slot, found {n_slots}")
        self._owners: list[int | None] = [None] * n_slots

    @property
    def owners(self) -> tuple[int | None, ...]:
        """The sequence in each slot, None where it is free."""
        return tuple(self._owners)

    @property
    def n_free(self) -> int:
        """Slots that no sequence holds."""
        return self._owners.count(None)

    def take(self, sequence: int) -> int:
        """Give a free slot to a sequence. Raises RuntimeError when there is none."""
        if None not in self._owners:
            raise RuntimeError(f"all {len(self._owners)} slots are taken")
        slot = self._owners.index(None)
        self._owners[slot] = sequence
        return slot

    def give(self, slot: int, sequence: int) -> None:
        """Take the slot back from the sequence that holds it. Raises RuntimeError when another one does, or none."""
        if self._owners[slot] != sequence:
            raise RuntimeError(f"slot {slot}: expected sequence {sequence} in it, found {self._owners[slot]}")
        self._owners[slot] = None
