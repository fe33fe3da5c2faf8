from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyluce.text.tools import CallArguments, CallEnd, CallStart, ToolStream, ToolText
from pyluce.text.tools.json_calls import JsonCalls
from tests.text.tools.cases import FUNCTIONS, arguments_of, calls_of, cut, is_within, read, text_of

FORMAT = JsonCalls()
HARD_STRINGS = [
    "C:\\Users\\new\\table",
    'say "hi"',
    "line\nbreak\r\n\ttab",
    "\\n is not a line break",
    "{braces} [brackets], commas: }}",
    "</tool_call>\n<tool_call>",
    "é € 😀 \u2028 \x85",
    "\\",
    '"',
    "",
]
NAMES = st.sampled_from(sorted(FUNCTIONS))
ARGUMENTS = st.dictionaries(
    st.text(max_size=8) | st.sampled_from(HARD_STRINGS),
    st.text(max_size=20) | st.sampled_from(HARD_STRINGS) | st.integers() | st.lists(st.text(max_size=5), max_size=3),
    max_size=3,
)


def call(name: str, arguments: Any, ascii: bool = False) -> str:
    body = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=ascii)
    return f"<tool_call>\n{body}\n</tool_call>"


@given(
    st.lists(st.tuples(NAMES, ARGUMENTS), min_size=1, max_size=3),
    st.sampled_from(["", "I will look.", "a < b <tool <tool_cal"]),
    st.booleans(),
    st.lists(st.integers(min_value=0), max_size=20),
)
def test_calls_after_text_in_any_pieces(
    calls: list[tuple[str, Any]], before: str, ascii: bool, places: list[int]
) -> None:
    text = "\n".join([before, *(call(name, arguments, ascii) for name, arguments in calls)]) + "\n"
    events = read(FORMAT, cut(text, places))
    assert calls_of(events) == calls
    assert text_of(events) == before


FRAGMENTS = st.sampled_from(
    [
        "<tool_call>",
        "</tool_call>",
        '{"name": ',
        '"write"',
        '"read_file"',
        '"other"',
        ', "arguments": ',
        '{"a": "b\\',
        'n"}',
    ]
    + [
        "{}",
        "}",
        "\n",
        " ",
        "text",
        '"',
        "{",
        ",",
        '{"arguments": {"x": 1}, "name": "write"}',
        "<tool",
        "é",
        '"unknown": 1',
    ]
)


@given(st.lists(FRAGMENTS, max_size=12).map("".join), st.lists(st.integers(min_value=0), max_size=12))
def test_the_split_does_not_matter(text: str, places: list[int]) -> None:
    whole = read(FORMAT, [text])
    assert read(FORMAT, cut(text, places)) == whole
    assert read(FORMAT, text) == whole


@given(st.lists(FRAGMENTS, max_size=12).map("".join))
def test_nothing_is_lost_and_broken_calls_never_parse(text: str) -> None:
    events = read(FORMAT, text)
    if not any(isinstance(event, CallStart) for event in events):
        assert text_of(events) == text
    shown = [event for event in events if isinstance(event, (ToolText, CallArguments))]
    assert is_within(
        "".join(event.text for event in shown if event.text != "{}").replace("\\n", "\n"), text.replace("\\n", "\n")
    )
    for event in events:
        if isinstance(event, CallEnd):
            arguments = arguments_of(events, event.index)
            if event.complete:
                assert isinstance(json.loads(arguments), dict)
            else:
                with pytest.raises(ValueError, match="."):
                    json.loads(arguments)


@pytest.mark.parametrize("value", HARD_STRINGS)
@pytest.mark.parametrize("ascii", [False, True])
def test_hard_strings_one_character_at_a_time(value: str, ascii: bool) -> None:
    assert calls_of(read(FORMAT, call("write", {"path": value}, ascii))) == [("write", {"path": value})]


def test_names_and_arguments_come_early() -> None:
    stream = ToolStream(FORMAT, FUNCTIONS)
    assert stream.step('Hi\n<tool_call>\n{"name": "wri') == [ToolText("Hi")]
    assert stream.step('te"') == [CallStart(0, "write")]
    assert stream.step(', "arguments": {"path": "C:\\') == [CallArguments(0, '{"path": "C:\\')]
    assert stream.step("\\a") == [CallArguments(0, "\\a")]
    assert stream.step('"}') == [CallArguments(0, '"}'), CallEnd(0, complete=True)]
    assert stream.step("}\n</tool_call>") == []
    assert stream.flush() == []


@pytest.mark.parametrize(
    "text",
    [
        "a lone <tool_c",
        "<",
        "<tool_call>",
        '<tool_call>\n{"na',
        '<tool_call>{"name": "other", "arguments": {}}</tool_call> more',
        "<tool_call>not json</tool_call>\n\nand more\n",
        '<tool_call>{"arguments": {"a": 1}}</tool_call>',
        '<tool_call>{"arguments": [1]}</tool_call>',
        '<tool_call>{"function": "write"}</tool_call>',
        '\n\n<tool_call>{"name": 5}\n',
        '<tool_call>{"name": "' + "w" * 600 + '"}',
    ],
)
def test_what_is_no_call_is_text(text: str) -> None:
    assert read(FORMAT, text) == [ToolText(text)]


def test_a_call_after_one_that_is_none() -> None:
    events = read(FORMAT, '<tool_call>oops <tool_call>{"name": "write", "arguments": {}}</tool_call>')
    assert text_of(events) == "<tool_call>oops "
    assert calls_of(events) == [("write", {})]


def test_a_call_that_breaks_off() -> None:
    events = read(FORMAT, '<tool_call>{"name": "write", "arguments": {"a": 1,, "b": 2}}</tool_call> end')
    assert events == [
        CallStart(0, "write"),
        CallArguments(0, '{"a": 1,'),
        CallEnd(0, complete=False),
        ToolText(', "b": 2}}</tool_call> end'),
    ]
    assert read(FORMAT, '<tool_call>{"name": "write", "arguments": {"a": "x') == [
        CallStart(0, "write"),
        CallArguments(0, '{"a": "x'),
        CallEnd(0, complete=False),
    ]
    assert read(FORMAT, '<tool_call>{"name": "write", "argu') == [
        CallStart(0, "write"),
        CallEnd(0, complete=False),
        ToolText(', "argu'),
    ]


@pytest.mark.parametrize(
    ("text", "after"),
    [
        ('<tool_call>{"name": "write", "arguments": {"a": 1}}', ""),
        ('<tool_call>{"name": "write", "arguments": {"a": 1}\n</tool_call>', ""),
        ('<tool_call>{"name": "write", "arguments": {"a": 1}', ""),
        ('<tool_call>{"arguments": {"a": 1}, "name": "write"}</tool_call>', ""),
        ('<tool_call>{"arguments": {"a": 1}, "name": "write"', ""),
        ('<tool_call>{"name": "write", "arguments": {"a": 1}} </tool_c', " </tool_c"),
        ('<tool_call>{"name": "write", "arguments": {"a": 1}}\n</tool_call>\nDone.\n', "\nDone.\n"),
        ('<tool_call>{"name": "write", "arguments": {"a": 1}} oops', " oops"),
        ('<tool_call>{"name": "wr\\u0069te", "arguments": {"a": 1}}</tool_call>\n\n\n', ""),
    ],
)
def test_what_follows_complete_arguments_does_not_break_them(text: str, after: str) -> None:
    events = read(FORMAT, text)
    assert calls_of(events) == [("write", {"a": 1})]
    assert text_of(events) == after


def test_line_breaks_around_calls() -> None:
    body = call("write", {})
    for text, shown in (
        (f"a\n\n{body}\n\nb\n", "a\n\nb\n"),
        (f"\n\n{body}\n\n{body}\n", ""),
        (f"a\n{body}\n{body}b", "ab"),
        ("a\n\nb\n\n", "a\n\nb\n\n"),
    ):
        assert text_of(read(FORMAT, text)) == shown


def test_a_call_without_arguments() -> None:
    assert calls_of(read(FORMAT, '<tool_call>{"name": "write"}</tool_call>')) == [("write", {})]


def test_the_cost_of_a_token_does_not_grow() -> None:
    def seconds(repeats: int) -> float:
        stream = ToolStream(FORMAT, FUNCTIONS)
        stream.step('<tool_call>{"name": "write", "arguments": {"path": "')
        begun = time.perf_counter()
        for _ in range(repeats):
            stream.step('line \\n "x\\"'[:9])
        return time.perf_counter() - begun

    seconds(1000)
    assert min(seconds(20000) for _ in range(3)) < 20 * 4 * max(min(seconds(1000) for _ in range(3)), 1e-4)


def test_many_false_markers_in_one_piece_cost_no_more_than_in_many() -> None:
    text = '<tool_call>{"name": "x' * 20000
    begun = time.perf_counter()
    assert read(FORMAT, [text]) == [ToolText(text)]
    assert time.perf_counter() - begun < 10.0


def test_history() -> None:
    spelled = '{"a":1,  "b":2}'
    assert FORMAT.history_arguments(spelled) == {"a": 1, "b": 2}
    assert JsonCalls(text_arguments=True).history_arguments(spelled) == spelled
    for bad in ("[1]", "{", "1"):
        with pytest.raises(ValueError, match="."):
            FORMAT.history_arguments(bad)
