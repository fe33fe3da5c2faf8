"""What the tool stream needs of a format: where calls begin, and what one of them says."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from pyluce.text.tools.functions import Function


class CallStatus(enum.Enum):
    """How far a call is."""

    OPEN = "open"
    COMPLETE = "complete"  # what follows is at most the closing markup
    BROKEN = "broken"  # a character came that cannot continue it


class Taken(NamedTuple):
    """The outcome of a feed: new text of the arguments, and the part of the fed text that does not belong to the call."""

    arguments: str
    status: CallStatus
    rest: str


class CallParser(Protocol):
    """Reads one call, from behind its opening marker on. Each character costs amortised constant time."""

    @property
    def name(self) -> str | None:
        """The function's name as soon as it is known."""

    @property
    def closing(self) -> tuple[str, ...]:
        """The markup that may follow a complete call, in order."""

    def feed(self, text: str) -> Taken:
        """Take the next text. Not to be called after the call is complete or broken."""

    def unreported(self) -> str:
        """The text that was taken since the last name or arguments were reported, as the model wrote it."""


class ToolFormat(Protocol):
    """One way to write calls."""

    @property
    def name(self) -> str:
        """For messages."""

    @property
    def opening(self) -> str:
        """The marker that begins a call."""

    def new_parser(self, functions: Mapping[str, Function]) -> CallParser:
        """A parser for one call of one of `functions`."""

    def history_arguments(self, arguments: str) -> Any:
        """A call's arguments, JSON text, as the chat template expects them in a message. Raises ValueError for no JSON object."""

    def rules(self, function: Function, number: int) -> Sequence[str]:
        """Rules of a grammar (Lark as llguidance has it); the first one is `call_<number>`, a whole call of `function`."""
