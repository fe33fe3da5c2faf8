"""An answer as every API tells it: pieces of text, reasoning and tool calls in order, then how it ended.

Streamed and whole answers are made of the same pieces, so they are the same answer.
"""

from __future__ import annotations

import enum
import uuid
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from typing import TypeAlias

from pyluce.engine import Event, FinishEvent, GenerationRequest, IdlePrompt, Timings, TokenEvent
from pyluce.server.protocols import TextTools
from pyluce.text import tools
from pyluce.text.tools import ToolEvent, ToolStream


@dataclass(frozen=True, slots=True)
class Text:
    """More of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """More of the reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A tool call begins; `index` counts the calls of one answer from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of a call's arguments, which add up to one JSON text."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class Token:
    """A token was generated; sent only where log probabilities were asked for."""

    event: TokenEvent


@dataclass(frozen=True, slots=True)
class End:
    """The answer is complete. `reason` is "stop", "length", or "tool_calls" when there are calls and all of them complete.

    `reasoning_tokens` of the generated ones were reasoning.
    """

    reason: str
    stop_string: str | None
    timings: Timings
    reasoning_tokens: int = 0


Piece: TypeAlias = Text | Reasoning | CallStart | CallArguments | Token | End


class Reader:
    """Turns the events of one request into pieces.

    `one_call`: after the first tool call nothing more is told.
    """

    def __init__(self, tool_stream: ToolStream | None, with_tokens: bool, one_call: bool) -> None:
        self._tools = tool_stream
        self._with_tokens = with_tokens
        self._one_call = one_call
        self._calls = 0
        self._broken = False

    def read(self, event: Event) -> list[Piece]:
        """The pieces that an event brings."""
        pieces: list[Piece] = []
        if self._with_tokens and isinstance(event, TokenEvent):
            pieces.append(Token(event))
        if event.reasoning:
            pieces.append(Reasoning(event.reasoning))
        if event.content:
            pieces += [Text(event.content)] if self._tools is None else self._separate(self._tools.step(event.content))
        if isinstance(event, FinishEvent):
            if self._tools is not None:
                pieces += self._separate(self._tools.flush())
            pieces.append(self._end(event))
        return pieces

    def _separate(self, events: Iterable[ToolEvent]) -> list[Piece]:
        pieces: list[Piece] = []
        for event in events:
            self._calls += isinstance(event, tools.CallStart)
            if self._one_call and (self._calls > 1 or (self._calls == 1 and isinstance(event, tools.ToolText))):
                continue
            if isinstance(event, tools.CallStart):
                pieces.append(CallStart(event.index, new_id("call_"), event.name))
            elif isinstance(event, tools.CallArguments):
                pieces.append(CallArguments(event.index, event.text))
            elif isinstance(event, tools.ToolText):
                pieces.append(Text(event.text))
            else:
                self._broken = self._broken or not event.complete
        return pieces

    def _end(self, event: FinishEvent) -> End:
        reason = event.reason.value
        if self._calls and not self._broken and reason == "stop":
            reason = "tool_calls"
        return End(reason, event.stop_string, event.timings, event.reasoning_tokens)


class Kind(enum.Enum):
    """What a part of an answer is."""

    TEXT = "text"
    REASONING = "reasoning"
    CALL = "call"


@dataclass(slots=True)
class Part:
    """A stretch of an answer of one kind. `text` is the text, or a call's arguments as JSON text; `id` and `name` are a call's."""

    kind: Kind
    id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(self.pieces)


class Answer:
    """The sum of an answer's pieces: `parts` in order, the tokens where they were asked for, and how it ended."""

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self.tokens: list[TokenEvent] = []
        self._end: End | None = None

    def add(self, piece: Piece) -> Part | None:
        """Take the next piece; return the part that it began, if it began one."""
        if isinstance(piece, Token):
            self.tokens.append(piece.event)
        elif isinstance(piece, End):
            self._end = piece
        elif isinstance(piece, CallStart):
            self.parts.append(Part(Kind.CALL, piece.id, piece.name))
            return self.parts[-1]
        elif isinstance(piece, CallArguments):
            self.parts[-1].pieces.append(piece.text)
        else:
            kind = Kind.TEXT if isinstance(piece, Text) else Kind.REASONING
            begins = not self.parts or self.parts[-1].kind is not kind
            if begins:
                self.parts.append(Part(kind))
            self.parts[-1].pieces.append(piece.text)
            return self.parts[-1] if begins else None
        return None

    @property
    def text(self) -> str:
        """The answer proper."""
        return "".join(part.text for part in self.parts if part.kind is Kind.TEXT)

    @property
    def reasoning(self) -> str:
        """The reasoning."""
        return "".join(part.text for part in self.parts if part.kind is Kind.REASONING)

    @property
    def calls(self) -> list[Part]:
        """The tool calls."""
        return [part for part in self.parts if part.kind is Kind.CALL]

    @property
    def end(self) -> End:
        """How it ended. RuntimeError before the end."""
        if self._end is None:
            raise RuntimeError("the answer is not complete yet")
        return self._end


@dataclass(frozen=True, slots=True)
class Plan:
    """What will be generated for one HTTP request: `choices` requests of the engine, in the order of the answer's choices.

    `follow_up` makes of a complete answer what the conversation's next prompt may begin with, the likeliest last.
    """

    choices: tuple[GenerationRequest, ...]
    new_tool_stream: Callable[[], ToolStream] | None = None
    with_tokens: bool = False
    one_call: bool = False
    follow_up: Callable[[TextTools, Answer], tuple[IdlePrompt, ...]] | None = None

    def readers(self) -> list[Reader]:
        """A reader for each choice."""
        make = self.new_tool_stream
        return [Reader(make() if make else None, self.with_tokens, self.one_call) for _ in self.choices]


async def read_pieces(plan: Plan, events: AsyncIterator[tuple[int, Event]]) -> AsyncIterator[tuple[int, list[Piece]]]:
    """The pieces that each event brings, with the choice's index; events that bring none are left out."""
    readers = plan.readers()
    async for index, event in events:
        pieces = readers[index].read(event)
        if pieces:
            yield index, pieces


async def collect(plan: Plan, pieces: AsyncIterator[tuple[int, list[Piece]]]) -> list[Answer]:
    """All choices, complete."""
    answers = [Answer() for _ in plan.choices]
    async for index, some in pieces:
        for piece in some:
            answers[index].add(piece)
    return answers


def new_id(prefix: str) -> str:
    """A fresh id such as `chatcmpl-...`."""
    return f"{prefix}{uuid.uuid4().hex}"
