from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from pyluce.text.schema import MAX_DEPTH, MAX_INDENT, MAX_NODES, SchemaError, object_grammar, schema_grammar


class ByteTokens:
    """A vocabulary of single bytes and an end token, as llguidance reads it."""

    is_tokenizer_wrapper = True
    bos_token_id = None
    eos_token_id = 256
    special_token_ids = (256,)
    tokens = (*(bytes([value]) for value in range(256)), b"\xff<end>")

    def __call__(self, text: str) -> list[int]:
        raise AssertionError("a grammar asked for tokens")


TOKENIZER = LLTokenizer(ByteTokens(), slices=[])  # type: ignore[arg-type]


def allows(grammar: str, text: str) -> bool:
    """`text` is a whole text of the grammar."""
    matcher = LLMatcher(TOKENIZER, LLMatcher.grammar_from_lark(grammar), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return all(matcher.consume_token(byte) for byte in text.encode()) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "integer", "minimum": 3}, ["3", "40"], ["2", "-3", "3.5", '"3"']),
        ({"type": "string", "pattern": "^a+b?$"}, ['"aab"', '"a"'], ['"b"', '""']),
        ({"type": "string", "format": "date"}, ['"2026-10-11"'], ['"tomorrow"', '"2026-10-1"']),
        ({"enum": ["x", 1, None]}, ['"x"', "1", "null"], ['"y"', "2"]),
        ({"anyOf": [{"type": "null"}, {"type": "boolean"}]}, ["null", "true"], ["1"]),
        ({"type": "array", "items": {"type": "integer"}, "maxItems": 2}, ["[]", "[1, 2]"], ["[1,2,3]", '["1"]']),
        ({"type": "array", "uniqueItems": False}, ["[1,1]"], ["{}"]),
        (
            {"$ref": "#/$defs/n", "$defs": {"n": {"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}}}},
            ["{}", '{"n": {"n": {}}}'],
            ['{"n": 1}'],
        ),
        (
            {
                "type": "object",
                "title": "T",
                "description": 'a // comment, %json { and a " quote',
                "properties": {"a": {"type": "integer", "default": 1}, "b": {"type": "string"}},
                "required": ["b"],
                "additionalProperties": False,
            },
            ['{"a": 1, "b": "x"}', '{\n\t"b":"\\u001f\\n"\n}', '{"b":"é😀"}'],
            ['{"a": 1}', '{"b": "x", "a": 1}', '{"b": "x", "c": 1}', '{"b": "\n"}'],
        ),
    ],
)
def test_grammars_allow_the_schema_and_nothing_else(schema: dict[str, Any], good: list[str], bad: list[str]) -> None:
    grammar = schema_grammar(schema, "schema")
    assert [text for text in good if not allows(grammar, text)] == []
    assert [text for text in bad if allows(grammar, text)] == []


def test_any_object() -> None:
    grammar = object_grammar()
    assert allows(grammar, '{"a": [1, {"b": null}]}')
    assert not allows(grammar, "[1]")


def test_white_space_is_bounded() -> None:
    grammar = object_grammar()
    for value in ({"a": [1, {"b": {}}]}, {}):
        for spelling in (
            {},
            {"indent": 4},
            {"indent": "\t"},
            {"separators": (",", ":")},
            {"separators": (" , ", " : ")},
        ):
            assert allows(grammar, json.dumps(value, **spelling))  # type: ignore[arg-type]
    for character, count in MAX_INDENT.items():
        assert allows(grammar, "{\r\n" + character * count + "}")
        assert not allows(grammar, "{\n" + character * (count + 1) + "}")
    for bad in ("{  }", "{\t}", "{\n\n}", "{ \n}", " {}", "{}\n"):
        assert not allows(grammar, bad)


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"not": {}}, "s.not: the keyword 'not'"),
        ({"properties": {"a": {"items": {"if": {}}}}}, "s.properties.a.items.if: the keyword 'if'"),
        ({"allOf": [{}, {"dependentRequired": {}}]}, "s.allOf[1].dependentRequired: the keyword"),
        ({"$defs": {"unused": {"contains": {}}}}, "s.$defs.unused.contains: the keyword"),
        ({"x-guidance": {"lenient": True}}, "s.x-guidance: the keyword"),
        ({"type": "array", "uniqueItems": True}, "s.uniqueItems: the keyword"),
        ({"nullable": True}, "s.nullable: the keyword"),
        ({"properties": []}, "s.properties: expected an object of schemas, found list"),
        ({"anyOf": {}}, "s.anyOf: expected a list of schemas, found dict"),
        ({"items": 5}, "s.items: expected a JSON schema, found int"),
        ("text", "s: expected a JSON schema, an object, found str"),
        (True, "s: expected a JSON schema, an object, found bool"),
        ({"type": "wibble"}, "s: cannot be kept to: Invalid type: wibble"),
        ({"type": "string", "format": "wibble"}, "s: cannot be kept to: Unknown format: wibble"),
        ({"type": "string", "pattern": "(?=a)"}, "s: cannot be kept to: regex parse error"),
        ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, "s: cannot be kept to: oneOf"),
        ({"type": "integer", "minimum": 2, "maximum": 1}, "s: cannot be kept to: Unsatisfiable schema"),
        ({"$ref": "#/nowhere"}, "s: cannot be kept to: Pointer '/nowhere' does not exist"),
        ({"$ref": "https://example.org/s"}, "s: cannot be kept to: Resource 'https://example.org/s'"),
        ({"enum": [{"a": "x"}] * MAX_NODES}, "s.enum: expected at most"),
        ({"properties": {str(i): {} for i in range(MAX_NODES)}}, "expected at most"),
    ],
)
def test_what_cannot_be_kept_to_is_named(schema: Any, place: str) -> None:
    with pytest.raises(SchemaError) as caught:
        schema_grammar(schema, "s")
    assert place in str(caught.value)
    assert "\n" not in str(caught.value)


def test_depth_is_bounded() -> None:
    for wrap in (lambda inner: {"items": inner}, lambda inner: {"const": [inner]}):
        schema: Any = {}
        for _ in range(100_000):
            schema = wrap(schema) if "items" in wrap({}) else {"const": [schema.get("const", 1)]}
        with pytest.raises(SchemaError, match=f"at most {MAX_DEPTH}"):
            schema_grammar(schema, "s")
