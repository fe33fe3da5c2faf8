"""What the engine does next, and how long it took: plain data between the scheduler and whoever drives a runner."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Admission:
    """Sequence `sequence` was given slot `slot`."""

    sequence: int
    slot: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """Prompt tokens begin .. end - 1 of a sequence; `last`: the chunk ends the prompt, its last row gives the first token."""

    sequence: int
    begin: int
    end: int
    last: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """One step: one row graph with one row for each sequence of `decode`, and after it `prefill`, one chunk of one prompt."""

    decode: tuple[int, ...] = ()
    prefill: Chunk | None = None

    def __bool__(self) -> bool:
        """There is something to do."""
        return bool(self.decode) or self.prefill is not None


@dataclass(frozen=True, slots=True)
class StepResult:
    """A plan was carried out. Times in seconds, of the row graph and of the chunk, with the choice of tokens."""

    plan: Plan
    decode_s: float = 0.0
    prefill_s: float = 0.0
