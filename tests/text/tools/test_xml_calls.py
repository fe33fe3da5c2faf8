from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyluce.text.tools import CallArguments, CallEnd, CallStart, Function, ToolStream, ToolText
from pyluce.text.tools.xml_calls import XmlCalls
from tests.text.tools.cases import FUNCTIONS, arguments_of, calls_of, cut, is_within, read, text_of

FORMAT = XmlCalls()


def call(name: str, arguments: dict[str, Any]) -> str:
    """A call as the model's template writes it: strings as they are, everything else as JSON."""
    lines = [f"<tool_call>\n<function={name}>"]
    for key, value in arguments.items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        lines.append(f"<parameter={key}>\n{text}\n</parameter>")
    return "\n".join([*lines, "</function>\n</tool_call>"])


STRINGS = st.text(max_size=20).filter(lambda text: "</parameter>" not in text) | st.sampled_from(
    [
        "C:\\new\\a",
        '"quoted"',
        "two\nlines\n",
        "\n",
        "\n\n",
        "",
        " padded ",
        "<b>x</b>",
        "</para",
        "12",
        "null",
        "[1",
        "é😀\u2028",
    ]
)
ARGUMENTS = st.fixed_dictionaries(
    {"path": STRINGS},
    optional={
        "count": st.integers(),
        "ratio": st.floats(allow_nan=False, allow_infinity=False) | st.integers(),
        "deep": st.booleans(),
        "edits": st.lists(
            st.dictionaries(st.text(max_size=5), STRINGS | st.just("</parameter>"), max_size=2), max_size=2
        ),
        "options": st.dictionaries(st.text(max_size=5), st.integers() | st.none(), max_size=2),
        "note": STRINGS.filter(lambda text: text.strip().lower() not in ("null", "none")) | st.none(),
        "colour": st.sampled_from(["red", "green"]),
        "undeclared": STRINGS,
    },
)


@given(
    st.lists(st.tuples(st.sampled_from(sorted(FUNCTIONS)), ARGUMENTS), min_size=1, max_size=2),
    st.sampled_from(["", "Let me see."]),
    st.lists(st.integers(min_value=0), max_size=20),
)
def test_calls_after_text_in_any_pieces(calls: list[tuple[str, Any]], before: str, places: list[int]) -> None:
    text = "\n\n".join([before, *(call(name, arguments) for name, arguments in calls)])
    events = read(FORMAT, cut(text, places))
    assert calls_of(events) == calls
    assert text_of(events) == before
    assert read(FORMAT, text) == events


FRAGMENTS = st.sampled_from(
    [
        "<tool_call>",
        "</tool_call>",
        "<function=write>",
        "<function=no>",
        "</function>",
        "<parameter=path>",
        "<parameter=edits>",
    ]
    + [
        "<parameter=note>",
        "<parameter=any>",
        "</parameter>",
        "\n",
        " ",
        "x",
        "[",
        "]",
        '{"a"',
        ":1}",
        "null",
        "12",
        "<",
        ">",
    ]
)


@given(st.lists(FRAGMENTS, max_size=14).map("".join), st.lists(st.integers(min_value=0), max_size=12))
def test_the_split_does_not_matter(text: str, places: list[int]) -> None:
    whole = read(FORMAT, [text])
    assert read(FORMAT, cut(text, places)) == whole
    assert read(FORMAT, text) == whole


@given(st.lists(FRAGMENTS, max_size=14).map("".join))
def test_nothing_is_lost_and_broken_calls_never_parse(text: str) -> None:
    events = read(FORMAT, text)
    if not any(isinstance(event, CallStart) for event in events):
        assert text_of(events) == text
    assert is_within(text_of(events), text)
    for event in events:
        if isinstance(event, CallEnd):
            arguments = arguments_of(events, event.index)
            if event.complete:
                assert isinstance(json.loads(arguments), dict)
            else:
                with pytest.raises(ValueError, match="."):
                    json.loads(arguments)


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("count", "12", 12),
        ("count", "twelve", "twelve"),
        ("count", "", ""),
        ("ratio", "1.5e3", 1500.0),
        ("deep", "True", True),
        ("deep", "false", False),
        ("note", "None", None),
        ("note", "null\n\n", None),
        ("note", "nullable", "nullable"),
        ("note", "12", "12"),
        ("path", "12", "12"),
        ("path", "[1]", "[1]"),
        ("colour", "red", "red"),
        ("any", "12", 12),
        ("any", "true story", "true story"),
        ("any", '{"a": [1, "}"]}', {"a": [1, "}"]}),
        ("any", "{braces} are text", "{braces} are text"),
        ("mixed", "[1, 2]", [1, 2]),
        ("mixed", '{"a": 1}', '{"a": 1}'),
        ("mixed", "-7", -7),
        ("mixed", "7" * 100, "7" * 100),
        ("edits", '[{"old": "</parameter>"}]', [{"old": "</parameter>"}]),
        ("options", "  {\n}\n", {}),
    ],
)
@pytest.mark.parametrize("frame", ["{}", "\n{}\n"])
def test_types_come_from_the_declaration(key: str, text: str, value: Any, frame: str) -> None:
    body = f"<tool_call><function=write><parameter={key}>{frame.format(text) if '{}' in frame else text}</parameter></function></tool_call>"
    for pieces in (list(body), [body], cut(body, range(0, 400, 3))):
        assert calls_of(read(FORMAT, pieces)) == [("write", {key: value})]


def test_text_arguments_come_early() -> None:
    stream = ToolStream(FORMAT, FUNCTIONS)
    assert stream.step("<tool_call>\n<function=write>") == [CallStart(0, "write")]
    assert stream.step("\n<parameter=path>") == [CallArguments(0, '{"path": ')]
    assert stream.step("\nC:\\a") == [CallArguments(0, '"C:\\\\a')]
    assert stream.step("\n") == []
    assert stream.step("b</par") == [CallArguments(0, "\\nb")]
    assert stream.step("ameter>\n<parameter=edits>[{") == [CallArguments(0, '", "edits": [{')]
    assert stream.step("}]</parameter></function>") == [CallArguments(0, "}]}"), CallEnd(0, complete=True)]
    assert stream.step("\n</tool_call>") == []
    assert stream.flush() == []


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>",
        "<tool_call>\n<function=wri",
        "<tool_call><function=no>\n<parameter=path>x</parameter></function></tool_call>",
        '<tool_call>{"name": "write"}</tool_call>',
        "\n<tool_call>\n</tool_call>\n",
        "<tool_call><function=" + "w" * 600,
    ],
)
def test_what_is_no_call_is_text(text: str) -> None:
    assert read(FORMAT, text) == [ToolText(text)]


@pytest.mark.parametrize(
    ("body", "arguments", "after"),
    [
        ("<parameter=path>abc</para", '{"path": "abc', "</para"),
        ("<parameter=path>a\n", '{"path": "a', ""),
        ("<parameter=count>12", '{"count": ', "12"),
        ("<parameter=options>{x}</parameter></function>", '{"options": {', "x}</parameter></function>"),
        ("<parameter=options>{}x</parameter></function>", '{"options": {}', "x</parameter></function>"),
        ("<parameter=path>1</parameter>\n<parameter=path>2", '{"path": "1"', "\n<parameter=path>2"),
        ("oops</function>", "", "oops</function>"),
    ],
)
def test_a_call_that_breaks_off(body: str, arguments: str, after: str) -> None:
    for pieces in ([f"<tool_call><function=write>{body}"], f"<tool_call><function=write>{body}"):
        events = read(FORMAT, pieces)
        assert CallEnd(0, complete=False) in events
        assert arguments_of(events, 0) == arguments
        assert text_of(events) == after


def test_no_parameters() -> None:
    assert calls_of(read(FORMAT, "<tool_call>\n<function=write>\n</function>\n</tool_call>")) == [("write", {})]


def test_recursive_references_end() -> None:
    node = {"properties": {"next": {"$ref": "#/properties/next"}, "both": {"anyOf": [{"$ref": "#/properties/both"}]}}}
    function = Function("f", node)
    assert "string" in function.kinds("next")
    assert "object" in function.kinds("both")
    assert function.schema_of("next")


def test_history() -> None:
    assert FORMAT.history_arguments('{"a": [1]}') == {"a": [1]}
    with pytest.raises(ValueError, match="JSON object"):
        FORMAT.history_arguments("[1]")
