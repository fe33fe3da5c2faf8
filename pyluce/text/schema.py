"""JSON schemas as grammars that tokens can be checked against (`pyluce.engine.constraint`).

Properties come in the order in which the schema lists them. Wherever JSON allows white space there may be none, one space, or a line break
with an indentation: the usual spellings, and no way to fill an answer with nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Final

from llguidance import LLMatcher

MAX_DEPTH: Final = 64
MAX_NODES: Final = 5000
MAX_INDENT: Final = {" ": 48, "\t": 16}

_PLAIN_KEYWORDS: Final = frozenset(
    {
        *("type", "enum", "const", "required", "$ref", "$id", "$schema"),
        *("minLength", "maxLength", "pattern", "format"),
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
        *("minItems", "maxItems", "minProperties", "maxProperties"),
    }
)
ANNOTATIONS: Final = frozenset(
    {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment"}
)
DEFINITIONS: Final = ("$defs", "definitions")
_ONE_SCHEMA: Final = frozenset({"items", "additionalItems", "additionalProperties"})
_SCHEMA_LISTS: Final = frozenset({"prefixItems", "anyOf", "oneOf", "allOf"})
_SCHEMA_MAPS: Final = frozenset({"properties", "patternProperties", *DEFINITIONS})
KEYWORDS: Final = _PLAIN_KEYWORDS | ANNOTATIONS | _ONE_SCHEMA | _SCHEMA_LISTS | _SCHEMA_MAPS
"""What a schema may hold; anything else is refused, since an answer would not keep to it."""

_HEADER: Final = '%llguidance {"no_forcing": true}'
_INDENTS: Final = "".join(f"|\r?\n{character}{{0,{count}}}" for character, count in MAX_INDENT.items())
_SPELLING: Final = {"whitespace_pattern": f"( {_INDENTS})"}


class SchemaError(ValueError):
    """A schema that answers cannot be kept to; the message names the place and the keyword."""


def schema_rule(schema: Any, field: str) -> str:
    """A JSON value of this schema, for the right side of a grammar's rule. `field`: what the caller calls the schema, for messages.

    Raises SchemaError.
    """
    if not isinstance(schema, Mapping):
        raise SchemaError(f"{field}: expected a JSON schema, an object, found {type(schema).__name__}")
    cleaned = _Cleaner().clean(schema, field, 1)
    text = json.dumps({**cleaned, "x-guidance": _SPELLING})
    failure = LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(text))
    if failure:
        raise SchemaError(f"{field}: cannot be kept to: {_first_line(failure)}")
    return f"%json {text}"


def schema_grammar(schema: Any, field: str) -> str:
    """A grammar of the JSON values of a schema. Raises SchemaError."""
    return grammar([f"start: {schema_rule(schema, field)}"], field)


def object_grammar() -> str:
    """A grammar of all JSON objects."""
    return schema_grammar({"type": "object"}, "object")


def grammar(rules: list[str], field: str) -> str:
    """A whole grammar from its rules. Raises SchemaError when it cannot be compiled."""
    text = "\n".join([_HEADER, *rules, ""])
    failure = LLMatcher.validate_grammar(LLMatcher.grammar_from_lark(text))
    if failure:
        raise SchemaError(f"{field}: cannot be kept to: {_first_line(failure)}")
    return text


class _Cleaner:
    """Checks every keyword of a schema and copies it without annotations."""

    def __init__(self) -> None:
        self._nodes = 0

    def clean(self, schema: Any, where: str, depth: int) -> Any:
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, Mapping):
            raise SchemaError(f"{where}: expected a JSON schema, found {type(schema).__name__}")
        self._nodes += 1
        if depth > MAX_DEPTH:
            raise SchemaError(f"{where}: expected at most {MAX_DEPTH} schemas inside each other")
        if self._nodes > MAX_NODES:
            raise SchemaError(f"{where}: expected at most {MAX_NODES} schemas in all")
        return {
            keyword: self._clean_keyword(keyword, value, f"{where}.{keyword}", depth)
            for keyword, value in schema.items()
            if keyword not in ANNOTATIONS and (keyword, value) != ("uniqueItems", False)
        }

    def _clean_keyword(self, keyword: str, value: Any, where: str, depth: int) -> Any:
        def clean(schema: Any, place: str) -> Any:
            return self.clean(schema, place, depth + 1)

        if keyword in _SCHEMA_MAPS:
            return _each(value, where, clean)
        if keyword in _SCHEMA_LISTS or (keyword == "items" and isinstance(value, list)):
            if not isinstance(value, list):
                raise SchemaError(f"{where}: expected a list of schemas, found {type(value).__name__}")
            return [clean(item, f"{where}[{index}]") for index, item in enumerate(value)]
        if keyword in _ONE_SCHEMA:
            return clean(value, where)
        if keyword not in _PLAIN_KEYWORDS:
            raise SchemaError(f"{where}: the keyword {keyword!r} is not supported in a schema")
        self._check_size(value, where, depth)
        return value

    def _check_size(self, value: Any, where: str, depth: int) -> None:
        pending = [(value, depth)]
        while pending:
            item, level = pending.pop()
            if level > MAX_DEPTH:
                raise SchemaError(f"{where}: expected at most {MAX_DEPTH} values inside each other")
            self._nodes += 1
            if self._nodes > MAX_NODES:
                raise SchemaError(f"{where}: expected at most {MAX_NODES} schemas and values in all")
            children = item.values() if isinstance(item, Mapping) else item if isinstance(item, list) else ()
            pending += [(child, level + 1) for child in children]


def _each(value: Any, where: str, clean: Callable[[Any, str], Any]) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise SchemaError(f"{where}: expected an object of schemas, found {type(value).__name__}")
    return {name: clean(schema, f"{where}.{name}") for name, schema in value.items()}


def _first_line(text: str) -> str:
    """The compiler's own sentence, without the listing of the grammar below it."""
    return " ".join(text.split("\n   1 |")[0].split())
