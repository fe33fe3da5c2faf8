from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pyluce.engine import (
    ContextLimitError,
    Event,
    FinishEvent,
    FinishReason,
    GenerationRequest,
    LogitsError,
    PrefillEvent,
    RequestError,
    Resources,
    SamplingParams,
    TokenEvent,
    generate,
    hash_logits,
)
from pyluce.engine.generate import chunk_bounds
from pyluce.engine.hashing import hash_steps
from pyluce.engine.protocols import Logits
from pyluce.text import ReasoningMarkers, Tokenizer
from tests.support.fake_runner import FakeRunner, FakeState, NumpyChain
from tests.support.fake_vocabulary import FakeVocabulary

VOCABULARY = FakeVocabulary()
PROMPT = (104, 105, 10, 1, 2)


def make(n_ctx: int = 64, chunk: int = 4, **runner: Any) -> Resources[FakeState]:
    return Resources(FakeRunner(VOCABULARY.n_tokens, **runner), Tokenizer(VOCABULARY), NumpyChain, n_ctx, chunk)


def says(text: str, end: str | None = "<|im_end|>", prompt: int = len(PROMPT)) -> Callable[[list[int]], int | None]:
    """A script that answers `text` byte by byte and then `end`."""
    answer: list[int] = [*text.encode()]
    if end:
        answer.append(VOCABULARY.token(end))
    return lambda tokens: answer[len(tokens) - prompt] if len(tokens) - prompt < len(answer) else ord("z")


def run(resources: Resources[FakeState], **options: Any) -> list[Event]:
    return list(generate(resources, GenerationRequest(**{"prompt": PROMPT, **options})))


def tokens_of(events: list[Event]) -> list[int]:
    return [event.token for event in events if isinstance(event, TokenEvent)]


def content_of(events: list[Event]) -> str:
    return "".join(event.content for event in events)


def finish_of(events: list[Event]) -> FinishEvent:
    assert isinstance(events[-1], FinishEvent)
    return events[-1]


def test_events_in_order() -> None:
    resources = make(script=says("hé"))
    events = run(resources)
    assert [type(event) for event in events] == [PrefillEvent] * 2 + [TokenEvent] * 4 + [FinishEvent]
    assert [(event.done, event.total) for event in events if isinstance(event, PrefillEvent)] == [(4, 5), (5, 5)]
    assert tokens_of(events) == [ord("h"), 0xC3, 0xA9, VOCABULARY.token("<|im_end|>")]
    assert [event.content for event in events] == ["", "", "h", "", "é", "", ""]
    finish = finish_of(events)
    assert (finish.reason, finish.stop_string) == (FinishReason.STOP, None)
    assert (finish.timings.prompt_tokens, finish.timings.completion_tokens) == (5, 4)
    assert isinstance(resources.runner, FakeRunner)
    assert resources.runner.calls == [("prefill:none", 4), ("prefill:last", 1), *[("decode", 1)] * 3]
    assert not resources.runner.live


def test_length_and_the_text_held_back() -> None:
    events = run(make(script=says("ab€")), max_tokens=3)
    assert (content_of(events), finish_of(events).reason) == ("ab\ufffd", FinishReason.LENGTH)


def test_end_tokens_can_be_ignored() -> None:
    events = run(make(script=says("ab")), max_tokens=5, ignore_end=True)
    assert (content_of(events), finish_of(events).reason) == ("abzz", FinishReason.LENGTH)


def test_a_stop_string_ends_the_answer_and_is_not_shown() -> None:
    events = run(make(script=says("one END two")), stop=("END", "x"))
    assert content_of(events) == "one "
    assert (finish_of(events).reason, finish_of(events).stop_string) == (FinishReason.STOP, "END")
    assert len(tokens_of(events)) == len("one END")


def test_reasoning_is_reported_apart() -> None:
    script = says("why</think>\n\nyes")
    events = run(make(script=script), reasoning=ReasoningMarkers(), starts_in_reasoning=True)
    assert ("".join(event.reasoning for event in events), content_of(events)) == ("why", "yes")
    assert content_of(run(make(script=script))) == "why</think>\n\nyes"


def test_hashes_are_those_of_the_rows() -> None:
    resources = make()
    events = run(resources, max_tokens=6, hash_logits=True)
    runner = FakeRunner(VOCABULARY.n_tokens)
    state = runner.new_sequence()
    row = runner.prefill(state, PROMPT)
    digests = []
    for event in events:
        if isinstance(event, TokenEvent):
            assert row is not None
            digests.append(hash_logits(row))
            assert event.logits_sha256 == digests[-1]
            row = runner.decode([(state, event.token)])[0]
    assert len(digests) == 6
    assert finish_of(events).logits_sha256 == hash_steps(digests)
    assert finish_of(run(make(), max_tokens=2)).logits_sha256 is None


@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 100])
def test_the_chunk_grid_does_not_change_the_answer(chunk: int) -> None:
    solo = tokens_of(run(make(chunk=4), max_tokens=8))
    assert tokens_of(run(make(chunk=chunk), max_tokens=8)) == solo


def test_chunk_bounds() -> None:
    assert chunk_bounds(10, 4) == [(0, 4), (4, 8), (8, 10)]
    assert chunk_bounds(8, 4) == [(0, 4), (4, 8)]
    assert chunk_bounds(3, 4) == [(0, 3)]
    assert chunk_bounds(10, 4, cuts=(0, 3, 8, 10, 99)) == [(0, 3), (3, 4), (4, 8), (8, 10)]


def test_the_same_seed_draws_the_same_tokens() -> None:
    def drawn(seed: int | None) -> list[int]:
        return tokens_of(run(make(), max_tokens=12, sampling=SamplingParams(temperature=2.0, seed=seed)))

    assert drawn(5) == drawn(5)
    assert drawn(5) != drawn(6)
    assert drawn(None) != drawn(None)


def test_context_limits() -> None:
    assert finish_of(run(make(n_ctx=8))).timings.completion_tokens == 4
    assert len(tokens_of(run(make(n_ctx=8), max_tokens=4))) == 4
    resources = make(n_ctx=8)
    with pytest.raises(ContextLimitError, match="5 prompt tokens leave room for 4 in the context of 8, found 5"):
        run(resources, max_tokens=5)
    with pytest.raises(ContextLimitError, match="5 tokens do not fit into the context of 4"):
        run(make(n_ctx=4))
    assert len(tokens_of(run(make(n_ctx=5)))) == 1
    assert isinstance(resources.runner, FakeRunner)
    assert resources.runner.calls == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt": ()}, "prompt: expected at least one token"),
        ({"max_tokens": 0}, "max_tokens: expected at least 1, found 0"),
        ({"max_tokens": 1.5}, "max_tokens: expected an integer"),
        ({"stop": ("",)}, r"stop\[0\]"),
        ({"stop": tuple("abcdefghijklmnopq")}, "at most 16 strings, found 17"),
        ({"prompt": (1, 5000)}, "prompt: expected token ids from 0 to"),
        ({"prompt": (-1,)}, "prompt: expected token ids from 0 to"),
    ],
)
def test_bad_requests_are_refused_before_any_work(options: dict[str, Any], message: str) -> None:
    resources = make()
    with pytest.raises(RequestError, match=message):
        run(resources, **options)
    assert isinstance(resources.runner, FakeRunner)
    assert resources.runner.calls == []


def test_nan_logits_end_the_request_and_free_its_state() -> None:
    def spoil(tokens: list[int], row: Logits) -> None:
        if len(tokens) == len(PROMPT) + 2:
            row[3] = np.nan

    resources = make(damage=spoil)
    with pytest.raises(LogitsError, match="step 2: 1 of"):
        run(resources)
    assert isinstance(resources.runner, FakeRunner)
    assert not resources.runner.live


@pytest.mark.parametrize("after", [1, 2, 3, 5])
def test_closing_between_any_two_events_frees_the_state(after: int) -> None:
    chains: list[NumpyChain] = []

    def new_chain() -> NumpyChain:
        chains.append(NumpyChain())
        return chains[-1]

    runner = FakeRunner(VOCABULARY.n_tokens)
    resources = Resources(runner, Tokenizer(VOCABULARY), new_chain, 64, 4)
    events = generate(resources, GenerationRequest(PROMPT, sampling=SamplingParams(temperature=1.0)))
    for _ in range(after):
        next(events)
    events.close()
    assert not runner.live
    assert [chain.closed for chain in chains] == [True]
