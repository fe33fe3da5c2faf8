"""Calls written with a tag for each argument: `<tool_call><function=f><parameter=x>value</parameter></function></tool_call>`."""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping
from typing import Any, Final

from pyluce.text.matcher import Matcher
from pyluce.text.schema import ANNOTATIONS, DEFINITIONS, SchemaError
from pyluce.text.tools.functions import Function
from pyluce.text.tools.grammar import value_rule
from pyluce.text.tools.protocols import CallStatus, Taken
from pyluce.text.tools.values import ValueWriter, make_writer

OPENING: Final = "<tool_call>"
CLOSING: Final = "</tool_call>"
FUNCTION: Final = "<function="
FUNCTION_END: Final = "</function>"
PARAMETER: Final = "<parameter="
PARAMETER_END: Final = "</parameter>"

_LONGEST_NAME: Final = 512
_SPACE: Final = " \t\r\n"
_FREE_TEXT: Final = ANNOTATIONS | {"type"}


class _At(enum.Enum):
    FUNCTION = enum.auto()
    NAME = enum.auto()
    NEXT = enum.auto()
    KEY = enum.auto()
    VALUE = enum.auto()


class XmlCallParser:
    """Reads the tags; white space between them does not matter. A parameter that comes twice breaks the call.

    The arguments become a JSON object whose values have the types that the function declares (see `values`).
    """

    closing: tuple[str, ...] = (CLOSING,)

    def __init__(self, functions: Mapping[str, Function]) -> None:
        self._functions = functions
        self._function: Function | None = None
        self._at = _At.FUNCTION
        self._seen = ""  # the beginning of a tag, or of the name inside one
        self._keys: set[str] = set()
        self._writer: ValueWriter | None = None
        self._end = Matcher([PARAMETER_END])
        self._unreported: list[str] = []
        self._arguments: list[str] = []
        self._complete = False

    @property
    def name(self) -> str | None:
        return self._function.name if self._function else None

    def feed(self, text: str) -> Taken:
        at = 0
        while at < len(text) and not self._complete:
            if self._at is _At.VALUE:
                fits, text = self._take_value(text[at:])
                at = 0
            else:
                fits = self._take_markup(text[at])
                at += fits
            if not fits:
                return self._taken(CallStatus.BROKEN, text[at:])
        return self._taken(CallStatus.COMPLETE if self._complete else CallStatus.OPEN, text[at:])

    def unreported(self) -> str:
        held = self._writer.held + self._end.flush() if self._writer else ""
        return "".join(self._unreported) + held

    def _taken(self, status: CallStatus, rest: str) -> Taken:
        arguments, self._arguments = "".join(self._arguments), []
        return Taken(arguments, status, rest)

    def _report(self, arguments: str) -> None:
        self._arguments.append(arguments)
        self._unreported.clear()

    def _take_value(self, text: str) -> tuple[bool, str]:
        """Whether the text fits, and what of it follows the value; what does not fit is at the beginning of that."""
        assert self._writer is not None
        if self._writer.ends_itself(text):
            written, taken = self._writer.feed(text)
            self._arguments.append(written)
            return taken == len(text) or not self._writer.ends_itself(text[taken:]), text[taken:]
        safe, match = self._end.feed(text)
        written, taken = self._writer.feed(safe)
        self._arguments.append(written)
        after = match.pattern + match.rest if match else ""
        if taken < len(safe):
            return False, safe[taken:] + (after or self._end.flush())
        if match is None:
            return True, ""
        last = self._writer.end()
        if last is None:
            return False, after
        self._arguments.append(last)
        self._writer = None
        self._at = _At.NEXT
        return True, match.rest

    def _take_markup(self, character: str) -> bool:
        if not self._seen and self._at in (_At.FUNCTION, _At.NEXT) and character in _SPACE:
            self._unreported.append(character)
            return True
        before, self._seen = self._seen, self._seen + character
        self._unreported.append(character)
        if self._at is _At.FUNCTION:
            fits = self._take_tag({FUNCTION: _At.NAME})
        elif self._at is _At.NEXT:
            fits = self._take_tag({PARAMETER: _At.KEY, FUNCTION_END: _At.NEXT})
        else:
            fits = self._end_name() if character == ">" else character not in "<\n" and len(before) < _LONGEST_NAME
        if not fits:
            self._unreported.pop()
        return fits

    def _take_tag(self, tags: Mapping[str, _At]) -> bool:
        following = tags.get(self._seen)
        if following is None:
            return any(tag.startswith(self._seen) for tag in tags)
        if self._seen == FUNCTION_END:
            self._report("}" if self._keys else "{}")
            self._complete = True
        self._at, self._seen = following, ""
        return True

    def _end_name(self) -> bool:
        name, self._seen = self._seen[:-1].strip(), ""
        if self._at is _At.NAME:
            self._function = self._functions.get(name)
            if self._function is None:
                return False
            self._at = _At.NEXT
            self._unreported.clear()
            return True
        if self._function is None or not name or name in self._keys:
            return False
        self._report((", " if self._keys else "{") + json.dumps(name, ensure_ascii=False) + ": ")
        self._keys.add(name)
        self._writer = make_writer(self._function.kinds(name))
        self._at = _At.VALUE
        return True


class XmlCalls:
    """The format of models whose template shows calls as tags."""

    name = "xml"
    opening = OPENING

    def new_parser(self, functions: Mapping[str, Function]) -> XmlCallParser:
        return XmlCallParser(functions)

    def history_arguments(self, arguments: str) -> Any:
        value = json.loads(arguments)
        if not isinstance(value, dict):
            raise ValueError(f"expected a JSON object, found {arguments[:80]!r}")
        return value

    def rules(self, function: Function, number: int) -> list[str]:
        head = json.dumps(f"{OPENING}\n{FUNCTION}{function.name}>\n")
        tail = json.dumps(f"{FUNCTION_END}\n{CLOSING}")
        required = function.parameters.get("required", [])
        names, rules = [], []
        for index, key in enumerate(function.parameters.get("properties", {})):
            rule = f"parameter_{number}_{index}"
            names.append(rule if key in required else f"{rule}?")
            rules += _parameter_rules(function, key, rule)
        return [f"call_{number}: {' '.join([head, *names, tail])}", *rules]


def _parameter_rules(function: Function, key: str, rule: str) -> list[str]:
    """The rules of one parameter. Strings are free text up to the closing tag, unless the schema lists them."""
    head, line, tail = (json.dumps(text) for text in (f"{PARAMETER}{key}>\n", "\n", f"\n{PARAMETER_END}\n"))
    field = f"{function.name}.parameters.properties.{key}"
    schema, kinds = function.schema_of(key), function.kinds(key)
    if "string" not in kinds:
        definitions = {name: function.parameters[name] for name in DEFINITIONS if name in function.parameters}
        value = value_rule(function, {**definitions, **schema}, field, {"type": sorted(kinds)})
        return [f"{rule}: {head} {rule}_value {tail}", f"{rule}_value: {value}"]
    listed = [schema["const"]] if "const" in schema else schema.get("enum")
    if listed is not None and all(isinstance(item, str) for item in listed):
        return [f"{rule}: {head} ({' | '.join(map(json.dumps, listed))}) {tail}"]
    narrow = [keyword for keyword in schema if keyword not in _FREE_TEXT]
    if function.strict and narrow:
        raise SchemaError(f"{field}.{narrow[0]}: the model's way to write calls cannot keep a string to this keyword")
    text = f"{rule}_text[suffix={json.dumps(PARAMETER_END)}]: /(?s:.*)/"
    return [f"{rule}: {head} {rule}_text {line}", text]
