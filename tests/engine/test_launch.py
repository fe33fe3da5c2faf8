"""A runner that says when it launches: events go out while its device computes, not while the engine gets the next step ready."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tests.support import desk as desk_module
from tests.support.desk import CHUNK, Desk, DeskRunner, alone, request

PROMPTS = ([1, 2, 3], [4] * (2 * CHUNK + 3), [5, 6])


class LaunchingRunner(DeskRunner):
    """Reports its launches, once a call. `ready` is called before, `launched` after the report."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.on_launch: Callable[[], object] | None = None
        self.ready: Callable[[], None] = lambda: None
        self.launched: Callable[[], None] = lambda: None

    def _launch(self) -> None:
        self.ready()
        assert self.on_launch is not None
        self.on_launch()
        self.launched()

    def prefill(self, state: Any, tokens: Sequence[int], *arguments: Any, **options: Any) -> Any:
        self._launch()
        return super().prefill(state, tokens, *arguments, **options)

    def decode(self, rows: Sequence[Any]) -> Any:
        self._launch()
        return super().decode(rows)


@pytest.fixture
def desk(monkeypatch: pytest.MonkeyPatch) -> Desk:
    monkeypatch.setattr(desk_module, "DeskRunner", LaunchingRunner)
    return Desk(2)


def arrived(desk: Desk) -> int:
    return sum(len(messages) for messages in desk.messages.values())


def test_events_go_out_at_launches_and_when_nobody_is_left(desk: Desk) -> None:
    runner: Any = desk.runner
    marks: list[tuple[str, int]] = []
    runner.ready = lambda: marks.append(("ready", arrived(desk)))
    runner.launched = lambda: marks.append(("launched", arrived(desk)))
    for prompt in PROMPTS:
        desk.submit(request(prompt, 5))
    steps = 0
    while desk.step():
        steps += 1
        last = marks[-1]
        assert last[0] == "launched"
        if desk.core.stats().busy_slots:
            assert arrived(desk) == last[1]  # nothing between a launch and the next one
    assert steps > 5
    at_ready = [count for kind, count in marks if kind == "ready"]
    at_launch = [count for kind, count in marks if kind == "launched"]
    assert at_ready[1:] == at_launch[:-1]
    assert all(b > a for a, b in zip(at_launch, at_launch[1:], strict=False))
    assert all(ticket.answered for ticket in desk.tickets)


def test_answers_are_the_same_as_alone(desk: Desk) -> None:
    wanted = [request(prompt, 7) for prompt in PROMPTS]
    tickets = [desk.submit(one) for one in wanted]
    desk.run()
    for ticket, one in zip(tickets, wanted, strict=True):
        assert desk.answer(ticket).result() == alone(one).result()


def test_what_is_delivered_is_in_the_stats(desk: Desk) -> None:
    runner: Any = desk.runner
    runner.launched = lambda: checks.append(
        (desk.core.stats().generated_tokens_total, sum(desk.answer_so_far(t).tokens for t in desk.tickets))
    )
    checks: list[tuple[int, int]] = []
    for prompt in PROMPTS:
        desk.submit(request(prompt, 5))
    desk.run()
    assert checks
    assert all(counted == delivered for counted, delivered in checks)


def test_a_step_that_fails_before_its_launch_loses_no_event(desk: Desk) -> None:
    runner: Any = desk.runner
    first, second = desk.submit(request(PROMPTS[0], 5)), desk.submit(request(PROMPTS[2], 5))
    while not desk.answer_so_far(second).tokens:
        desk.step()

    def broken() -> None:
        raise RuntimeError("no inputs")

    runner.ready = broken
    desk.step()
    runner.ready = lambda: None
    desk.run()
    for ticket in (first, second):
        answer = desk.answer(ticket)
        assert isinstance(answer.error, RuntimeError)
        assert answer.tokens == alone(ticket.request).tokens[: len(answer.tokens)]
        assert answer.tokens


def test_pausing_delivers(desk: Desk) -> None:
    ticket = desk.submit(request(PROMPTS[0], 5))
    desk.step()
    desk.step()
    before = desk.answer_so_far(ticket).tokens
    desk.core.pause()
    assert desk.answer_so_far(ticket).tokens > before
    desk.run()
