"""Runs of the real trunk under a schedule drawn from a seed, to be compared with each request's solo run."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pyluce.engine import BatchCore, EngineStats, GenerationRequest, Resources, SamplingParams, Ticket
from pyluce.native.sampler import SamplerChain
from pyluce.spec import SpecOptions
from pyluce.spec.speculator import Speculator
from tests.support.desk import Answer, read
from tests.support.runs import open_runner, prompt_tokens

CHUNK = 128
N_CTX = 3200
VOCAB = 288
LENGTHS = (20, 33, 61, 64, 70, 128, 129, 257, 300, 520, 1030, 3000)
"""On, before and after blocks of 4 tokens, pages of 64 and chunks of 128; all but two beyond the budget of 32."""


class Bytes:
    """A token table without text: the tests here compare ids and logits."""

    def token_bytes(self, token: int) -> bytes:
        return b"."

    def is_end(self, token: int) -> bool:
        return False


def make_request(length: int, seed: int = 0, n: int = 16, **options: Any) -> GenerationRequest:
    """A prompt with an end-of-text inside the n-gram window of its last token."""
    prompt = prompt_tokens(length, 1000 * seed + length, VOCAB, 0, (length // 2, -2))
    return GenerationRequest(tuple(prompt), max_tokens=n, **{"hash_logits": True, **options})


def request_pool(lengths: Sequence[int] = LENGTHS, seed: int = 0) -> list[GenerationRequest]:
    """One request a length; every third draws its tokens, every fourth counts them, and one needs no logits."""
    made = []
    for index, length in enumerate(lengths):
        sampling = SamplingParams(temperature=1.0, seed=index, top_k=40) if index % 3 == 1 else SamplingParams()
        if index % 4 == 3:
            sampling = SamplingParams(presence_penalty=1.5, repeat_penalty=1.2)
        made.append(make_request(length, seed, n=24 + 10 * (index % 5), sampling=sampling, hash_logits=index != 5))
    return made


class Clock:
    """Time that passes by random amounts, so that the prompts' share falls differently in each run."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng
        self._now = 0.0

    def __call__(self) -> float:
        self._now += float(self._rng.random())
        return self._now


@dataclass
class Outcome:
    """What came of a run."""

    answers: list[Answer]
    stats: EngineStats
    widest_step: int = 0
    mid_block_starts: int = 0


@dataclass
class Run:
    """A core on the real trunk, stepped by the test.

    `spec`: how it speculates; `rig` is given the runner before anything runs.
    `poison`: what no sequence holds is filled with NaN whenever one leaves. `share`: the prompts' share of time, None draws it.
    """

    model: Path
    n_slots: int
    seed: int = 0
    fault: str | None = None
    poison: bool = True
    share: float | None = None
    n_ctx: int = N_CTX
    n_vocab: int = VOCAB
    spec: SpecOptions = field(default_factory=lambda: SpecOptions(width=1))
    rig: Callable[[Any], None] | None = None
    _widest: int = 0
    _mid_block: int = 0
    _messages: dict[int, list[object]] = field(default_factory=dict)

    forked = False

    def check_process(self) -> None:
        pass

    def play(self, requests: Sequence[GenerationRequest], leavers: Sequence[GenerationRequest] = ()) -> Outcome:
        """Run all `requests`, arriving at random steps in random order among `leavers`, which are cancelled at random steps."""
        rng = np.random.default_rng(self.seed)
        arrivals = [(int(rng.integers(0, 40)), wanted, None) for wanted in requests]
        arrivals += [(int(rng.integers(0, 40)), wanted, int(rng.integers(1, 30))) for wanted in leavers]
        order = sorted(range(len(arrivals)), key=lambda index: (arrivals[index][0], rng.random()))
        tickets: dict[int, Ticket] = {}
        with self._open(rng) as (core, runner):
            step, left = 0, 0
            while len(tickets) < len(arrivals) or not all(ticket.answered for ticket in tickets.values()):
                for index in order:
                    at, wanted, _ = arrivals[index]
                    if index not in tickets and at <= step:
                        tickets[index] = self._submit(core, wanted, len(tickets) + 1)
                for index, (at, _, cancel_after) in enumerate(arrivals):
                    if cancel_after is not None and index in tickets and step >= at + cancel_after:
                        tickets[index].cancel()
                core.step()
                step += 1
                assert core.violations() == []
                gone = sum(ticket.answered for ticket in tickets.values())
                if self.poison and gone != left:
                    runner.poison_free_state()
                left = gone
            core.idle()
            stats = core.stats()
            assert runner.n_free_slots == self.n_slots
            assert runner._pool.allocator.n_free == runner._pool.allocator.n_pages - 1, "a page was never given back"
        assert stats.invariant_violations == stats.busy_slots == stats.queue_length == 0
        answers = [read(self._messages[tickets[index].id]) for index in range(len(requests))]
        return Outcome(answers, stats, self._widest, self._mid_block)

    def _submit(self, core: BatchCore[Any], wanted: GenerationRequest, number: int) -> Ticket:
        ticket = Ticket(wanted, self, number, submitted_at=0.0, on_answer=core.reserve(wanted))
        self._messages[number] = []
        ticket.on_event(self._messages[number].append)
        core.admit(ticket)
        return ticket

    @contextmanager
    def _open(self, rng: np.random.Generator) -> Iterator[tuple[BatchCore[Any], Any]]:
        options: dict[str, Any] = {"n_ctx": self.n_ctx, "n_slots": self.n_slots, "chunk_tokens": CHUNK}
        options |= {"max_rollback": self.spec.max_drafts, "mtp": self.spec.enabled and "mtp" in self.spec.sources}
        with open_runner(self.model, debug_fault=self.fault, **options) as runner:
            self._watch(runner)
            if self.rig is not None:
                self.rig(runner)
            chain: Callable[[], SamplerChain] = functools.partial(SamplerChain, self.n_vocab)
            resources = Resources(runner, Bytes(), chain, self.n_ctx, CHUNK)
            drawn = float(rng.choice([0.2, 0.5, 1.0]))
            yield (
                BatchCore(
                    resources,
                    lambda: None,
                    n_slots=self.n_slots,
                    max_queue=1000,
                    prefill_share=drawn if self.share is None else self.share,
                    speculator=Speculator(self.spec, Clock(rng)) if self.spec.enabled else None,
                    clock=Clock(rng),
                ),
                runner,
            )

    def _watch(self, runner: Any) -> None:
        """Count what the test wants to have happened."""
        decode_rows, new_sequence = runner.decode_rows, runner.new_sequence
        live: list[Any] = []

        def watched_decode(rows: Any, wants_logits: Any) -> Any:
            self._widest = max(self._widest, len(rows))
            return decode_rows(rows, wants_logits)

        def watched_new_sequence() -> Any:
            live[:] = [state for state in live if state._slot is not None]
            self._mid_block += any(state.length % 4 for state in live)
            live.append(new_sequence())
            return live[-1]

        runner.decode_rows, runner.new_sequence = watched_decode, watched_new_sequence


class Alone:
    """Each request's answer from an engine of its own with one slot, computed once."""

    def __init__(self, model: Path) -> None:
        self.model = model
        self._answers: dict[tuple[object, ...], Answer] = {}

    def __call__(self, wanted: GenerationRequest, fault: str | None = None) -> Answer:
        key = (wanted.prompt, wanted.max_tokens, repr(wanted.sampling), fault)
        if key not in self._answers:
            run = Run(self.model, n_slots=1, fault=fault, poison=False)
            self._answers[key] = run.play([wanted]).answers[0]
        return self._answers[key]
