"""Separates tool calls from the text of an answer, while it arrives. Comes after `TextStream`, on its content channel."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import groupby
from typing import Final

from pyluce.text.matcher import Matcher
from pyluce.text.tools.events import CallArguments, CallEnd, CallStart, ToolEvent, ToolText
from pyluce.text.tools.functions import Function
from pyluce.text.tools.protocols import CallParser, CallStatus, ToolFormat

_PIECE: Final = 1024  # characters looked at together, so that what a broken call gives back is copied in small pieces


class ToolStream:
    """Turns text into text, calls and their arguments; what the events add up to does not depend on how the text was split.

    * Text that may become the marker of a call is held back; it comes out as text when it does not.
    * Line breaks before a call, between calls and after the last one belong to the markup: templates write them back themselves.
    * A call is reported with its name as soon as that is known, then its arguments as they arrive.
    * What looks like a call but is none (no such function, other markup than the format's, the answer ends before the name) is text, all of it.
    * A call that breaks off after its name was reported ends with `CallEnd(complete=False)`. Its arguments stay as far as they came, which is
      never valid JSON; everything that was not reported as part of them is text.
    * Whatever follows a complete call, its closing marker or not, does not make it incomplete.
    """

    def __init__(self, format: ToolFormat, functions: Mapping[str, Function]) -> None:
        self._format = format
        self._functions = functions
        self._opening = Matcher([format.opening])
        self._parser: CallParser | None = None
        self._started = False  # the current call was reported
        self._closing: _Closing | None = None
        self._calls = 0
        self._newlines = 0  # held back behind the text before them
        self._after_call = False  # nothing but line breaks since the last call
        self._events: list[ToolEvent] = []

    @property
    def calls(self) -> int:
        """Calls reported so far."""
        return self._calls

    def step(self, text: str) -> list[ToolEvent]:
        """Take the next text; return what is now certain. Neighbouring events of one kind are joined."""
        for begin in range(0, len(text), _PIECE):
            rest = text[begin : begin + _PIECE]
            while rest:
                rest = self._take(rest)
        return self._drain()

    def flush(self) -> list[ToolEvent]:
        """The answer is over: return what was held back."""
        if self._parser is not None:
            self._show(self._break(self._parser))
        elif self._closing is not None:
            self._show(self._closing.flush())
            self._closing = None
        else:
            self._show(self._opening.flush())
        if not self._after_call:
            self._emit_text("\n" * self._newlines)
        self._newlines = 0
        return self._drain()

    def _take(self, text: str) -> str:
        """Take some of `text`, and return what is left of it."""
        if self._parser is not None:
            return self._take_call(self._parser, text)
        if self._closing is not None:
            rest = self._closing.feed(text)
            if rest is None:
                return ""
            self._closing = None
            return rest
        safe, match = self._opening.feed(text)
        self._show(safe)
        if match is None:
            return ""
        self._parser = self._format.new_parser(self._functions)
        self._started = False
        return match.rest

    def _take_call(self, parser: CallParser, text: str) -> str:
        taken = parser.feed(text)
        if parser.name is not None and not self._started:
            self._started = True
            self._newlines = 0
            self._events.append(CallStart(self._calls, parser.name))
            self._calls += 1
        if taken.arguments:
            self._events.append(CallArguments(self._calls - 1, taken.arguments))
        if taken.status is CallStatus.OPEN:
            return ""
        if taken.status is CallStatus.BROKEN:
            return self._break(parser) + taken.rest
        self._events.append(CallEnd(self._calls - 1, complete=True))
        self._parser, self._closing = None, _Closing(parser.closing)
        self._after_call = True
        return taken.rest

    def _break(self, parser: CallParser) -> str:
        """The current call is none, or breaks off; return its text that is to be looked at again."""
        self._parser = None
        if self._started:
            self._events.append(CallEnd(self._calls - 1, complete=False))
            self._after_call = True
        else:
            self._show(self._format.opening)
        return parser.unreported()

    def _show(self, text: str) -> None:
        """Emit text, but hold back the line breaks at its end."""
        body = text.rstrip("\n")
        if body:
            self._emit_text("\n" * self._newlines + body)
            self._newlines = 0
            self._after_call = False
        self._newlines += len(text) - len(body)

    def _emit_text(self, text: str) -> None:
        if text:
            self._events.append(ToolText(text))

    def _drain(self) -> list[ToolEvent]:
        events, self._events = self._events, []
        return join_events(events)


def join_events(events: Iterable[ToolEvent]) -> list[ToolEvent]:
    """The same events with neighbouring pieces of one text, or of one call's arguments, put together."""
    joined: list[ToolEvent] = []
    for _, group in groupby(events, key=lambda event: (type(event), getattr(event, "index", -1))):
        first, *others = group
        if isinstance(first, (ToolText, CallArguments)) and others:
            text = "".join(event.text for event in (first, *others) if isinstance(event, (ToolText, CallArguments)))
            joined.append(replace(first, text=text))
        else:
            joined += (first, *others)
    return joined


class _Closing:
    """Swallows the markup behind a complete call, as far as it is there."""

    def __init__(self, marks: tuple[str, ...]) -> None:
        self._marks = marks
        self._space: list[str] = []
        self._seen = ""

    def feed(self, text: str) -> str | None:
        """None while the markup may go on; the text behind it otherwise."""
        text, self._seen = self._seen + text, ""
        while self._marks:
            stripped = text.lstrip()
            self._space.append(text[: len(text) - len(stripped)])
            text = stripped
            found = [index for index, mark in enumerate(self._marks) if text.startswith(mark)]
            if not found:
                self._seen = text
                held = any(mark.startswith(text) for mark in self._marks)
                return None if held else "".join(self._space) + text
            text = text[len(self._marks[found[0]]) :]
            self._marks = self._marks[found[0] + 1 :]
            self._space.clear()
        return text

    def flush(self) -> str:
        """The answer is over: the text that was taken and is no markup."""
        return "".join(self._space) + self._seen if self._seen else ""
