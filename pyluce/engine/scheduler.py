"""Decides what every step computes. A pure object over plain data: no clock, no thread, no runner.

The rules, each a property that tests/engine/test_scheduler.py checks:

* Slots are given in order of arrival, and no slot has two owners.
* Every decoding sequence has a row in every step, so a live stream waits for at most one chunk of somebody's prompt.
* Prompts that are being read take turns, a chunk each, so prompts of one length give their first tokens together.
* While others decode, prompts take at most `prefill_share` of the time: a chunk that took t seconds is paid back with row steps
  of t * (1 - share) / share seconds before the next chunk. With nobody decoding, chunks follow each other.
* A step is empty only when there is no sequence in a slot.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pyluce.engine.plan import Admission, Chunk, Plan, StepResult
from pyluce.engine.slots import SlotTable


class Phase(enum.Enum):
    """Where a sequence is on its way."""

    QUEUED = "queued"
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(slots=True)
class ScheduledSequence:
    """A sequence's place in the schedule. `chunks`: the bounds of its prompt's chunks, a function of its own tokens only.

    `stops`: ends of chunks at which the runner has to be asked for the state.
    """

    number: int
    chunks: tuple[tuple[int, int], ...]
    stops: frozenset[int] = frozenset()
    phase: Phase = Phase.QUEUED
    slot: int | None = None
    chunks_done: int = 0

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt."""
        return self.chunks[-1][1]

    @property
    def prompt_done(self) -> int:
        """Tokens of the prompt that are computed."""
        return self.chunks[self.chunks_done - 1][1] if self.chunks_done else 0

    def next_chunk(self, done: int, n_streams: int) -> Chunk:
        """What comes after `done` chunks: as many as a runner computes at once, up to a stop."""
        begin, end = self.chunks[done]
        for _, further in self.chunks[done + 1 : done + n_streams]:
            if end in self.stops:
                break
            end = further
        return Chunk(self.number, begin, end, last=end == self.prompt_length)

    def n_chunks(self, chunk: Chunk) -> int:
        """How many of the prompt's chunks a planned one is."""
        return sum(chunk.begin <= begin and end <= chunk.end for begin, end in self.chunks)


class Scheduler:
    """Sequences by number, from the queue through a slot to their end.

    A step: `admit` until it returns None, `plan`, carry the plan out, `commit`. `retire` ends a sequence in any phase, also between
    `plan` and `commit`. Numbers grow with the order of arrival.
    """

    def __init__(self, n_slots: int, prefill_share: float, prompt_streams: int = 1) -> None:
        """`prompt_streams`: consecutive chunks of a prompt that are planned as one, for a runner that computes them at once."""
        if not 0.0 <= prefill_share <= 1.0:
            raise ValueError(f"prefill_share: expected 0 to 1, found {prefill_share}")
        self._share = prefill_share
        self._streams = prompt_streams
        self._debt_s = 0.0  # what prompts still owe; below 0 the rest of the row step that paid it off
        self._slots = SlotTable(n_slots)
        self._sequences: dict[int, ScheduledSequence] = {}
        self._queue: deque[int] = deque()
        self._prefilling: deque[int] = deque()  # the first one's chunk is next
        self._decoding: dict[int, None] = {}  # a set that keeps its order

    @property
    def slots(self) -> tuple[int | None, ...]:
        """The sequence in each slot, None where it is free."""
        return self._slots.owners

    @property
    def queue(self) -> tuple[int, ...]:
        """The sequences that wait for a slot, first come first."""
        return tuple(self._queue)

    @property
    def busy(self) -> bool:
        """There are sequences."""
        return bool(self._sequences)

    def get(self, number: int) -> ScheduledSequence | None:
        """A sequence that was submitted and not retired."""
        return self._sequences.get(number)

    def submit(self, number: int, chunks: Sequence[tuple[int, int]], stops: Iterable[int] = ()) -> None:
        """Queue a sequence. `chunks`: consecutive bounds (begin, end) from 0 on; `stops`: ends that no planned chunk goes beyond."""
        ends = [0, *(end for _, end in chunks)]
        if not chunks or [begin for begin, _ in chunks] != ends[:-1] or any(b >= e for b, e in chunks):
            raise ValueError(f"sequence {number}: expected consecutive chunks from 0 on, found {list(chunks)}")
        if number in self._sequences or (self._queue and number < self._queue[-1]):
            raise ValueError(f"sequence {number}: expected a new number, larger than those before")
        self._sequences[number] = ScheduledSequence(number, tuple(chunks), frozenset(stops))
        self._queue.append(number)

    def admit(self) -> Admission | None:
        """Give the first sequence of the queue a slot; None when there is no sequence or no slot."""
        if not self._queue or not self._slots.n_free:
            return None
        sequence = self._sequences[self._queue.popleft()]
        sequence.slot = self._slots.take(sequence.number)
        sequence.phase = Phase.PREFILL
        self._prefilling.append(sequence.number)
        return Admission(sequence.number, sequence.slot)

    def skip(self, number: int, length: int) -> None:
        """The first `length` tokens of an admitted sequence's prompt are in its state already: whole chunks, before its first."""
        sequence = self._sequences[number]
        done = [end for _, end in sequence.chunks].index(length) + 1
        if sequence.phase is not Phase.PREFILL or sequence.chunks_done:
            raise ValueError(
                f"sequence {number}: expected it before its first chunk, found it in {sequence.phase.value}"
            )
        sequence.chunks_done = done
        if done == len(sequence.chunks):
            self._prefilling.remove(number)
            sequence.phase = Phase.DECODE
            self._decoding[number] = None

    def plan(self) -> Plan:
        """The next step. Changes nothing."""
        chunk = None
        if self._prefilling and self._prefill_allowed():
            sequence = self._sequences[self._prefilling[0]]
            chunk = sequence.next_chunk(sequence.chunks_done, self._streams)
        return Plan(tuple(self._decoding), chunk)

    def after(self, chunk: Chunk) -> Chunk | None:
        """The chunk that is planned after this one if nobody comes or goes; None if there is none."""
        for number in [*self._prefilling, *list(self._prefilling)[:1]][1:]:
            sequence = self._sequences[number]
            done = sequence.chunks_done + (sequence.n_chunks(chunk) if number == chunk.sequence else 0)
            if done < len(sequence.chunks):
                return sequence.next_chunk(done, 1)
        return None

    def commit(self, result: StepResult) -> None:
        """The step was carried out; sequences that were retired meanwhile are passed over."""
        chunk = result.plan.prefill
        if chunk is not None and chunk.sequence in self._sequences:
            self._advance(self._sequences[chunk.sequence], chunk)
        if result.plan.decode:
            paid_s = self._share * result.decode_s
            self._debt_s = max(-paid_s, self._debt_s - paid_s + (1.0 - self._share) * result.prefill_s)
        self._forgive()

    def retire(self, number: int) -> None:
        """End a sequence, in whatever phase; its slot is free."""
        sequence = self._sequences.pop(number)
        if sequence.phase is Phase.QUEUED:
            self._queue.remove(number)
        elif sequence.phase is Phase.PREFILL:
            self._prefilling.remove(number)
        else:
            del self._decoding[number]
        if sequence.slot is not None:
            self._slots.give(sequence.slot, number)
        self._forgive()

    def violations(self) -> list[str]:
        """What contradicts itself, in words; empty when all is well."""
        found = []
        for phase, listed in (
            (Phase.QUEUED, list(self._queue)),
            (Phase.PREFILL, list(self._prefilling)),
            (Phase.DECODE, list(self._decoding)),
        ):
            expected = [s.number for s in self._sequences.values() if s.phase is phase]
            if sorted(listed) != sorted(expected):
                found.append(f"{phase.value}: expected sequences {sorted(expected)}, found {sorted(listed)}")
        if list(self._queue) != sorted(self._queue):
            found.append(f"the queue is not in order of arrival: {list(self._queue)}")
        owners = self._slots.owners
        for slot, owner in enumerate(owners):
            if owner is not None and (owner not in self._sequences or self._sequences[owner].slot != slot):
                found.append(f"slot {slot} is held by sequence {owner}, which does not know it")
        for s in self._sequences.values():
            if (s.slot is None) != (s.phase is Phase.QUEUED):
                found.append(f"sequence {s.number} is in phase {s.phase.value} with slot {s.slot}")
            elif s.slot is not None and owners[s.slot] != s.number:
                found.append(f"sequence {s.number} is in slot {s.slot}, which is held by {owners[s.slot]}")
            if (s.chunks_done == len(s.chunks)) != (s.phase is Phase.DECODE):
                found.append(f"sequence {s.number}: {s.chunks_done} of {len(s.chunks)} chunks, but {s.phase.value}")
        return found

    def _prefill_allowed(self) -> bool:
        return not self._decoding or (self._share > 0.0 and self._debt_s <= 0.0)

    def _forgive(self) -> None:
        """Nobody waits for time that prompts owe."""
        if not self._decoding:
            self._debt_s = 0.0

    def _advance(self, sequence: ScheduledSequence, chunk: Chunk) -> None:
        sequence.chunks_done += sequence.n_chunks(chunk)
        self._prefilling.remove(sequence.number)
        if sequence.chunks_done < len(sequence.chunks):
            self._prefilling.append(sequence.number)
        else:
            sequence.phase = Phase.DECODE
            self._decoding[sequence.number] = None
