from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pyluce.engine import ContextLimitError, FinishReason, GenerationRequest, RequestError, SamplingParams
from pyluce.engine.thinking import LARGEST_ANSWER_ROOM, reasoning_limit
from pyluce.text import ReasoningMarkers
from tests.engine.constrained import (
    COMPILER,
    PROMPT,
    SCHEMA,
    VOCABULARY,
    content_of,
    finish_of,
    keeps_to_schema,
    reasoning_of,
    resources,
    run,
    tokens_of,
)
from tests.support.fake_luce import fake_luce

END_THINK = VOCABULARY.token("</think>")
END = VOCABULARY.token("<|im_end|>")
THINKING_END = (10, END_THINK, VOCABULARY.token("\n\n"))
REASONS: dict[str, Any] = {
    "reasoning": ReasoningMarkers(),
    "starts_in_reasoning": True,
    "thinking_end": THINKING_END,
}


def endless(tokens: list[int]) -> int:
    """A model that reasons on and on, and answers `ok` once it is behind the reasoning."""
    answer = tokens[len(PROMPT) :]
    if END_THINK not in answer:
        return ord("t")
    said = bytes(answer[answer.index(END_THINK) + 2 :])
    return END if said == b"ok" else b"ok"[len(said)]


def thinks(count: int) -> Callable[[list[int]], int]:
    """A model that ends its reasoning by itself after `count` tokens."""
    return lambda tokens: END_THINK if len(tokens) - len(PROMPT) == count else endless(tokens)


@pytest.mark.parametrize("budget", [0, 1, 5])
def test_the_reasoning_ends_at_the_budget_and_the_answer_follows(budget: int) -> None:
    events = run(resources(script=endless), thinking_budget=budget, **REASONS)
    assert tokens_of(events) == [ord("t")] * budget + [*THINKING_END, *b"ok", END]
    assert (reasoning_of(events), content_of(events)) == ("t" * budget, "ok")
    assert finish_of(events).reason is FinishReason.STOP
    assert finish_of(events).reasoning_tokens == budget + 2  # a line break and the marker


def test_reasoning_that_ends_by_itself_is_left_alone() -> None:
    script = thinks(4)
    free = run(resources(script=script), hash_logits=True, max_tokens=20, **REASONS)
    bound = run(resources(script=script), hash_logits=True, max_tokens=20, thinking_budget=5, **REASONS)
    assert tokens_of(bound) == tokens_of(free)
    assert finish_of(bound).logits_sha256 == finish_of(free).logits_sha256
    cut = run(resources(script=script), max_tokens=20, thinking_budget=3, **REASONS)
    assert tokens_of(cut)[:6] == [ord("t")] * 3 + [*THINKING_END]


def test_without_a_budget_the_reasoning_takes_everything() -> None:
    events = run(resources(script=endless), max_tokens=12, **REASONS)
    assert (reasoning_of(events), content_of(events)) == ("t" * 12, "")
    assert finish_of(events).reason is FinishReason.LENGTH
    assert finish_of(events).reasoning_tokens == 12


@pytest.mark.parametrize("max_tokens", [4, 5, 8, 12, 40])
def test_max_tokens_keeps_room_for_an_answer(max_tokens: int) -> None:
    events = run(resources(script=endless), max_tokens=max_tokens, thinking_budget=1000, **REASONS)
    room = max(1, max_tokens // 4)
    assert reasoning_of(events) == "t" * (max_tokens - 3 - room)
    assert content_of(events) == "ok"[:room]
    wanted = FinishReason.STOP if room > 2 else FinishReason.LENGTH
    assert finish_of(events).reason is wanted
    assert len(tokens_of(events)) <= max_tokens


def test_the_rule() -> None:
    assert reasoning_limit(None, 100, 3) is None
    assert reasoning_limit(10, 100, 3) == 10
    assert reasoning_limit(1000, 100, 3) == 72
    assert reasoning_limit(10**6, 10**6, 3) == 10**6 - 3 - LARGEST_ANSWER_ROOM
    assert reasoning_limit(5, 4, 3) == 0


def test_the_context_counts_as_max_tokens() -> None:
    core = resources(script=endless)
    core = type(core)(core.runner, core.tokens, core.new_chain, len(PROMPT) + 11, 64)
    events = run(core, thinking_budget=1000, **REASONS)
    assert content_of(events) == "ok"
    assert len(reasoning_of(events)) == 12 - 3 - 3


def test_given_tokens_are_rows_like_any_other() -> None:
    """The rows behind the given tokens are those of a text in which the model had written them itself."""
    options = {"hash_logits": True, "n_logprobs": 1, "max_tokens": 24, **REASONS}
    given = run(resources(), thinking_budget=6, **options)
    script = dict(enumerate(tokens_of(given)))
    written = run(resources(script=lambda tokens: script[len(tokens) - len(PROMPT)]), **options)
    assert tokens_of(written) == tokens_of(given)
    core = resources()
    state = core.runner.new_sequence()
    core.runner.prefill(state, PROMPT, want="none")
    core.runner.decode([(state, token) for token in tokens_of(given)[:-1]])
    assert state.tokens == [*PROMPT, *tokens_of(given)[:-1]]


def test_penalties_count_given_tokens() -> None:
    """A penalty on everything said makes the greedy choice avoid the given tokens as well."""

    sampling = SamplingParams(presence_penalty=2.0)
    options = {"thinking_budget": 0, "max_tokens": 20, "sampling": sampling, **REASONS}

    def damage(tokens: list[int], row: Any) -> None:
        row[:] = -50.0
        if END_THINK in tokens:
            row[VOCABULARY.token("\n\n")] = 1.0
        row[ord("z")] = 0.0

    chosen = tokens_of(run(resources(damage=damage), **options))
    after = chosen.index(END_THINK) + 2
    assert chosen[after - 1] == VOCABULARY.token("\n\n")
    assert chosen[after] == ord("z")


def test_a_model_that_opens_its_reasoning_itself() -> None:
    start = VOCABULARY.token("<think>")

    def script(tokens: list[int]) -> int:
        return start if len(tokens) == len(PROMPT) else endless(tokens)

    events = run(resources(script=script), thinking_budget=3, **{**REASONS, "starts_in_reasoning": False})
    assert tokens_of(events) == [start, *b"ttt", *THINKING_END, *b"ok", END]
    assert (reasoning_of(events), content_of(events)) == ("ttt", "ok")


def test_an_answer_without_reasoning_is_left_alone() -> None:
    script = thinks(10**6)
    events = run(resources(script=script), max_tokens=9, thinking_budget=3, **{**REASONS, "starts_in_reasoning": False})
    assert content_of(events) == "t" * 9


def test_a_budget_and_a_schema() -> None:
    def script(tokens: list[int]) -> int:
        return 10 if END_THINK in tokens[:-1] else ord("t")  # wants another line break behind those that were given

    events = run(
        resources(script=script),
        thinking_budget=7,
        constraint=COMPILER.json_schema(SCHEMA),
        **REASONS,
    )
    assert tokens_of(events)[7:10] == list(THINKING_END)
    assert tokens_of(events)[10] != 10
    assert reasoning_of(events) == "t" * 7
    assert keeps_to_schema(content_of(events))


def test_a_stop_string_behind_the_reasoning() -> None:
    events = run(resources(script=endless), thinking_budget=2, stop=("k", "t"), **REASONS)
    assert (reasoning_of(events), content_of(events)) == ("tt", "o")
    assert finish_of(events).stop_string == "k"


def test_refusals() -> None:
    for bad in (-1, True, 1.5, "3"):
        with pytest.raises(RequestError, match="thinking_budget"):
            GenerationRequest(PROMPT, thinking_budget=bad, **REASONS)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="may reason"):
        GenerationRequest(PROMPT, thinking_budget=3)
    with pytest.raises(RequestError, match="thinking_end"):
        GenerationRequest(PROMPT, thinking_budget=3, reasoning=ReasoningMarkers())
    with pytest.raises(ContextLimitError, match="room for 3"):
        run(max_tokens=3, thinking_budget=1, **REASONS)
    run(max_tokens=3, thinking_budget=1, **{**REASONS, "starts_in_reasoning": False})


def test_the_front_door_knows_the_tokens_that_end_the_reasoning() -> None:
    with fake_luce() as luce:
        request = luce.request("Hi", thinking_budget=4, max_tokens=40)
        assert luce.detokenize(request.thinking_end) == "\n</think>\n\n"
        done = luce.generate("Hi", thinking_budget=4, max_tokens=40)
        assert list(done.tokens[4 : 4 + len(request.thinking_end)]) == list(request.thinking_end)
        with pytest.raises(RequestError, match="thinking_budget"):
            luce.request("Hi", chat=False, thinking_budget=4)
        assert luce.request("Hi", thinking=False, thinking_budget=4).starts_in_reasoning is False


def test_tokens_outside_the_vocabulary_are_refused() -> None:
    for name, tokens in (("thinking_end", {"thinking_end": (1, 10**6)}), ("reasoning_start", {"reasoning_start": -1})):
        with pytest.raises(RequestError, match=f"{name}: expected token ids"):
            run(thinking_budget=3, max_tokens=9, **{**REASONS, **tokens})
