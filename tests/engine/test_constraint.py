from __future__ import annotations

import json
import threading
from typing import Any

import numpy as np
import pytest

from pyluce.engine import (
    ConstraintError,
    FinishReason,
    GenerationRequest,
    LogitsError,
    RequestError,
    SamplingParams,
    TokenEvent,
    hash_logits,
)
from pyluce.engine.constraint import ConstraintCompiler
from pyluce.options import LoadOptions
from pyluce.text import ReasoningMarkers, Tokenizer
from pyluce.text.tools import Function, ToolStream, join_events
from pyluce.text.tools.json_calls import JsonCalls
from pyluce.text.tools.protocols import ToolFormat
from pyluce.text.tools.xml_calls import XmlCalls
from tests.engine.constrained import (
    COMPILER,
    PROMPT,
    SCHEMA,
    TOKENIZER,
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
from tests.support.fake_vocabulary import CHAT_TEMPLATE, FakeVocabulary
from tests.text.tools.cases import calls_of, text_of

THINK, END_THINK = (VOCABULARY.token(text) for text in ("<think>", "</think>"))
END = VOCABULARY.token("<|im_end|>")
MARKERS = ReasoningMarkers()
SAMPLED = SamplingParams(temperature=2.0, top_p=0.95, top_k=200, repeat_penalty=1.2, presence_penalty=0.5, seed=5)
ALL_NEEDED = {"type": "object", "properties": {"path": {"type": "string", "maxLength": 8}}, "required": ["path"]}


def prompts(count: int) -> list[tuple[int, ...]]:
    return [(*PROMPT, number) for number in range(count)]


@pytest.mark.parametrize("sampling", [SamplingParams(), SAMPLED], ids=["greedy", "sampled"])
def test_random_logits_write_the_schema(sampling: SamplingParams) -> None:
    factory = COMPILER.json_schema(SCHEMA)
    texts = set()
    for prompt in prompts(12):
        events = run(prompt=prompt, sampling=sampling, constraint=factory)
        assert keeps_to_schema(content_of(events)), content_of(events)
        assert finish_of(events).reason is FinishReason.STOP
        assert run(prompt=prompt, sampling=sampling, constraint=factory)[:-1] == events[:-1]
        texts.add(content_of(events))
    assert len(texts) == 12


def test_without_the_constraint_they_do_not() -> None:
    assert not any(keeps_to_schema(content_of(run(prompt=prompt, max_tokens=60))) for prompt in prompts(12))


def test_the_answer_ends_with_the_grammar() -> None:
    events = run(constraint=COMPILER.json_schema({"const": {"a": 1}}))
    assert json.loads(content_of(events)) == {"a": 1}
    assert tokens_of(events)[-1] == ord("}")
    assert finish_of(events).timings.completion_tokens == len(tokens_of(events))


def test_an_end_token_ends_what_could_go_on() -> None:
    answer = [ord("4"), ord("2"), END]
    core = resources(script=lambda tokens: answer[len(tokens) - len(PROMPT)])
    events = run(core, constraint=COMPILER.json_schema({"type": "integer"}))
    assert (content_of(events), tokens_of(events)) == ("42", answer)
    core = resources(script=lambda tokens: END)  # an end token where none is allowed
    events = run(core, constraint=COMPILER.json_schema({"type": "string", "minLength": 3, "maxLength": 3}))
    assert len(json.loads(content_of(events))) == 3


@pytest.mark.parametrize(
    ("language", "text"),
    [(['"red"', '"green"', "12", "true", "null"], '"green"'), (['"the and"'], '"the and"')],
    ids=["choices", "forced"],
)
def test_the_mask_is_exactly_the_prefixes_of_the_language(language: list[str], text: str) -> None:
    constraint = COMPILER.json_schema({"enum": [json.loads(whole) for whole in language]})()
    constraint.begin(b"", False)
    written = b""
    for token in text.encode():
        logits = np.zeros(VOCABULARY.n_tokens, dtype=np.float32)
        constraint.mask(logits)
        allowed = {int(index) for index in np.flatnonzero(logits == 0.0)}
        expected = {
            other
            for other in range(VOCABULARY.n_tokens)
            if (piece := TOKENIZER.token_bytes(other))
            and any(whole.encode().startswith(written + piece) for whole in language)
        }
        assert allowed == expected
        assert not constraint.is_complete
        constraint.accept(token)
        written += bytes([token])
    assert constraint.is_complete


def test_a_token_outside_the_mask_is_refused() -> None:
    constraint = COMPILER.json_object()()
    constraint.begin(b"", False)
    with pytest.raises(ConstraintError, match="not allow"):
        constraint.accept(ord("x"))


def test_logits_and_logprobs_stay_the_models_own() -> None:
    free = run(max_tokens=1, hash_logits=True, n_logprobs=3)
    bound = run(max_tokens=1, hash_logits=True, n_logprobs=3, constraint=COMPILER.json_object())
    (first,), (second,) = ([e for e in events if isinstance(e, TokenEvent)] for events in (free, bound))
    assert first.logits_sha256 == second.logits_sha256
    assert first.top_logprobs == second.top_logprobs
    assert first.logprob == first.top_logprobs[0][1]
    assert second.logprob is not None
    assert second.logprob < second.top_logprobs[-1][1]


def test_nothing_that_is_allowed_can_be_chosen() -> None:
    def damage(tokens: list[int], row: Any) -> None:
        row[:] = -np.inf
        row[ord("x")] = 0.0

    with pytest.raises(ConstraintError, match="no token"):
        run(resources(damage=damage), constraint=COMPILER.json_object())
    with pytest.raises(LogitsError):
        run(resources(damage=lambda tokens, row: row.fill(np.nan)), constraint=COMPILER.json_object())


def test_logit_bias_does_not_lift_the_mask() -> None:
    sampling = SamplingParams(logit_bias={ord("x"): 100.0})
    assert keeps_to_schema(content_of(run(sampling=sampling, constraint=COMPILER.json_schema(SCHEMA))))


def thinks(text: str, then: list[int]) -> Any:
    """A script that reasons `text`, then wants the tokens `then`; afterwards anything."""
    answer = [*text.encode(), *then]
    return lambda tokens: answer[len(tokens) - len(PROMPT)] if len(tokens) - len(PROMPT) < len(answer) else None


REASONS: dict[str, Any] = {"reasoning": MARKERS, "starts_in_reasoning": True}


@pytest.mark.parametrize("line_breaks", [[], [VOCABULARY.token("\n\n")], [10]])
def test_the_constraint_begins_behind_the_reasoning(line_breaks: list[int]) -> None:
    script = thinks('free {"text', [END_THINK, *line_breaks])
    events = run(resources(script=script), constraint=COMPILER.json_schema(SCHEMA), **REASONS)
    assert reasoning_of(events) == 'free {"text'
    assert keeps_to_schema(content_of(events))
    assert tokens_of(events)[12 : 12 + len(line_breaks)] == line_breaks
    assert finish_of(events).reasoning_tokens == 12


def test_only_one_token_of_line_breaks_is_let_through() -> None:
    script = thinks("x", [END_THINK, 10, 10, 10])
    events = run(resources(script=script), constraint=COMPILER.json_schema(SCHEMA), **REASONS)
    assert tokens_of(events)[2] == 10
    assert tokens_of(events)[3] != 10
    assert keeps_to_schema(content_of(events))


def test_the_constraint_begins_at_once_without_reasoning() -> None:
    for options in ({}, {"reasoning": MARKERS}, {"starts_in_reasoning": True}):
        events = run(resources(script=thinks("hello", [])), constraint=COMPILER.json_schema(SCHEMA), **options)
        assert keeps_to_schema(content_of(events))
        assert reasoning_of(events) == ""


def test_a_model_that_opens_its_reasoning_itself() -> None:
    options: dict[str, Any] = {"reasoning": MARKERS, "constraint": COMPILER.json_schema(SCHEMA)}
    script = thinks("", [THINK, *b"free", END_THINK, 10])
    events = run(resources(script=script), reasoning_start=THINK, **options)
    assert reasoning_of(events) == "free"
    assert keeps_to_schema(content_of(events))
    for other in (thinks("hello", []), thinks("{", [THINK] * 9)):  # it does not reason, or too late
        events = run(resources(script=other), reasoning_start=THINK, **options)
        assert reasoning_of(events) == ""
        assert keeps_to_schema(content_of(events))
    assert THINK not in tokens_of(run(resources(script=script), **options))


def test_the_front_door_knows_whether_the_answer_may_open_its_reasoning() -> None:
    assert "{{- '<think>\\n' }}" in CHAT_TEMPLATE
    open_ended = CHAT_TEMPLATE.replace("{{- '<think>\\n' }}", "")
    with fake_luce(LoadOptions(chat_template=open_ended)) as luce:
        request = luce.request("Hi")
        assert luce.detokenize([request.reasoning_start or 0]) == "<think>"
        assert luce.request("Hi", thinking=False).reasoning_start is None
        assert luce.request("Hi", chat=False).reasoning_start is None
    with fake_luce() as luce:
        assert luce.request("Hi").reasoning_start is None


def test_no_end_token_ends_the_reasoning_before_the_answer() -> None:
    script = thinks("x", [END, END, END_THINK])
    events = run(resources(script=script), constraint=COMPILER.json_schema(SCHEMA), **REASONS)
    assert END not in tokens_of(events)[:3]
    assert keeps_to_schema(content_of(events))
    assert tokens_of(run(resources(script=script), **REASONS))[:2] == [ord("x"), END]


def test_a_marker_without_a_token_of_its_own() -> None:
    vocabulary = FakeVocabulary(user_defined=(), words=(">{", '>"', ">\n", ">x"))
    tokenizer = Tokenizer(vocabulary)
    compiler = ConstraintCompiler(tokenizer)

    def answer(last: str) -> str:
        core = resources()
        script = [*b"ok</think", vocabulary.token(last)]
        core = type(core)(
            type(core.runner)(  # type: ignore[call-arg]
                vocabulary.n_tokens,
                script=lambda tokens: script[len(tokens) - 3] if len(tokens) - 3 < len(script) else None,
            ),
            tokenizer,
            core.new_chain,
            2048,
            64,
        )
        return content_of(run(core, constraint=compiler.json_schema(SCHEMA), **REASONS))

    assert keeps_to_schema(answer(">{"))
    assert keeps_to_schema(answer(">\n"))
    with pytest.raises(ConstraintError, match="began with"):
        answer(">x")


@pytest.mark.parametrize("format", [JsonCalls(), XmlCalls()], ids=["json", "xml"])
@pytest.mark.parametrize("many", [False, True])
def test_an_answer_that_must_be_a_call(format: ToolFormat, many: bool) -> None:
    functions = {
        "write": Function("write", ALL_NEEDED, strict=format.name == "json"),
        "tune": Function("tune", {"properties": {"x": {"enum": ["a", "b"]}, "n": {"type": "integer", "maximum": 9}}}),
        "odd": Function("odd", {"type": "object", "properties": {}, "additionalProperties": False}),
    }
    factory = COMPILER.tool_calls(format, functions, many=many)
    names = set()
    for prompt in prompts(10):
        events = run(prompt=prompt, constraint=factory, max_tokens=400, sampling=SAMPLED)
        if finish_of(events).reason is FinishReason.LENGTH:
            continue
        stream = ToolStream(format, functions)
        found = join_events([*stream.step(content_of(events)), *stream.flush()])
        calls = calls_of(found)
        assert text_of(found) == ""
        assert len(calls) == 1 or (many and calls)
        for name, arguments in calls:
            assert name != "write" or isinstance(arguments["path"], str)
            assert name != "tune" or arguments.get("x", "a") in ("a", "b")
        names.update(name for name, _ in calls)
    assert names


def test_a_named_function_is_the_one_that_is_called() -> None:
    functions = {"b": Function("b", {"type": "object", "additionalProperties": False})}
    for format in (JsonCalls(), XmlCalls()):
        text = content_of(run(constraint=COMPILER.tool_calls(format, functions, many=False)))
        stream = ToolStream(format, functions)
        assert calls_of(join_events([*stream.step(text), *stream.flush()])) == [("b", {})]


def test_what_cannot_be_kept_to_is_refused_before_any_work() -> None:
    for schema, keyword in (
        ({"type": "object", "properties": {"a": {"not": {}}}}, r"format\.schema\.properties\.a\.not"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "string", "format": "wibble"}, "wibble"),
        ({"$ref": "https://example.org/schema"}, "example.org"),
        ({"enum": []}, "empty"),
    ):
        with pytest.raises(RequestError, match=keyword):
            COMPILER.json_schema(schema, "format.schema")
    strict = {"f": Function("f", {"properties": {"a": {"type": "string", "pattern": "^a+$"}}}, strict=True)}
    with pytest.raises(RequestError, match="a.pattern"):
        COMPILER.tool_calls(XmlCalls(), strict)
    unsupported = {"not": {"required": ["a"]}}
    with pytest.raises(RequestError, match="not"):
        COMPILER.tool_calls(JsonCalls(), {"f": Function("f", unsupported, strict=True)})
    COMPILER.tool_calls(JsonCalls(), {"f": Function("f", unsupported)})
    with pytest.raises(RequestError, match="ignore_end"):
        GenerationRequest(PROMPT, ignore_end=True, constraint=COMPILER.json_object())
    with pytest.raises(RequestError, match="no token that ends"):
        ConstraintCompiler(Tokenizer(FakeVocabulary(controls=()))).json_object()


def test_answers_of_one_factory_are_apart_and_any_thread_may_make_them() -> None:
    factory = COMPILER.json_schema(SCHEMA)
    first = factory()
    first.begin(b"", False)
    first.accept(ord("{"))
    results: list[str] = []
    thread = threading.Thread(target=lambda: results.append(content_of(run(constraint=factory))))
    thread.start()
    thread.join()
    assert results == [content_of(run(constraint=factory))]
    logits = np.zeros(VOCABULARY.n_tokens, dtype=np.float32)
    first.mask(logits)
    assert logits[ord('"')] == 0.0


def test_the_mask_is_cheap_and_the_row_untouched() -> None:
    row = np.random.default_rng(1).standard_normal(VOCABULARY.n_tokens, dtype=np.float32)
    before = hash_logits(row)
    core = resources(damage=lambda tokens, given: given.setflags(write=False))
    assert keeps_to_schema(content_of(run(core, constraint=COMPILER.json_schema(SCHEMA))))
    assert hash_logits(row) == before
