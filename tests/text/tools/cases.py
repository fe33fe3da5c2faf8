"""What the tests of both formats share."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from pyluce.text.tools import (
    CallArguments,
    CallEnd,
    CallStart,
    Function,
    ToolEvent,
    ToolFormat,
    ToolStream,
    ToolText,
    join_events,
)

PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "path": {"type": "string"},
        "count": {"type": "integer"},
        "ratio": {"type": "number"},
        "deep": {"type": "boolean"},
        "edits": {"type": "array", "items": {"$ref": "#/$defs/Edit"}},
        "options": {"$ref": "#/$defs/Options"},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "colour": {"$ref": "#/$defs/Colour"},
        "any": {},
        "mixed": {"type": ["string", "array", "integer"]},
    },
    "required": ["path"],
    "$defs": {
        "Edit": {"type": "object", "properties": {"old": {"type": "string"}}},
        "Options": {"type": "object"},
        "Colour": {"enum": ["red", "green"]},
    },
}
FUNCTIONS = {name: Function(name, PARAMETERS) for name in ("write", "read_file")}


def read(format: ToolFormat, pieces: Iterable[str]) -> list[ToolEvent]:
    """All events of an answer that arrives in pieces, joined."""
    stream = ToolStream(format, FUNCTIONS)
    events: list[ToolEvent] = []
    for piece in pieces:
        events += stream.step(piece)
    return join_events(events + stream.flush())


def text_of(events: Iterable[ToolEvent]) -> str:
    return "".join(event.text for event in events if isinstance(event, ToolText))


def calls_of(events: Sequence[ToolEvent]) -> list[tuple[str, Any]]:
    """Names and parsed arguments of the calls, all of which must be complete and in order."""
    starts = [event for event in events if isinstance(event, CallStart)]
    ends = [event for event in events if isinstance(event, CallEnd)]
    assert [event.index for event in starts] == [event.index for event in ends] == list(range(len(starts)))
    assert all(event.complete for event in ends)
    return [(start.name, json.loads(arguments_of(events, start.index))) for start in starts]


def arguments_of(events: Iterable[ToolEvent], index: int) -> str:
    return "".join(event.text for event in events if isinstance(event, CallArguments) and event.index == index)


def cut(text: str, places: Iterable[int]) -> list[str]:
    """`text` in pieces."""
    bounds = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[begin:end] for begin, end in zip(bounds, bounds[1:])]  # noqa: B905


def is_within(part: str, text: str) -> bool:
    """The characters of `part` stand in `text` in the same order."""
    characters = iter(text)
    return all(character in characters for character in part)
