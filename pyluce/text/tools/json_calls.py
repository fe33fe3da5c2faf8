"""Calls written as one JSON object: `<tool_call>{"name": "f", "arguments": {...}}</tool_call>`."""

from __future__ import annotations

import enum
import json
from collections.abc import Callable, Mapping
from typing import Any, Final

from pyluce.text.tools.functions import Function
from pyluce.text.tools.grammar import arguments_rule
from pyluce.text.tools.protocols import CallStatus, Taken
from pyluce.text.tools.scanner import JsonScanner

OPENING: Final = "<tool_call>"
CLOSING: Final = "</tool_call>"

_LONGEST_STRING: Final = 512  # of a key or a name, as written
_SPACE = " \t\r\n"


class _At(enum.Enum):
    OBJECT = enum.auto()
    KEY_OR_END = enum.auto()
    KEY = enum.auto()
    COLON = enum.auto()
    VALUE = enum.auto()
    NAME = enum.auto()
    ARGUMENTS = enum.auto()
    AFTER = enum.auto()


class JsonCallParser:
    """Reads the object: `name` and `arguments`, in any order, and nothing else. Without `arguments` they are empty.

    The call is complete when both are; a missing closing brace of the outer object does not matter.
    """

    closing: tuple[str, ...] = ("}", CLOSING)

    def __init__(self, functions: Mapping[str, Function]) -> None:
        self._functions = functions
        self._at = _At.OBJECT
        self._string: list[str] = []
        self._escaped = False
        self._key = ""
        self._name: str | None = None
        self._scanner: JsonScanner | None = None
        self._early: list[str] = []  # arguments that came before the name
        self._unreported: list[str] = []
        self._arguments: list[str] = []
        self._complete = False

    @property
    def name(self) -> str | None:
        return self._name

    def feed(self, text: str) -> Taken:
        at = reported = 0
        while at < len(text) and not self._complete:
            if self._at is _At.VALUE and self._key == "arguments" and self._scanner is None and text[at] == "{":
                self._at, self._scanner = _At.ARGUMENTS, JsonScanner()
            if self._at is _At.ARGUMENTS and self._scanner is not None:
                written, after = self._scanner.feed(text, at)
                broken = self._scanner.failed
                if written and self._report(written):
                    self._unreported.clear()
                    reported = after
                if self._scanner.done:
                    self._end_arguments()
                at = after
            else:
                named = self._name is not None
                broken = not self._take(text[at])
                at += not broken
                if not named and self._name is not None:
                    self._unreported.clear()
                    reported = at
                    if self._early:
                        self._arguments, self._early = self._early, []
            if broken:
                return self._taken(text, reported, at, CallStatus.BROKEN)
        return self._taken(text, reported, at, CallStatus.COMPLETE if self._complete else CallStatus.OPEN)

    def unreported(self) -> str:
        return "".join(self._unreported)

    def _taken(self, text: str, reported: int, at: int, status: CallStatus) -> Taken:
        self._unreported.append(text[reported:at])
        arguments, self._arguments = "".join(self._arguments), []
        return Taken(arguments, status, text[at:])

    def _report(self, written: str) -> bool:
        named = self._name is not None
        (self._arguments if named else self._early).append(written)
        return named

    def _end_arguments(self) -> None:
        self._at = _At.AFTER
        self._complete = self._name is not None

    def _take(self, character: str) -> bool:
        if self._at in (_At.KEY, _At.NAME):
            return self._take_string(character)
        if character in _SPACE:
            return True
        return self._steps[self._at](self, character)

    def _take_object(self, character: str) -> bool:
        self._at = _At.KEY_OR_END
        return character == "{"

    def _take_key_or_end(self, character: str) -> bool:
        if character == "}":
            return self._end_object()
        self._at = _At.KEY
        return character == '"'

    def _take_colon(self, character: str) -> bool:
        self._at = _At.VALUE
        return character == ":"

    def _take_value(self, character: str) -> bool:
        self._at = _At.NAME
        return self._key == "name" and self._name is None and character == '"'

    def _take_after(self, character: str) -> bool:
        if character == "}":
            return self._end_object()
        self._at = _At.KEY_OR_END
        return character == ","

    def _end_object(self) -> bool:
        if self._name is None:
            return False
        if self._scanner is None:
            self._arguments.append("{}")
        self.closing = (CLOSING,)
        self._complete = True
        return True

    def _take_string(self, character: str) -> bool:
        if character == '"' and not self._escaped:
            text = _read_string("".join(self._string))
            self._string.clear()
            return text is not None and self._end_string(text)
        self._escaped = character == "\\" and not self._escaped
        self._string.append(character)
        return len(self._string) <= _LONGEST_STRING

    def _end_string(self, text: str) -> bool:
        if self._at is _At.KEY:
            self._key, self._at = text, _At.COLON
            return text in ("name", "arguments")
        if text not in self._functions:
            return False
        self._name, self._at = text, _At.AFTER
        self._complete = self._scanner is not None
        return True

    _steps: Mapping[_At, Callable[[JsonCallParser, str], bool]] = {
        _At.OBJECT: _take_object,
        _At.KEY_OR_END: _take_key_or_end,
        _At.COLON: _take_colon,
        _At.VALUE: _take_value,
        _At.AFTER: _take_after,
    }


class JsonCalls:
    """The format of models whose template shows calls as JSON objects.

    `text_arguments`: the template writes arguments that are a string as they are, so a call in a message can keep the model's own
    spelling, byte for byte.
    """

    name = "json"
    opening = OPENING

    def __init__(self, *, text_arguments: bool = False) -> None:
        self._text_arguments = text_arguments

    def new_parser(self, functions: Mapping[str, Function]) -> JsonCallParser:
        return JsonCallParser(functions)

    def history_arguments(self, arguments: str) -> Any:
        value = json.loads(arguments)
        if not isinstance(value, dict):
            raise ValueError(f"expected a JSON object, found {arguments[:80]!r}")
        return arguments if self._text_arguments else value

    def rules(self, function: Function, number: int) -> list[str]:
        head = json.dumps(f'{OPENING}\n{{"name": {json.dumps(function.name)}, "arguments": ')
        tail = json.dumps(f"}}\n{CLOSING}")
        return [
            f"call_{number}: {head} arguments_{number} {tail}",
            f"arguments_{number}: {arguments_rule(function)}",
        ]


def _read_string(raw: str) -> str | None:
    try:
        value = json.loads(f'"{raw}"')
    except ValueError:
        return None
    return value if isinstance(value, str) else None
