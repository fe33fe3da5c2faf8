"""Drafts change no event of any answer, whatever ends it, and leave nothing behind: on a fake runner, whose rows are hashes of the text."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from pyluce.engine import FinishEvent, FinishReason, GenerationRequest, SamplingParams
from pyluce.engine.constraint import ConstraintCompiler
from pyluce.spec import SpecOptions
from pyluce.text import ReasoningMarkers, Tokenizer
from tests.support.desk import VOCABULARY, Desk, read

COMPILER = ConstraintCompiler(Tokenizer(VOCABULARY))
END = VOCABULARY.token("<|im_end|>")
END_THINK = VOCABULARY.token("</think>")
N_CTX = 96


def requests() -> dict[str, GenerationRequest]:
    """One for each way to end, and each thing that looks at tokens."""
    prompt = tuple(b"a prompt")
    drawn = SamplingParams(temperature=1.0, seed=11)

    def request(n: int, **options: Any) -> GenerationRequest:
        settings: dict[str, Any] = {"max_tokens": n, "ignore_end": True, "hash_logits": True, **options}
        return GenerationRequest((*prompt, len(options), n), **settings)

    return {
        "limit": request(17),
        "one token": request(1),
        "two tokens": request(2),
        "context": request(N_CTX - len(prompt) - 1),
        "drawn": request(30, sampling=drawn, n_logprobs=3),
        "penalised": request(30, sampling=SamplingParams(repeat_penalty=1.3, frequency_penalty=0.5)),
        "end token": request(60, ignore_end=False, sampling=replace(drawn, logit_bias={END: 2.0})),
        "stop string": request(60, stop=("e", "zz"), sampling=drawn),
        "thinking budget": request(
            40,
            reasoning=ReasoningMarkers(),
            starts_in_reasoning=True,
            thinking_budget=7,
            thinking_end=(10, END_THINK, 10),
        ),
        "constraint": request(
            80, ignore_end=False, constraint=COMPILER.json_schema({"enum": ["red", "green", "blue"]})
        ),
    }


class Guesser:
    """Drafts what the answer will be, wrong in one of `one_in` places."""

    def __init__(self, known: dict[tuple[int, ...], list[int]], one_in: int, seed: int) -> None:
        self.known = known
        self.one_in = one_in
        self.rng = random.Random(seed)

    def __call__(self, tokens: list[int], count: int) -> list[int]:
        prompt = next((p for p in self.known if tuple(tokens[: len(p)]) == p), ())
        answer = [*self.known.get(prompt, ()), *[5] * 16]
        at = len(tokens) - len(prompt)
        drafts = answer[at : at + count]
        return [(t + 1) % 256 if self.rng.randrange(self.one_in) == 0 else t for t in drafts]


def play(wanted: Sequence[GenerationRequest], n_slots: int, spec: SpecOptions | None, guess: Any = None) -> list[Any]:
    """The messages of every request, times left out; the desk checks the invariants after each step."""
    desk = Desk(n_slots, n_ctx=N_CTX, spec=spec, guess=guess)
    tickets = [desk.submit(request) for request in wanted]
    desk.run()
    found = []
    for ticket in tickets:
        messages = desk.messages[ticket.id]
        found.append([replace(m, timings=None) if isinstance(m, FinishEvent) else m for m in messages])  # type: ignore[arg-type]
    if spec is not None:
        stats = desk.core.stats().speculation
        assert stats is not None
        assert sum(width * count for width, count in stats.widths.items()) == desk.core.stats().decode_rows
        assert desk.core.stats().generated_tokens_total == len(wanted) + stats.accepted + sum(stats.widths.values())
    return found


@pytest.fixture(scope="module")
def without() -> dict[str, list[Any]]:
    """Every request's messages without drafts, alone."""
    return {name: play([request], 1, None)[0] for name, request in requests().items()}


def answers(without: dict[str, list[Any]]) -> dict[tuple[int, ...], list[int]]:
    return {request.prompt: read(without[name]).tokens for name, request in requests().items()}


def test_the_requests_end_as_they_are_meant_to(without: dict[str, list[Any]]) -> None:
    finish = {name: read(messages).finish for name, messages in without.items()}
    assert all(found is not None for found in finish.values())
    assert {name for name, found in finish.items() if found and found.reason is FinishReason.STOP} >= {
        "stop string",
        "constraint",
        "end token",
    }


@pytest.mark.parametrize("one_in", [1, 3, 1000], ids=["wrong", "mixed", "right"])
@pytest.mark.parametrize("width", [0, 2, 5, 8])
def test_every_event_is_as_without_drafts(without: dict[str, list[Any]], width: int, one_in: int) -> None:
    wanted = requests()
    for n_slots in (1, 4):
        guess = Guesser(answers(without), one_in, seed=width)
        found = play(list(wanted.values()), n_slots, SpecOptions(("mtp",), width), guess)
        for name, messages in zip(wanted, found, strict=True):
            assert messages == without[name], f"{name}, {n_slots} slots"


@pytest.mark.parametrize("sources", [("lookup",), ("mtp", "lookup")])
def test_lookup_too(without: dict[str, list[Any]], sources: tuple[str, ...]) -> None:
    wanted = requests()
    guess = Guesser(answers(without), 2, seed=1)
    found = play(list(wanted.values()), 3, SpecOptions(sources, 4), guess)
    assert found == [without[name] for name in wanted]


def test_lookup_drafts_what_repeats_itself() -> None:
    """A model that writes the same eight letters again and again: after two rounds nearly every draft is right."""

    def script(tokens: list[int]) -> int:
        return b"abcdefgh"[len(tokens) % 8]

    request = GenerationRequest(tuple(b"xyz"), max_tokens=80, ignore_end=True, hash_logits=True)
    desk = Desk(1, script=script, spec=SpecOptions(("lookup",), 8))
    ticket = desk.submit(request)
    desk.run()
    plain = Desk(1, script=script)
    expected = plain.submit(request)
    plain.run()
    assert desk.answer(ticket).result() == plain.answer(expected).result()
    stats = desk.core.stats()
    assert stats.speculation is not None
    assert stats.speculation.sources["lookup"].accepted[0] > 5
    assert stats.decode_steps < 25


def test_a_failing_draft_ends_the_requests_of_its_step_only() -> None:
    def guess(tokens: list[int], count: int) -> list[int]:
        if len(tokens) > 20:
            raise RuntimeError("no draft")
        return [0] * count

    desk = Desk(1, spec=SpecOptions(("mtp",), 4), guess=guess)
    first = desk.submit(GenerationRequest(tuple(b"0123456789"), max_tokens=40, ignore_end=True))
    second = desk.submit(GenerationRequest(tuple(b"01234"), max_tokens=6, ignore_end=True))
    desk.run()
    assert isinstance(desk.answer(first).error, RuntimeError)
    assert desk.answer(second).complete
