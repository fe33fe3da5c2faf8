"""What a tool stream reports while an answer arrives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class ToolText:
    """Text of the answer that belongs to no call."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call begins; `index` counts the calls of one answer from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of a call's arguments. The texts of a complete call add up to one JSON object."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """A call is over. With `complete` False it broke off: its arguments, as far as they came, are no valid JSON; do not run it."""

    index: int
    complete: bool


ToolEvent: TypeAlias = ToolText | CallStart | CallArguments | CallEnd
