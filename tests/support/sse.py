"""Reads server-sent events strictly: every line is a field, a comment or blank."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class SentEvent:
    """One event; `data` is its text."""

    name: str | None
    data: str

    @property
    def json(self) -> Any:
        return json.loads(self.data)


def parse(raw: bytes) -> list[SentEvent]:
    """All events of a complete stream. AssertionError for anything that a strict reader would stumble over."""
    assert raw.endswith(b"\n\n"), "the stream ends inside a frame"
    raw.decode("ascii")
    return list(_events(raw.decode("ascii").split("\n\n")[:-1]))


def chunks(raw: bytes) -> list[dict[str, Any]]:
    """The JSON of an OpenAI-like stream, which must end with `[DONE]`."""
    events = parse(raw)
    assert events[-1].data == "[DONE]"
    return [event.json for event in events[:-1]]


def _events(blocks: Iterable[str]) -> Iterator[SentEvent]:
    for block in blocks:
        name = None
        data = []
        for line in block.split("\n"):
            if line.startswith(":"):
                continue
            field, separator, value = line.partition(": ")
            assert separator and field in ("event", "data"), f"not a field: {line!r}"
            if field == "event":
                name = value
            else:
                data.append(value)
        if data:
            assert len(data) == 1
            yield SentEvent(name, data[0])
