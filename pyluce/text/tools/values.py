"""Turns the plain text of a parameter's value into JSON text, while it arrives.

A template that writes arguments as text between tags writes strings as they are and everything else as JSON, so the text alone
does not say which it is: `12` is a number or a string. The declared types decide, and only where they allow both does the text.
"""

from __future__ import annotations

import json
import re
from typing import Final, Protocol

from pyluce.text.tools.scanner import JsonScanner

_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?", re.ASCII)
_WORDS: Final = {
    "true": ("boolean", "true"),
    "false": ("boolean", "false"),
    "null": ("null", "null"),
    "none": ("null", "null"),
}
_LONGEST_SCALAR: Final = 64
_CONTAINERS: Final = {"{": "object", "[": "array"}


class ValueWriter(Protocol):
    """Writes one value. A line break right after the opening tag and one right before the closing tag belong to the tags."""

    @property
    def held(self) -> str:
        """The text that was taken and not written yet."""

    def ends_itself(self, text: str) -> bool:
        """With `text` next, the value's own syntax says where it ends, so that a closing tag inside it is a part of it."""

    def feed(self, text: str) -> tuple[str, int]:
        """Take more of the value; return the JSON text that is certain, and how many characters could be taken: all, or the value is bad."""

    def end(self) -> str | None:
        """The value is over: the rest of the JSON text, or None when the value is bad."""


def make_writer(kinds: frozenset[str]) -> ValueWriter:
    """The writer for a parameter of these JSON types."""
    if kinds <= {"string"}:
        return StringWriter()
    return GuessWriter(kinds) if "string" in kinds else JsonWriter(kinds)


class StringWriter:
    """The text is the string."""

    def __init__(self) -> None:
        self._begun = False
        self._fresh = True
        self._newline = ""

    @property
    def held(self) -> str:
        return self._newline

    def ends_itself(self, text: str) -> bool:
        return False

    def feed(self, text: str) -> tuple[str, int]:
        taken = len(text)
        if self._fresh and text:
            text = text[1:] if text[0] == "\n" else text
            self._fresh = False
        text = self._newline + text
        self._newline = "\n" if text.endswith("\n") else ""
        text = text.removesuffix("\n")
        return (self._quote() + escape(text) if text else ""), taken

    def end(self) -> str | None:
        return self._quote() + '"'

    def _quote(self) -> str:
        begun, self._begun = self._begun, True
        return "" if begun else '"'


class JsonWriter:
    """The text is JSON, which is never a string; objects and arrays are written as they arrive. What is no JSON becomes a string."""

    def __init__(self, kinds: frozenset[str]) -> None:
        self._kinds = kinds
        self._scanner: JsonScanner | None = None
        self._held: list[str] = []
        self._blank = True

    @property
    def held(self) -> str:
        return "".join(self._held)

    def ends_itself(self, text: str) -> bool:
        if self._scanner is not None:
            return not self._scanner.done
        return self._blank and text.lstrip()[:1] in _CONTAINERS

    def feed(self, text: str) -> tuple[str, int]:
        begin = 0
        if self._scanner is None:
            begin = len(text) - len(text.lstrip())
            if not self.ends_itself(text):
                self._blank = self._blank and begin == len(text)
                self._held.append(text)
                return "", len(text)
            self._scanner = JsonScanner("{[")
            self._held.clear()
        written, taken = self._scanner.feed(text, begin)
        if self._scanner.done:
            taken = len(text) - len(text[taken:].lstrip())
        return written, taken

    def end(self) -> str | None:
        if self._scanner is None:
            text = self.held.strip()
            found = scalar(text, self._kinds)
            return found if found is not None else json.dumps(text, ensure_ascii=False)
        return "" if self._scanner.done else None


class GuessWriter:
    """A string, unless the whole text is JSON of another allowed type. Written as it arrives once it can only be a string."""

    def __init__(self, kinds: frozenset[str]) -> None:
        self._kinds = kinds
        self._string: StringWriter | None = None
        self._held: list[str] = []
        self._start = ""  # the beginning of the text, as long as it may be another type's
        self._container = False

    @property
    def held(self) -> str:
        return "".join(self._held) if self._string is None else self._string.held

    def ends_itself(self, text: str) -> bool:
        return False

    def feed(self, text: str) -> tuple[str, int]:
        if self._string is not None:
            return self._string.feed(text)
        self._held.append(text)
        if self._container or self._may_be_other(text):
            return "", len(text)
        self._string = StringWriter()
        written, _ = self._string.feed("".join(self._held))
        self._held.clear()
        return written, len(text)

    def end(self) -> str | None:
        if self._string is not None:
            return self._string.end()
        text = self.held
        found = container(text.strip(), self._kinds) if self._container else scalar(text.strip(), self._kinds)
        if found is not None:
            return found
        self._string = StringWriter()
        written, _ = self._string.feed(text)
        return written + (self._string.end() or "")

    def _may_be_other(self, text: str) -> bool:
        self._start += text[: _LONGEST_SCALAR + 1]
        start = self._start.strip()
        if len(self._start) > _LONGEST_SCALAR and not start:
            return False
        if start and start[0] in _CONTAINERS:
            self._container = _CONTAINERS[start[0]] in self._kinds
            return self._container
        if len(self._start) > _LONGEST_SCALAR:
            return False
        lower = start.lower()
        if any(word.startswith(lower) and kind in self._kinds for word, (kind, _) in _WORDS.items()):
            return True
        numeric = "number" in self._kinds or "integer" in self._kinds
        return numeric and all(character in "+-.0123456789eE" for character in start)


def escape(text: str) -> str:
    """`text` as it stands between the quotes of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def scalar(text: str, kinds: frozenset[str]) -> str | None:
    """`text` as a JSON number, boolean or null of an allowed type; None when it is none. Python's spellings count too."""
    word = _WORDS.get(text.lower())
    if word is not None and word[0] in kinds:
        return word[1]
    numeric = "number" in kinds or "integer" in kinds
    return text if numeric and _NUMBER.fullmatch(text) else None


def container(text: str, kinds: frozenset[str]) -> str | None:
    """`text` as a JSON object or array of an allowed type, or None."""
    scanner = JsonScanner("".join(opener for opener, kind in _CONTAINERS.items() if kind in kinds))
    written, taken = scanner.feed(text)
    return written if scanner.done and taken == len(text) else None
