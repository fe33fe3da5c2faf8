"""The batch core over the fake runner: exactness, order, waits, limits, and what ends a request alone."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pyluce.engine import (
    Activity,
    ContextLimitError,
    DeadlineError,
    EngineClosedError,
    FinishReason,
    LogitsError,
    Outcome,
    QueueFullError,
    RequestCancelledError,
    RequestError,
    SamplingParams,
    SlotState,
    TokenEvent,
)
from pyluce.text import Tokenizer
from tests.support.desk import CHUNK, N_CTX, VOCABULARY, Desk, alone, request
from tests.support.fake_runner import FakeState, NumpyChain

PROMPTS = st.lists(st.integers(0, 255), min_size=1, max_size=3 * CHUNK + 1)
ARRIVALS = st.lists(
    st.tuples(PROMPTS, st.integers(1, 12), st.integers(0, 30), st.sampled_from((None, None, 3)), st.booleans()),
    min_size=1,
    max_size=12,
)


def requests_of(arrivals: Sequence[tuple[Any, ...]]) -> list[tuple[int, int | None, Any]]:
    """(step of arrival, steps until it is cancelled or None, request)"""
    made = []
    for prompt, n, at, cancel, sampled in arrivals:
        sampling = SamplingParams(temperature=1.0, seed=n, top_k=20) if sampled else SamplingParams()
        made.append((at, cancel, request(prompt, n, sampling=sampling)))
    return sorted(made, key=lambda entry: entry[0])


def play(desk: Desk, script: Sequence[tuple[int, int | None, Any]]) -> None:
    """Submit each request at its step, cancel those that have a time for it, and run to the end."""
    todo, cancels = list(script), []
    for step in range(200):
        while todo and todo[0][0] <= step:
            _, cancel, wanted = todo.pop(0)
            ticket = desk.submit(wanted)
            if cancel is not None:
                cancels.append((step + cancel, ticket))
        for when, ticket in cancels:
            if when == step:
                ticket.cancel()
        desk.step()
    desk.run()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(ARRIVALS, st.sampled_from((1, 2, 3, 8)), st.sampled_from((0.0, 0.3, 1.0)))
def test_every_answer_is_what_it_is_alone(arrivals: Any, n_slots: int, share: float) -> None:
    script = requests_of(arrivals)
    desk = Desk(n_slots, share=share)
    play(desk, script)
    for ticket, (_, cancel, wanted) in zip(desk.tickets, script, strict=True):
        answer = desk.answer(ticket)
        if cancel is None or answer.complete:
            assert answer.result() == alone(wanted).result()
        else:
            assert isinstance(answer.error, RequestCancelledError)
            assert answer.tokens == alone(wanted).tokens[: len(answer.tokens)]
    stats = desk.core.stats()
    assert stats.generated_tokens_total == sum(len(desk.answer(ticket).tokens) for ticket in desk.tickets)
    assert stats.prompt_tokens_total == sum(max(desk.answer(t).prompt_done, default=0) for t in desk.tickets)
    assert stats.decode_rows == sum(len(rows) for kind, rows in desk.runner.log if kind == "decode")


def test_control_rows_that_see_each_other_show() -> None:
    wanted = [request([number, 7], 40) for number in range(3)]
    desk = Desk(3, leak=True)
    tickets = [desk.submit(each) for each in wanted]
    desk.run()
    different = [desk.answer(t).result() != alone(w).result() for t, w in zip(tickets, wanted, strict=True)]
    assert all(different)
    desk = Desk(1, leak=True)
    ticket = desk.submit(wanted[0])
    desk.run()
    assert desk.answer(ticket).result() == alone(wanted[0]).result()


def test_first_come_first_served() -> None:
    desk = Desk(2)
    for number in range(20):
        desk.submit(request([number] * (1 + number % 20), 1 + number % 5))
    desk.run()
    firsts: dict[int, None] = {}
    for kind, rows in desk.runner.log:
        if kind == "prefill":
            firsts.setdefault(rows[0])
    assert list(firsts) == list(range(20))


def test_no_live_stream_waits_longer_than_one_chunk() -> None:
    for share in (0.01, 0.5, 1.0):
        desk = Desk(4, share=share)
        for number in range(12):
            desk.submit(request([number] * (CHUNK * 5), 20))
        desk.run()
        row_graphs = [set(rows) for kind, rows in desk.runner.log if kind == "decode"]
        for number in range(12):
            having = [index for index, rows in enumerate(row_graphs) if number in rows]
            assert having == list(range(having[0], having[0] + 19)), "a live stream has no row"
        live: set[int] = set()
        since_row: list[int] = []
        for kind, rows in desk.runner.log:
            if kind == "prefill":
                since_row.append(rows[0])
            else:
                assert len(since_row) <= 1 or not live & set(rows), "two chunks while somebody decodes"
                live, since_row = set(rows), []


@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
def test_prompts_take_their_share_of_the_clock(share: float) -> None:
    desk = Desk(3, share=share, n_ctx=10_000)
    desk.runner.row_s, desk.runner.chunk_s = 0.02, 0.3
    desk.submit(request([1], 2000))
    desk.step()
    for number in range(2):
        desk.submit(request([number] * (CHUNK * 100), 1))
    desk.step()
    begun, chunks = desk.clock.now, 0
    while desk.core.stats().busy_slots == 3 and desk.clock.now < begun + 60:
        before = desk.core.stats().prefill_chunks
        desk.step()
        chunks += desk.core.stats().prefill_chunks - before
    used = chunks * 0.3 / (desk.clock.now - begun)
    assert share - 0.03 < used < share + 0.03


def test_with_no_share_prompts_wait_until_nobody_decodes() -> None:
    desk = Desk(2, share=0.0)
    first = desk.submit(request([1], 10))
    desk.step()
    desk.submit(request([2] * CHUNK * 2, 2))
    desk.run()
    kinds = [kind for kind, _ in desk.runner.log]
    assert kinds == ["prefill"] + ["decode"] * 9 + ["prefill"] * 2 + ["decode"]
    assert desk.answer(first).complete


def test_waiting_first_tokens_arrive_together() -> None:
    desk = Desk(4, share=1.0)
    for number in range(4):
        desk.submit(request([number] * (CHUNK * 6), 30))
    at: dict[int, float] = {}
    while len(at) < 4:
        desk.step()
        for ticket in desk.tickets:
            if any(isinstance(message, TokenEvent) for message in desk.messages[ticket.id]):
                at.setdefault(ticket.id, desk.clock.now)
    spread = max(at.values()) - min(at.values())
    assert spread <= 3 * (desk.runner.chunk_s + desk.runner.row_s) + 1e-9
    assert min(at.values()) - 1000.0 >= 21 * desk.runner.chunk_s


def test_a_full_queue_is_refused_and_free_again_later() -> None:
    desk = Desk(2, max_queue=3)
    for _ in range(5):
        desk.submit(request([1], 3))
    with pytest.raises(QueueFullError, match="all 2 slots and all 3 places in the queue") as caught:
        desk.submit(request([1], 3))
    assert 1.0 <= caught.value.retry_after_s <= 60.0
    assert desk.core.stats().queue_length == 5
    desk.step()
    stats = desk.core.stats()
    assert (stats.queue_length, stats.busy_slots, stats.refused) == (3, 2, 1)
    desk.run()
    desk.submit(request([1], 3))
    desk.run()
    assert desk.core.stats().requests[Outcome.LENGTH] == 6


def test_the_time_to_retry_follows_the_rate_of_answers() -> None:
    desk = Desk(1, max_queue=0)
    desk.runner.row_s = 20.0
    for _ in range(40):
        desk.submit(request([1], 2))
        desk.run()
    desk.submit(request([1], 2))
    with pytest.raises(QueueFullError) as caught:
        desk.submit(request([1], 2))
    assert caught.value.retry_after_s == pytest.approx(21.0, rel=0.05)


def test_no_queue_at_all() -> None:
    desk = Desk(1, max_queue=0)
    desk.submit(request([1], 3))
    with pytest.raises(QueueFullError):
        desk.submit(request([1], 3))
    desk.run()


def test_what_can_never_be_served_is_refused_before_the_queue() -> None:
    desk = Desk(1, max_queue=0)
    desk.submit(request([1], 3))
    with pytest.raises(ContextLimitError, match=f"97 tokens do not fit into the context of {N_CTX}"):
        desk.submit(request([1] * 97, None))
    with pytest.raises(ContextLimitError, match="90 prompt tokens leave room for 7 in the context of 96, found 8"):
        desk.submit(request([1] * 90, 8))
    with pytest.raises(RequestError, match="token ids"):
        desk.submit(request([VOCABULARY.n_tokens], 1))
    with pytest.raises(RequestError, match="logit_bias"):
        desk.submit(request([1], 1, sampling=SamplingParams(logit_bias={VOCABULARY.n_tokens: 1.0})))
    assert desk.core.stats().refused == 0
    desk.run()


@pytest.mark.parametrize("length", [1, 60, N_CTX - 1, N_CTX])
def test_an_answer_that_fills_the_context_ends_with_length(length: int) -> None:
    desk = Desk(2)
    ticket = desk.submit(request([3] * length, None))
    other = desk.submit(request([4], 3))
    desk.run()
    answer = desk.answer(ticket)
    assert answer.finish is not None
    assert (answer.finish.reason, len(answer.tokens)) == (FinishReason.LENGTH, N_CTX - length + 1)
    assert desk.answer(other).result() == alone(request([4], 3)).result()


# cancelling


STAGES = ["queued", "before its first chunk", "between its chunks", "before its first row", "between its rows"]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("by", ["cancel", "deadline"])
def test_leaving_at_any_stage_frees_the_slot_within_a_step(stage: str, by: str) -> None:
    desk = Desk(2)
    neighbour = desk.submit(request([9, 9], 60))
    blocker = desk.submit(request([8], 80)) if stage == "queued" else None
    options = {"deadline_s": 50.0} if by == "deadline" else {}
    leaver = desk.submit(request([5] * (3 * CHUNK), 40, **options))
    answer = desk.answer_so_far(leaver)
    reached = {
        "queued": lambda: desk.steps == 3,
        "before its first chunk": lambda: True,
        "between its chunks": lambda: answer.chunks == 2,
        "before its first row": lambda: answer.tokens == 1,
        "between its rows": lambda: answer.tokens == 5,
    }[stage]
    while not reached():
        desk.step()
    if by == "cancel":
        leaver.cancel()
    else:
        desk.clock.now += 50.0
    desk.step()
    assert leaver.answered
    owners = {slot.request_id for slot in desk.core.stats().slots}
    assert leaver.id not in owners
    left = desk.answer(leaver)
    assert isinstance(left.error, RequestCancelledError if by == "cancel" else DeadlineError)
    wanted = request([6] * 20, 5)
    follower = desk.submit(wanted)
    desk.run()
    assert desk.answer(follower).result() == alone(wanted).result()
    assert desk.answer(neighbour).result() == alone(request([9, 9], 60)).result()
    assert blocker is None or desk.answer(blocker).complete
    assert desk.core.stats().requests[Outcome.CANCELLED if by == "cancel" else Outcome.DEADLINE] == 1


def test_cancelled_during_the_row_graph_its_chunk_is_not_computed() -> None:
    desk = Desk(2, share=1.0)
    desk.submit(request([1], 20))
    desk.step()
    leaver = desk.submit(request([5] * (3 * CHUNK), 4))
    desk.step()
    desk.runner.fail = lambda kind, states: leaver.cancel() if kind == "decode" else None
    before = desk.core.stats().prefill_chunks
    desk.step()
    assert (desk.core.stats().prefill_chunks, leaver.answered) == (before, True)
    desk.run()


def test_cancelled_after_the_last_token_it_is_complete() -> None:
    desk = Desk(1)
    ticket = desk.submit(request([1], 2))
    seen: list[object] = []

    def watch(message: object) -> None:
        seen.append(message)
        if isinstance(message, TokenEvent) and message.index == 1:
            ticket.cancel()

    ticket.on_event(watch)
    desk.run()
    assert seen[-1] is None
    assert desk.core.stats().requests[Outcome.LENGTH] == 1


def test_two_hundred_cancelled_requests_leave_nothing_behind() -> None:
    rng = random.Random(5)
    desk = Desk(3)
    for _ in range(200):
        ticket = desk.submit(request([rng.randrange(200)] * rng.randrange(1, 40), 30))
        for _ in range(rng.randrange(4)):
            desk.step()
        ticket.cancel()
    desk.run()
    wanted = request([1, 2, 3], 6)
    ticket = desk.submit(wanted)
    desk.run()
    assert desk.answer(ticket).result() == alone(wanted).result()


def test_a_callback_that_raises_cancels_its_request_only() -> None:
    desk = Desk(2)
    broken = desk.submit(request([1], 30))
    fine = desk.submit(request([2], 30))

    def raises(message: object) -> None:
        raise RuntimeError("nobody listens")

    broken.on_event(raises)
    desk.run()
    assert desk.core.stats().requests[Outcome.CANCELLED] == 1
    assert desk.answer(fine).result() == alone(request([2], 30)).result()


# failures


VICTIM = 13
VICTIM_PROMPT = (VICTIM,) * (CHUNK + 3)
BAD_TOKEN = 201
FAILURES = ["chain", "new sequence", "sample 0", "sample 3", "text 0", "text 4", "NaN 0", "NaN 3", "-inf 2"]
FAILURES += ["constraint", "mask 0", "mask 3", "accept 2"]


class FailingTable(Tokenizer):
    """One token has no text."""

    def token_bytes(self, token: int) -> bytes:
        if token == BAD_TOKEN:
            raise RuntimeError("no such text")
        return super().token_bytes(token)


def failing_chain(fails_at: int) -> type[NumpyChain]:
    """A chain whose step `fails_at` raises; below 0 it cannot even be made."""

    class FailingChain(NumpyChain):
        def __init__(self) -> None:
            if fails_at < 0:
                raise RuntimeError("no chain")
            super().__init__()
            self.step = 0

        def sample(self, logits: Any) -> int:
            self.step += 1
            if self.step > fails_at:
                raise RuntimeError("no token")
            return super().sample(logits)

    return FailingChain


class FailingConstraint:
    """Allows every token, until its step `after` of the method that fails."""

    is_complete = False
    closed = 0

    def __init__(self, what: str, after: int) -> None:
        self._what, self._left = what, after

    def _use(self, what: str) -> None:
        if what == self._what:
            self._left -= 1
            if self._left < 0:
                raise RuntimeError(f"{what} failed")

    def begin(self, head: bytes, line_breaks: bool) -> None:
        self._use("constraint")

    def mask(self, logits: Any) -> None:
        self._use("mask")

    def mask_ends(self, logits: Any) -> None:
        pass

    def accept(self, token: int) -> None:
        self._use("accept")

    def close(self) -> None:
        FailingConstraint.closed += 1


@pytest.mark.parametrize("failure", FAILURES)
def test_a_failure_of_one_request_ends_it_alone(failure: str) -> None:
    what, _, text = failure.partition(" ")
    after = int(text) if text.isdigit() else 0

    def is_victims_row(tokens: list[int]) -> bool:
        return tokens[0] == VICTIM and len(tokens) == len(VICTIM_PROMPT) + after

    def spoil(tokens: list[int], row: Any) -> None:
        if is_victims_row(tokens) and what == "NaN":
            row[3] = np.nan
        if is_victims_row(tokens) and what == "-inf":
            row[:] = -np.inf

    options: dict[str, Any] = {"damage": spoil}
    if what == "chain":
        options["new_chain"] = failing_chain(-1)
    elif what == "sample":
        options["new_chain"] = failing_chain(after)
    elif what == "text":
        options["tokens"] = FailingTable(VOCABULARY)
        options["script"] = lambda tokens: BAD_TOKEN if is_victims_row(tokens) else None
    desk = Desk(3, **options)
    if what == "new":

        def fail(kind: str, states: Sequence[FakeState]) -> None:
            if kind == "new" and desk.runner.n_free_slots == 1:
                raise RuntimeError("no state")

        desk.runner.fail = fail
    others = [request([number, 1], 12) for number in range(2)]
    tickets = [desk.submit(other) for other in others]
    sampling = (
        SamplingParams() if what == "text" else SamplingParams(temperature=1.0, seed=1)
    )  # only the victim has a chain
    special: dict[str, Any] = {}
    if what in ("constraint", "mask", "accept"):
        special = {"constraint": lambda: FailingConstraint(what, after), "ignore_end": False}
    victim = desk.submit(request(VICTIM_PROMPT, 12, sampling=sampling, **special))
    closed = FailingConstraint.closed
    desk.run()
    answer = desk.answer(victim)
    assert isinstance(answer.error, LogitsError if what in ("NaN", "-inf") else RuntimeError)
    if what in ("mask", "accept"):
        assert FailingConstraint.closed == closed + 1
    assert len(answer.tokens) == after
    for ticket, other in zip(tickets, others, strict=True):
        assert desk.answer(ticket).result() == alone(other).result()
    assert desk.core.stats().requests[Outcome.FAILED] == 1
    desk.runner.fail = lambda kind, states: None
    others = [request([number, 2] * CHUNK, 12) for number in range(3)]
    tickets = [desk.submit(other) for other in others]
    desk.run()
    for ticket, other in zip(tickets, others, strict=True):
        assert desk.answer(ticket).result() == alone(other).result()


@pytest.mark.parametrize("kind", ["prefill", "decode"])
@pytest.mark.parametrize("call", [1, 2, 3])
def test_a_failed_native_step_ends_the_requests_of_that_step(kind: str, call: int) -> None:
    desk = Desk(3, share=1.0)
    wanted = [request([number] * (CHUNK * (1 + number)), 6) for number in range(5)]
    tickets = [desk.submit(each) for each in wanted]
    hit: list[int] = []
    count = 0

    def fail(what: str, states: Sequence[FakeState]) -> None:
        nonlocal count
        count += what == kind
        if what == kind and count == call and not hit:
            hit.extend(desk.runner.number[id(state)] for state in states)
            raise RuntimeError("the device is gone")

    desk.runner.fail = fail
    desk.run()
    assert hit
    for index, (ticket, each) in enumerate(zip(tickets, wanted, strict=True)):
        answer = desk.answer(ticket)
        assert (answer.error is not None) == (index in hit)
        if answer.error is None:
            assert answer.result() == alone(each).result()
    assert desk.core.stats().requests[Outcome.FAILED] == len(hit)


def test_what_cannot_be_freed_is_counted() -> None:
    desk = Desk(2)
    ticket = desk.submit(request([1], 3))
    desk.step()

    def stuck() -> None:
        raise RuntimeError("stuck")

    desk.runner.live[0].free = stuck  # type: ignore[method-assign]
    while not ticket.answered:
        desk.core.step()
    desk.core.idle()
    assert desk.core.stats().invariant_violations == 2
    assert any("free slots of the runner" in violation for violation in desk.core.violations())
    other = desk.submit(request([2], 3))
    while not other.answered:
        desk.core.step()
    assert desk.answer(other).result() == alone(request([2], 3)).result()


def test_invariants_are_checked_when_idle_and_only_then_counted_once() -> None:
    desk = Desk(1)
    desk.submit(request([1], 3))
    desk.run()
    desk.runner.n_slots = 2
    desk.core.idle()
    assert desk.core.stats().invariant_violations == 0
    desk.submit(request([1], 3))
    while desk.core.step():
        pass
    for _ in range(3):
        desk.core.idle()
    assert desk.core.stats().invariant_violations == 1


def test_a_wrong_length_is_a_violation() -> None:
    desk = Desk(1)
    desk.submit(request([1] * 20, 9))
    desk.step()
    desk.runner.live[0].tokens.pop()
    assert desk.core.violations() == [f"sequence 1: expected {CHUNK} tokens in its state, found {CHUNK - 1}"]


def test_dropping_all_answers_everybody_and_frees_everything() -> None:
    desk = Desk(2)
    tickets = [desk.submit(request([number] * 20, 9)) for number in range(5)]
    for _ in range(4):
        desk.step()
    desk.core.drop_all(EngineClosedError("closed"))
    assert all(isinstance(desk.answer(ticket).error, EngineClosedError) for ticket in tickets)
    assert not desk.runner.live
    desk.core.close()
    assert desk.runner.closed
    assert desk.core.stats().activity is Activity.CLOSED


# what is shown


def test_stats_are_what_happened() -> None:
    desk = Desk(2)
    stats = desk.core.stats()
    assert (stats.activity, stats.busy_slots, stats.prompt_tokens_total) == (Activity.IDLE, 0, 0)
    long = desk.submit(request([1] * (3 * CHUNK), 5))
    desk.submit(request([2, 2], 4))
    desk.submit(request([3], 2))
    desk.step()
    slots = desk.core.stats().slots
    assert [(s.state, s.request_id, s.prompt_done, s.prompt_total, s.generated) for s in slots] == [
        (SlotState.PREFILL, long.id, CHUNK, 3 * CHUNK, 0),
        (SlotState.PREFILL, 2, 0, 2, 0),
    ]
    assert desk.core.stats().queue_length == 1
    desk.step()
    desk.step()
    second = desk.core.stats().slots[1]
    assert (second.state, second.generated) == (SlotState.DECODE, 2)
    assert second.tokens_per_second == pytest.approx(1 / desk.runner.row_s, rel=1.0)
    desk.run()
    stats = desk.core.stats()
    assert stats.prompt_tokens_total == 3 * CHUNK + 2 + 1
    assert stats.generated_tokens_total == 5 + 4 + 2
    assert stats.prefill_chunks == 5
    assert stats.decode_rows == 4 + 3 + 1
    assert stats.decode_steps == sum(kind == "decode" for kind, _ in desk.runner.log)
    assert dict(stats.requests) == {**dict.fromkeys(Outcome, 0), Outcome.LENGTH: 3}
    assert stats.memory == {"calls": len(desk.runner.calls)}
    assert stats.generated_tokens_per_second == pytest.approx(11 / (desk.clock.now - 1000.0))
    desk.clock.now += 60.0
    desk.core.idle()
    assert desk.core.stats().generated_tokens_per_second == 0.0
    assert desk.core.stats().heartbeat == desk.clock.now


def test_whoever_gets_an_event_finds_it_in_the_stats() -> None:
    desk = Desk(2, share=1.0)
    tickets = [desk.submit(request([number] * 20, 5)) for number in range(3)]
    seen = {"tokens": 0, "finished": 0}

    def watch(message: object) -> None:
        seen["tokens"] += isinstance(message, TokenEvent)
        seen["finished"] += message is None
        stats = desk.core.stats()
        assert stats.generated_tokens_total >= seen["tokens"]
        assert sum(stats.requests.values()) >= seen["finished"]
        assert stats.queue_length >= 0

    for ticket in tickets:
        ticket.on_event(watch)
    desk.run()
    assert seen == {"tokens": 15, "finished": 3}
    assert desk.core.stats().requests[Outcome.CANCELLED] == 0


def test_the_core_wants_the_runners_number_of_slots() -> None:
    with pytest.raises(ValueError, match="n_slots: expected the runner's 2, found 3"):
        type(Desk().core)(Desk(2).resources, lambda: None, n_slots=3, max_queue=1, prefill_share=0.5)
