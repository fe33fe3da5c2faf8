"""A `BatchCore` on the test's own thread: submit, step, look. Time is a clock that only the fake runner moves."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from pyluce.engine import (
    BatchCore,
    FinishEvent,
    GenerationRequest,
    PrefillEvent,
    Resources,
    Ticket,
    TokenEvent,
    generate,
)
from pyluce.engine.protocols import Logits, TokenTable
from pyluce.spec import SpecOptions
from pyluce.spec.speculator import Speculator
from pyluce.text import Tokenizer
from tests.support.fake_runner import FakeRunner, FakeState, NumpyChain
from tests.support.fake_vocabulary import FakeVocabulary

VOCABULARY = FakeVocabulary()
CHUNK = 8
N_CTX = 96


class Clock:
    """Seconds that pass when somebody says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class DeskRunner(FakeRunner):
    """Keeps a log of its calls, lets time pass, and fails when it is told to.

    `fail(kind, states)` may raise, `kind` being "new", "prefill" or "decode". `leak` lets rows of one step see each other.
    """

    chunk_s = 1.0
    row_s = 0.1

    def __init__(self, clock: Clock, n_slots: int, *, leak: bool = False, **options: Any) -> None:
        super().__init__(VOCABULARY.n_tokens, n_slots=n_slots, **options)
        self.log: list[tuple[str, tuple[int, ...]]] = []
        self.fail: Callable[[str, Sequence[FakeState]], None] = lambda kind, states: None
        self._clock = clock
        self._leak = leak
        self._numbers = itertools.count()
        self.number: dict[int, int] = {}

    def new_sequence(self) -> FakeState:
        self.fail("new", ())
        state = super().new_sequence()
        self.number[id(state)] = next(self._numbers)
        return state

    def prefill(
        self,
        state: FakeState,
        tokens: Sequence[int],
        want: Literal["last", "all", "none"] = "last",
        cuts: Sequence[int] | None = None,
    ) -> Logits | None:
        self.log.append(("prefill", (self.number[id(state)],)))
        self._clock.now += self.chunk_s
        self.fail("prefill", (state,))
        return super().prefill(state, tokens, want, cuts)

    def decode(self, rows: Sequence[tuple[FakeState, int]]) -> Logits:
        states = [state for state, _ in rows]
        groups = [state for state, _ in itertools.groupby(states, key=lambda state: self.number[id(state)])]
        assert len(set(groups)) == len(groups), "rows of one sequence do not stand together"
        self.log.append(("decode", tuple(self.number[id(state)] for state in states)))
        self._clock.now += self.row_s
        self.fail("decode", states)
        logits = super().decode(rows)
        if self._leak and len(rows) > 1:
            logits[:, 0] += np.float32(1e-6)
            logits = np.nextafter(logits, np.float32(np.inf))
        return logits


@dataclass
class Answer:
    """What a ticket got, read off its messages; `error` is what ended it otherwise."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    prompt_done: list[int] = field(default_factory=list)
    finish: FinishEvent | None = None
    error: BaseException | None = None

    @property
    def complete(self) -> bool:
        return self.finish is not None and self.error is None

    def result(self) -> tuple[object, ...]:
        """Everything about a finished answer that must not depend on others."""
        assert self.finish is not None
        return self.tokens, self.text, self.prompt_done, self.finish.reason, self.finish.logits_sha256


def read(messages: Sequence[object]) -> Answer:
    """Check the grammar of a whole answer: chunks, tokens, one finish, the end; an error may cut it short anywhere but after the finish."""
    answer = Answer()
    for index, message in enumerate(messages):
        last = index == len(messages) - 1
        if message is None or isinstance(message, BaseException):
            assert last, "something came after the end"
            assert (message is None) == (answer.finish is not None)
            answer.error = message
            continue
        assert answer.finish is None, "an event came after the finish"
        assert not last, "the answer has no end"
        assert isinstance(message, (PrefillEvent, TokenEvent, FinishEvent))
        answer.text += message.content
        if isinstance(message, PrefillEvent):
            assert not answer.tokens
            answer.prompt_done.append(message.done)
        elif isinstance(message, TokenEvent):
            assert message.index == len(answer.tokens)
            answer.tokens.append(message.token)
        else:
            answer.finish = message
    return answer


@dataclass
class Progress:
    """What has arrived of an answer."""

    messages: list[object]

    @property
    def chunks(self) -> int:
        return sum(isinstance(message, PrefillEvent) for message in self.messages)

    @property
    def tokens(self) -> int:
        return sum(isinstance(message, TokenEvent) for message in self.messages)


class Desk:
    """One core, its runner and every ticket that was ever submitted. Invariants are checked after each step."""

    def __init__(
        self,
        n_slots: int = 4,
        *,
        max_queue: int = 1000,
        share: float = 0.5,
        tokens: TokenTable | None = None,
        new_chain: Callable[[], Any] = NumpyChain,
        n_ctx: int = N_CTX,
        spec: SpecOptions | None = None,
        **runner: Any,
    ) -> None:
        self.clock = Clock()
        self.runner = DeskRunner(self.clock, n_slots, **runner)
        self.resources = Resources(self.runner, tokens or Tokenizer(VOCABULARY), new_chain, n_ctx, CHUNK)
        self.core = BatchCore(
            self.resources,
            self.runner.close,
            n_slots=n_slots,
            max_queue=max_queue,
            prefill_share=share,
            speculator=Speculator(spec, self.clock) if spec is not None else None,
            clock=self.clock,
        )
        self.tickets: list[Ticket] = []
        self.messages: dict[int, list[object]] = {}
        self.steps = 0

    forked = False

    def check_process(self) -> None:
        pass

    def submit(self, request: GenerationRequest) -> Ticket:
        """As `Engine.submit` does it."""
        give_back = self.core.reserve(request)
        number = len(self.tickets) + 1
        ticket = Ticket(request, self, number, submitted_at=self.clock(), on_answer=give_back)
        self.tickets.append(ticket)
        self.messages[number] = []
        ticket.on_event(self.messages[number].append)
        self.core.admit(ticket)
        return ticket

    def step(self) -> bool:
        busy = self.core.step()
        self.steps += 1
        assert self.core.violations() == []
        return busy

    def run(self, limit: int = 100_000) -> None:
        """Step until nobody is left; then everything is free and everybody answered."""
        for _ in range(limit):
            if not self.step():
                break
        else:
            raise AssertionError(f"still busy after {limit} steps")
        self.core.idle()
        stats = self.core.stats()
        assert not self.runner.live
        assert stats.busy_slots == stats.queue_length == stats.invariant_violations == 0
        assert sum(stats.requests.values()) == len(self.tickets)
        assert all(ticket.answered for ticket in self.tickets)

    def answer_so_far(self, ticket: Ticket) -> Progress:
        """A live view of what a ticket got."""
        return Progress(self.messages[ticket.id])

    def answer(self, ticket: Ticket) -> Answer:
        return read(self.messages[ticket.id])


def request(prompt: Sequence[int], max_tokens: int | None = 8, **options: Any) -> GenerationRequest:
    """A request that is compared by its logits."""
    options = {"ignore_end": True, "hash_logits": True, **options}
    return GenerationRequest(tuple(prompt), max_tokens=max_tokens, **options)


def alone(request: GenerationRequest, n_ctx: int = N_CTX, **runner: Any) -> Answer:
    """The request by itself, by the plain loop on a fresh runner with one slot."""
    fake = FakeRunner(VOCABULARY.n_tokens, **runner)
    resources = Resources(fake, Tokenizer(VOCABULARY), NumpyChain, n_ctx, CHUNK)
    return read([*generate(resources, request), None])
