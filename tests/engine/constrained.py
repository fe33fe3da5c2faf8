"""What the tests of constrained answers share."""

from __future__ import annotations

import json
from typing import Any

from pyluce.engine import Event, FinishEvent, GenerationRequest, Resources, TokenEvent, generate
from pyluce.engine.constraint import ConstraintCompiler
from pyluce.text import Tokenizer
from tests.support.fake_runner import FakeRunner, FakeState, NumpyChain
from tests.support.fake_vocabulary import FakeVocabulary

VOCABULARY = FakeVocabulary(words=("the ", "and", '{"', '": ', "\n\n", "tr", "true", "null", '",', "12", "<tool_call>"))
TOKENIZER = Tokenizer(VOCABULARY)
COMPILER = ConstraintCompiler(TOKENIZER)
PROMPT = (104, 105, 10)

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "a": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["red", "green", None]},
        "flags": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
        "word": {"type": "string", "maxLength": 5},
    },
    "required": ["a", "kind", "flags", "word"],
    "additionalProperties": False,
}


def keeps_to_schema(text: str) -> bool:
    """`text` is JSON of SCHEMA."""
    try:
        value = json.loads(text)
    except ValueError:
        return False
    return (
        isinstance(value, dict)
        and list(value) == ["a", "kind", "flags", "word"]
        and type(value["a"]) is int
        and 0 <= value["a"] <= 99
        and value["kind"] in ("red", "green", None)
        and 1 <= len(value["flags"]) <= 3
        and all(isinstance(flag, bool) for flag in value["flags"])
        and isinstance(value["word"], str)
        and len(value["word"]) <= 5
    )


def resources(**runner: Any) -> Resources[FakeState]:
    return Resources(FakeRunner(VOCABULARY.n_tokens, **runner), TOKENIZER, NumpyChain, 2048, 64)


def run(core: Resources[FakeState] | None = None, **options: Any) -> list[Event]:
    return list(generate(core or resources(), GenerationRequest(**{"prompt": PROMPT, **options})))


def tokens_of(events: list[Event]) -> list[int]:
    return [event.token for event in events if isinstance(event, TokenEvent)]


def content_of(events: list[Event]) -> str:
    return "".join(event.content for event in events)


def reasoning_of(events: list[Event]) -> str:
    return "".join(event.reasoning for event in events)


def finish_of(events: list[Event]) -> FinishEvent:
    assert isinstance(events[-1], FinishEvent)
    return events[-1]
