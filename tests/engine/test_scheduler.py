"""The scheduler's rules under arbitrary arrivals, ends and step times; then schedulers that break a rule and must be caught."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import Phase as Stage
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from pyluce.engine.plan import Admission, Plan, StepResult
from pyluce.engine.scheduler import Phase, Scheduler
from pyluce.engine.slots import SlotTable

SHARES = (0.0, 0.02, 0.25, 0.5, 0.9, 1.0)
SHORTEST_S = 0.01
TIMES = st.floats(SHORTEST_S, 2.0)
SETTINGS = settings(
    max_examples=40, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
CONTROL = settings(SETTINGS, derandomize=True, report_multiple_bugs=False, phases=[Stage.generate])


def chunks(count: int, size: int = 16) -> list[tuple[int, int]]:
    return [(i * size, (i + 1) * size) for i in range(count)]


class Rules(RuleBasedStateMachine):
    """Drives a scheduler and keeps its own books. `scheduler_type` is what the controls replace."""

    scheduler_type: type[Scheduler] = Scheduler

    @initialize(n_slots=st.sampled_from((1, 2, 3, 8, 64)), share=st.sampled_from(SHARES))
    def start(self, n_slots: int, share: float) -> None:
        self.n_slots, self.share = n_slots, share
        self.scheduler = self.scheduler_type(n_slots, share)
        self.number = 0
        self.waiting: list[int] = []  # in order of arrival
        self.left: dict[int, int] = {}  # chunks to go, of those in slots that are prefilling
        self.decoding: set[int] = set()
        self.turns: dict[
            int, dict[int, int]
        ] = {}  # chunks of others since one's own last one, of those who wait all that time
        self.decode_s = self.prefill_s = self.longest_chunk_s = 0.0  # since somebody decodes
        self.steps_without_chunk = 0

    # what happens to it

    @rule(count=st.integers(1, 6))
    def arrive(self, count: int) -> None:
        self.number += 1
        self.scheduler.submit(self.number, chunks(count))
        self.waiting.append(self.number)
        self.counts = {**getattr(self, "counts", {}), self.number: count}

    @rule(decode_s=TIMES, prefill_s=TIMES, kept=st.integers(0, 3))
    def step(self, decode_s: float, prefill_s: float, kept: int) -> None:
        """`kept`: chunks of each new sequence's prompt that are in its state already."""
        self.admit(kept)
        plan = self.scheduler.plan()
        assert self.scheduler.plan() == plan, "planning changes the plan"
        self.check_plan(plan)
        self.carry_out(plan, decode_s, prefill_s)
        self.scheduler.commit(StepResult(plan, decode_s if plan.decode else 0.0, prefill_s if plan.prefill else 0.0))

    @precondition(lambda self: self.waiting or self.left or self.decoding)
    @rule(data=st.data(), between=st.booleans(), decode_s=TIMES, prefill_s=TIMES)
    def end(self, data: Any, between: bool, decode_s: float, prefill_s: float) -> None:
        """One is cancelled, fails or is complete: between two steps, or between a plan and its commit."""
        number = data.draw(st.sampled_from([*self.waiting, *self.left, *self.decoding]))
        if not between:
            self.retire(number)
            return
        self.admit()
        plan = self.scheduler.plan()
        self.check_plan(plan)
        self.retire(number)
        self.carry_out(plan, decode_s, prefill_s)
        self.scheduler.commit(StepResult(plan, decode_s if plan.decode else 0.0, prefill_s if plan.prefill else 0.0))

    # what must hold

    @invariant()
    def nothing_contradicts_itself(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        assert self.scheduler.violations() == []
        owners = [owner for owner in self.scheduler.slots if owner is not None]
        assert len(self.scheduler.slots) == self.n_slots
        assert sorted(owners) == sorted([*self.left, *self.decoding]), "slots and their owners disagree"
        assert list(self.scheduler.queue) == self.waiting
        assert self.scheduler.busy == bool(owners or self.waiting)

    def teardown(self) -> None:
        """Whatever happened, everybody who is left gets through in a bounded number of steps."""
        if not hasattr(self, "scheduler"):
            return
        work = (
            len(self.waiting) + sum(self.counts[number] for number in [*self.waiting, *self.left]) + len(self.decoding)
        )
        patience = 2 + math.ceil((1 - self.share) / max(self.share, 0.02)) if self.share else 2
        for _ in range((work + 1) * (patience + 2)):
            if not self.scheduler.busy:
                return
            # an answer of one more token; with a share of 0 prompts must wait for that
            before = list(self.decoding)
            self.step(1.0, 1.0, 0)
            for number in before:
                self.retire(number)
        assert not self.scheduler.busy, "somebody was left behind"

    # the books

    def admit(self, kept: int = 0) -> None:
        while (admission := self.scheduler.admit()) is not None:
            assert admission.sequence == self.waiting[0], "a later request was served first"
            assert 0 <= admission.slot < self.n_slots
            self.waiting.pop(0)
            self.left[admission.sequence] = self.counts[admission.sequence]
            self.turns[admission.sequence] = {}
            if kept:
                self.skip(admission.sequence, min(kept, self.counts[admission.sequence]))
        assert not self.waiting or len(self.left) + len(self.decoding) == self.n_slots, "a slot was left free"

    def check_plan(self, plan: Plan) -> None:
        assert len(set(plan.decode)) == len(plan.decode)
        assert set(plan.decode) == self.decoding, "a live stream was left out"
        assert bool(plan) == bool(self.left or self.decoding), "nothing to do although somebody is in a slot"
        chunk = plan.prefill
        if chunk is None:
            self.steps_without_chunk += bool(self.left)
            assert not self.left or self.decoding, "prompts wait for nobody"
            assert not self.left or self.share < 1.0, "prompts wait although all time is theirs"
            limit = math.inf
            if self.share:
                limit = 1 + self.longest_chunk_s * (1 - self.share) / (self.share * SHORTEST_S)
            assert self.steps_without_chunk <= limit + 1e-6, "prompts wait too long"
            return
        self.steps_without_chunk = 0
        assert not self.decoding or self.share > 0.0, "live streams wait although prompts have no share"
        count = self.counts[chunk.sequence]
        index = count - self.left[chunk.sequence]
        assert (chunk.begin, chunk.end, chunk.last) == (*chunks(count)[index], index == count - 1), "not the next chunk"

    def carry_out(self, plan: Plan, decode_s: float, prefill_s: float) -> None:
        if plan.decode:
            self.decode_s += decode_s
        chunk = plan.prefill
        if chunk is not None:
            if plan.decode:
                self.prefill_s += prefill_s
                self.longest_chunk_s = max(self.longest_chunk_s, prefill_s)
                allowed = self.share * self.decode_s + (1 - self.share) * self.longest_chunk_s
                assert (1 - self.share) * self.prefill_s <= allowed + 1e-9, "prompts took more than their share"
            if chunk.sequence in self.left:
                self.take_turn(chunk.sequence)
        self.forget_times()

    def take_turn(self, number: int) -> None:
        for other, seen in self.turns.items():
            if other != number:
                seen[number] = seen.get(number, 0) + 1
                assert seen[number] <= 1, "somebody had two turns while another waited"
        self.turns[number] = {}
        self.left[number] -= 1
        if self.left[number] == 0:
            del self.left[number], self.turns[number]
            self.decoding.add(number)

    def skip(self, number: int, count: int) -> None:
        self.scheduler.skip(number, chunks(count)[-1][1])
        self.left[number] -= count
        if self.left[number] == 0:
            del self.left[number], self.turns[number]
            self.decoding.add(number)

    def retire(self, number: int) -> None:
        self.scheduler.retire(number)
        if number in self.waiting:
            self.waiting.remove(number)
        elif number in self.left:
            del self.left[number], self.turns[number]
        else:
            self.decoding.remove(number)
        self.forget_times()

    def forget_times(self) -> None:
        if not self.decoding:
            self.decode_s = self.prefill_s = self.longest_chunk_s = 0.0
        if not self.decoding or not self.left:
            self.steps_without_chunk = 0


class LastComeFirst(Scheduler):
    def admit(self) -> Admission | None:
        self._queue.rotate(1)
        return super().admit()


class ShareSlots(Scheduler):
    def __init__(self, n_slots: int, prefill_share: float) -> None:
        super().__init__(n_slots, prefill_share)

        class Shared(SlotTable):
            def take(self, sequence: int) -> int:
                self._owners[0] = sequence
                return 0

            def give(self, slot: int, sequence: int) -> None:
                self._owners[slot] = None

        self._slots = Shared(n_slots)


class OneAfterTheOther(Scheduler):
    def _advance(self, sequence: Any, chunk: Any) -> None:
        super()._advance(sequence, chunk)
        if sequence.phase is Phase.PREFILL:
            self._prefilling.rotate(1)


class DropsARow(Scheduler):
    def plan(self) -> Plan:
        plan = super().plan()
        return Plan(plan.decode[:-1], plan.prefill) if plan.prefill else plan


class PromptsFirst(Scheduler):
    def _prefill_allowed(self) -> bool:
        return True


class PromptsNever(Scheduler):
    def _prefill_allowed(self) -> bool:
        return not self._decoding


class KeepsSlots(Scheduler):
    def retire(self, number: int) -> None:
        sequence = self._sequences[number]
        if sequence.phase is Phase.DECODE:
            sequence.slot = None
        super().retire(number)


class WholePrompts(Scheduler):
    def commit(self, result: StepResult) -> None:
        chunk = result.plan.prefill
        if chunk is not None and chunk.sequence in self._sequences and not chunk.last:
            self._sequences[chunk.sequence].chunks_done += 1
        super().commit(result)


def check(scheduler_type: type[Scheduler], chosen: settings) -> None:
    machine = type("Machine", (Rules,), {"scheduler_type": scheduler_type})
    run_state_machine_as_test(machine, settings=chosen)  # type: ignore[no-untyped-call]


def test_the_rules_hold() -> None:
    check(Scheduler, SETTINGS)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (LastComeFirst, "a later request was served first"),
        (ShareSlots, "slots and their owners disagree|which is held by"),
        (OneAfterTheOther, "somebody had two turns while another waited"),
        (DropsARow, "a live stream was left out"),
        (PromptsFirst, "prompts took more than their share|although prompts have no share"),
        (PromptsNever, "prompts wait too long|although all time is theirs"),
        (KeepsSlots, "a slot was left free|does not know it|owners disagree"),
        (WholePrompts, "not the next chunk|a live stream was left out"),
    ],
)
def test_control_a_scheduler_that_breaks_a_rule_is_caught(broken: type[Scheduler], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check(broken, CONTROL)


def run_prompts(
    share: float, counts: list[int], decode_s: float = 1.0, chunk_s: float = 1.0
) -> list[tuple[int, float]]:
    """All arrive at once: (sequence, time of its first token) in the order of first tokens."""
    scheduler = Scheduler(len(counts), share)
    for number, count in enumerate(counts):
        scheduler.submit(number, chunks(count))
    while scheduler.admit():
        pass
    now, first = 0.0, []
    while len(first) < len(counts):
        plan = scheduler.plan()
        now += decode_s * bool(plan.decode) + chunk_s * bool(plan.prefill)
        scheduler.commit(StepResult(plan, decode_s * bool(plan.decode), chunk_s * bool(plan.prefill)))
        if plan.prefill and plan.prefill.last:
            first.append((plan.prefill.sequence, now))
    return first


def test_first_tokens_of_equal_prompts_arrive_together() -> None:
    together = [when for _, when in run_prompts(1.0, [8] * 4, decode_s=0.1)]
    assert together[0] == 29.0
    assert together[-1] - together[0] == pytest.approx(3 * 1.1)


def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    assert run_prompts(0.5, [50, 1])[0] == (1, 2.0)


@pytest.mark.parametrize("share", [0.1, 0.25, 0.5, 0.75])
def test_the_share_is_reached_and_not_exceeded(share: float) -> None:
    scheduler = Scheduler(2, share)
    for number, count in enumerate((1, 4000)):
        scheduler.submit(number, chunks(count))
        scheduler.admit()
    spent = {"decode": 0.0, "prefill": 0.0}
    scheduler.commit(StepResult(scheduler.plan(), 0.0, 1.0))
    for _ in range(5000):
        plan = scheduler.plan()
        result = StepResult(plan, 0.01, 0.1 if plan.prefill else 0.0)
        scheduler.commit(result)
        spent["decode"] += result.decode_s
        spent["prefill"] += result.prefill_s
    assert share - 0.02 < spent["prefill"] / sum(spent.values()) <= share + 0.003


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="slot"):
        Scheduler(0, 0.5)
    with pytest.raises(ValueError, match=r"prefill_share: expected 0 to 1, found 1\.5"):
        Scheduler(1, 1.5)
    scheduler = Scheduler(1, 0.5)
    for bad in ([], [(1, 2)], [(0, 2), (3, 4)], [(0, 0)]):
        with pytest.raises(ValueError, match="consecutive chunks"):
            scheduler.submit(1, bad)
    scheduler.submit(5, chunks(1))
    with pytest.raises(ValueError, match="larger"):
        scheduler.submit(4, chunks(1))
    with pytest.raises(ValueError, match="new number"):
        scheduler.submit(5, chunks(1))


def test_violations_are_named() -> None:
    def fresh() -> Scheduler:
        scheduler = Scheduler(3, 0.5)
        for number in range(5):
            scheduler.submit(number, chunks(2))
        for _ in range(3):
            scheduler.admit()
        assert scheduler.violations() == []
        return scheduler

    damages = {
        "prefill: expected sequences": lambda s: s._prefilling.pop(),
        "queued: expected sequences": lambda s: s._queue.clear(),
        "decode: expected sequences": lambda s: s._decoding.setdefault(0),
        "not in order of arrival": lambda s: s._queue.rotate(1),
        "slot 0 is held by sequence 7": lambda s: s._slots._owners.__setitem__(0, 7),
        "sequence 0 is in slot 2, which is held by 2": lambda s: setattr(s.get(0), "slot", 2),
        "is in phase queued with slot 1": lambda s: setattr(s.get(3), "slot", 1),
        "2 of 2 chunks, but prefill": lambda s: setattr(s.get(1), "chunks_done", 2),
    }
    for message, damage in damages.items():
        scheduler = fresh()
        damage(scheduler)
        assert any(message in violation for violation in scheduler.violations()), (message, scheduler.violations())


@pytest.mark.parametrize("counts", [[1], [5], [3, 3], [1, 4, 2], [2, 1, 1, 6]])
def test_the_chunk_after_is_the_one_planned_next(counts: list[int]) -> None:
    """While nobody comes or goes."""
    scheduler = Scheduler(len(counts), 1.0)
    for number, count in enumerate(counts):
        scheduler.submit(number, chunks(count))
        assert scheduler.admit() is not None
    seen = 0
    plan = scheduler.plan()
    while plan.prefill is not None:
        expected = scheduler.after(plan.prefill)
        scheduler.commit(StepResult(plan, 0.0, 1.0))
        plan = scheduler.plan()
        assert plan.prefill == expected
        seen += 1
    assert seen == sum(counts)


def test_chunks_that_a_runner_computes_at_once_are_planned_as_one() -> None:
    scheduler = Scheduler(1, 0.5, prompt_streams=3)
    bounds = [(i, i + 10) for i in range(0, 80, 10)]
    scheduler.submit(1, bounds, stops=(50,))
    scheduler.admit()
    planned = []
    while (chunk := scheduler.plan().prefill) is not None:
        following = scheduler.after(chunk)
        planned.append(
            (chunk.begin, chunk.end, chunk.last, None if following is None else (following.begin, following.end))
        )
        scheduler.commit(StepResult(scheduler.plan()))
        assert scheduler.violations() == []
    assert planned == [(0, 30, False, (30, 40)), (30, 50, False, (50, 60)), (50, 80, True, None)]
    other = Scheduler(1, 0.5, prompt_streams=2)
    other.submit(1, bounds)
    other.admit()
    other.skip(1, 30)
    chunk = other.plan().prefill
    assert chunk is not None and (chunk.begin, chunk.end) == (30, 50)
