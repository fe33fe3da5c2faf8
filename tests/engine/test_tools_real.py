"""Tool calls, constraints and budgets with the model that the package ships."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from pyluce.engine import ConstraintCompiler
from pyluce.luce import Completion, Luce
from pyluce.native.vocabulary import Vocabulary
from pyluce.text import Tokenizer
from pyluce.text.tools import ToolEvent, ToolStream, detect_format, join_events, read_functions
from tests.support.real_model import require_libraries
from tests.text.tools.cases import arguments_of, calls_of, text_of

QUESTION = {"role": "user", "content": "What is the weather in Paris?"}


def tool(name: str, text: str, argument: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {argument: {"type": "string"}}, "required": [argument]}
    return {"type": "function", "function": {"name": name, "description": text, "parameters": parameters}}


TOOLS = [
    tool("get_weather", "Return the current weather of a city.", "city"),
    tool("get_time", "Return the local time of a city.", "city"),
]
FUNCTIONS = read_functions(TOOLS)


@pytest.fixture(scope="module")
def luce() -> Iterator[Luce]:
    require_libraries()
    with Luce.load(threads=1, max_ctx=1024, max_concurrency=1) as luce:
        yield luce


@pytest.fixture(scope="module")
def compiler(luce: Luce) -> Iterator[ConstraintCompiler]:
    with Vocabulary(luce.info.path) as vocabulary:
        compiler = ConstraintCompiler(Tokenizer(vocabulary))
        compiler.prepare()
        yield compiler


def ask(luce: Luce, **options: Any) -> Completion:
    return luce.generate(messages=[QUESTION], tools=TOOLS, **{"max_tokens": 80, **options})


def events_of(luce: Luce, text: str) -> list[ToolEvent]:
    assert luce.template is not None
    format = detect_format(luce.template.source)
    assert format is not None
    stream = ToolStream(format, FUNCTIONS)
    return join_events([*stream.step(text), *stream.flush()])


@pytest.mark.parametrize("thinking", [True, False])
def test_the_model_calls_a_tool_and_the_next_prompt_repeats_its_tokens(luce: Luce, thinking: bool) -> None:
    done = ask(luce, thinking=thinking)
    events = events_of(luce, done.text)
    assert [name for name, _ in calls_of(events)] == ["get_weather"]
    assert text_of(events) == ""
    assert bool(done.reasoning) == thinking
    assert luce.template is not None
    format = detect_format(luce.template.source)
    assert format is not None
    arguments = format.history_arguments(arguments_of(events, 0))
    reply = {
        "role": "assistant",
        "content": "",
        "reasoning_content": done.reasoning,
        "tool_calls": [{"type": "function", "function": {"name": "get_weather", "arguments": arguments}}],
    }
    following = luce.request(messages=[QUESTION, reply, {"role": "tool", "content": "sunny"}], tools=TOOLS)
    said = (*done.prompt_tokens, *done.tokens)
    assert following.prompt[: len(said)] == said


def test_a_call_that_is_asked_for(luce: Luce, compiler: ConstraintCompiler) -> None:
    assert luce.template is not None
    format = detect_format(luce.template.source)
    assert format is not None
    narrow = {
        "type": "object",
        "properties": {"city": {"enum": ["Oslo", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    }
    only = read_functions(
        [{"type": "function", "function": {"name": "get_time", "parameters": narrow, "strict": True}}]
    )
    factory = compiler.tool_calls(format, only, many=False)
    for options in ({"thinking": False}, {"thinking_budget": 3}, {}):
        done = ask(luce, constraint=factory, **options)
        ((name, arguments),) = calls_of(events_of(luce, done.text))
        assert name == "get_time"
        assert arguments["city"] in ("Oslo", "Rome")
        assert done.finish_reason == "stop"


def test_an_answer_of_a_schema(luce: Luce, compiler: ConstraintCompiler) -> None:
    schema = {
        "type": "object",
        "properties": {"capital": {"type": "string", "maxLength": 12}, "sure": {"type": "boolean"}},
        "required": ["capital", "sure"],
        "additionalProperties": False,
    }
    factory = compiler.json_schema(schema)
    for thinking in (True, False):
        done = luce.generate("What is the capital of France?", thinking=thinking, max_tokens=120, constraint=factory)
        value = json.loads(done.text)
        assert list(value) == ["capital", "sure"]
        assert bool(done.reasoning) == thinking
    with pytest.raises(ValueError, match="."):
        json.loads(luce.generate("What is the capital of France?", thinking=False, max_tokens=120).text)
