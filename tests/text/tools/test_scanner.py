from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyluce.text.tools.scanner import MAX_DEPTH, JsonScanner

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda children: st.lists(children, max_size=4) | st.dictionaries(st.text(), children, max_size=4),
    max_leaves=12,
)
CONTAINERS = st.lists(VALUES, max_size=4) | st.dictionaries(st.text(), VALUES, max_size=4)


def scan(text: str, size: int, roots: str = "{[") -> tuple[str, str, bool]:
    """What was accepted, what was not, and whether the value is complete."""
    scanner = JsonScanner(roots)
    written = ""
    for begin in range(0, len(text), size):
        piece = text[begin : begin + size]
        part, taken = scanner.feed(piece)
        written += part
        if taken < len(piece) or scanner.done or scanner.failed:
            return written, text[begin + taken :], scanner.done
    return written, "", scanner.done


@given(CONTAINERS, st.booleans(), st.sampled_from([None, 1]), st.integers(1, 9), st.text(max_size=5))
def test_accepts_json_and_stops_at_its_end(value: Any, ascii: bool, indent: int | None, size: int, after: str) -> None:
    text = json.dumps(value, ensure_ascii=ascii, indent=indent)
    assert scan(text + after, size) == (text, after, True)


@given(CONTAINERS, st.integers(min_value=0), st.characters())
def test_agrees_with_the_standard_library_on_damaged_json(value: Any, place: int, character: str) -> None:
    text = json.dumps(value)
    place %= len(text)
    damaged = text[:place] + character + text[place + 1 :]
    try:
        expected = json.loads(damaged, strict=False)
        valid = isinstance(expected, (list, dict))
    except ValueError:
        valid = False
    written, rest, done = scan(damaged, 3)
    complete = done and not rest.strip(" \t\r\n")
    assert complete == valid
    if valid:
        assert json.loads(written) == expected


@pytest.mark.parametrize(
    "bad",
    [
        "[01]",
        "[1.]",
        "[.5]",
        "[+1]",
        "[1e]",
        "[-]",
        "[1 2]",
        "[,]",
        "[1,]",
        "{,}",
        '{"a"}',
        '{"a":}',
        '{"a":1,}',
        "{1:2}",
    ]
    + [
        "[NaN]",
        "[tru]",
        "[nul l]",
        '["\\x"]',
        '["\\u12g4"]',
        "[}",
        "{]",
        '{"a":1]',
        "[Infinity]",
        "x",
        '"text"',
        "1",
        "[\u0661]",
    ],
)
def test_refuses(bad: str) -> None:
    _, rest, done = scan(bad, 1)
    assert rest
    assert not done


def test_refuses_an_array_where_an_object_is_expected() -> None:
    assert scan("[1]", 1, roots="{") == ("", "[1]", False)


def test_escapes_control_characters_in_strings() -> None:
    assert scan('{"a": "x\ny\tz\x00"}', 2) == ('{"a": "x\\ny\\tz\\u0000"}', "", True)


def test_depth_is_bounded() -> None:
    assert scan("[" * MAX_DEPTH + "]" * MAX_DEPTH, 7)[2]
    written, _, done = scan("[" * (MAX_DEPTH + 1), 7)
    assert len(written) == MAX_DEPTH
    assert not done
