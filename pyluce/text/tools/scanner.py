"""Checks a JSON object or array while it arrives, a piece at a time."""

from __future__ import annotations

import enum
import json
import re
from typing import Final

MAX_DEPTH: Final = 256

_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_SPACE = frozenset(" \t\r\n")
_HEX = frozenset("0123456789abcdefABCDEF")
_CLOSERS = {"{": "}", "[": "]"}
_WORDS = {"t": "true", "f": "false", "n": "null"}

# a number's parts: "-" sign, "0" leading zero, "i" integer, "." point, "f" fraction, "e" exponent mark, "s" its sign, "x" its digits
_NUMBER_STEPS: Final = {
    "-": {"0": "0", "9": "i"},
    "0": {".": ".", "e": "e"},
    "i": {"0": "i", "9": "i", ".": ".", "e": "e"},
    ".": {"0": "f", "9": "f"},
    "f": {"0": "f", "9": "f", "e": "e"},
    "e": {"0": "x", "9": "x", "-": "s", "+": "s"},
    "s": {"0": "x", "9": "x"},
    "x": {"0": "x", "9": "x"},
}
_NUMBER_ENDS = frozenset("0ifx")


class _At(enum.Enum):
    ROOT = enum.auto()
    VALUE = enum.auto()
    FIRST_ITEM = enum.auto()  # a value, or the end of an empty array
    FIRST_KEY = enum.auto()  # a key, or the end of an empty object
    KEY = enum.auto()
    COLON = enum.auto()
    AFTER = enum.auto()  # a comma, or the end of the container
    STRING = enum.auto()
    ESCAPE = enum.auto()
    HEX = enum.auto()
    NUMBER = enum.auto()
    WORD = enum.auto()


class JsonScanner:
    """Accepts the characters of one JSON object (or array, with `"["` among `roots`) and no others.

    One rule is laxer than JSON's: a control character inside a string, such as a line break that should have been escaped, is accepted and
    escaped in what `feed` returns. A character costs constant time.
    """

    def __init__(self, roots: str = "{") -> None:
        self._roots = roots
        self._closers: list[str] = []
        self._at = _At.ROOT
        self._in_key = False
        self._hex_left = 0
        self._number = ""
        self._word_left = ""
        self._done = False
        self._failed = False

    @property
    def done(self) -> bool:
        """The value is complete."""
        return self._done

    @property
    def failed(self) -> bool:
        """A character came that cannot continue the value."""
        return self._failed

    def feed(self, text: str, begin: int = 0) -> tuple[str, int]:
        """Take characters of `text` from `begin` on, up to the end of the value or the first one that does not fit.

        Returns what was taken, as valid JSON text, and the index of the first character that was not.
        """
        parts: list[str] = []
        start = at = begin
        while at < len(text) and not self._done and not self._failed:
            if self._at is _At.STRING:
                match = _PLAIN.match(text, at)
                at = match.end() if match else at
                if at == len(text):
                    break
                if text[at] < " ":
                    parts += (text[start:at], json.dumps(text[at])[1:-1])
                    start = at = at + 1
                    continue
            if self._take(text[at]):
                at += 1
            else:
                self._failed = True
        parts.append(text[start:at])
        return "".join(parts), at

    def _take(self, character: str) -> bool:
        if self._at is _At.STRING:
            return self._take_in_string(character)
        if self._at is _At.ESCAPE:
            return self._take_escape(character)
        if self._at is _At.HEX:
            self._hex_left -= 1
            self._at = _At.HEX if self._hex_left else _At.STRING
            return character in _HEX
        if self._at is _At.WORD:
            expected, self._word_left = self._word_left[0], self._word_left[1:]
            self._at = _At.WORD if self._word_left else _At.AFTER
            return character == expected
        if self._at is _At.NUMBER:
            if self._take_digit(character):
                return True
            if self._number not in _NUMBER_ENDS:
                return False
            self._at = _At.AFTER
        return character in _SPACE or self._take_structure(character)

    def _take_in_string(self, character: str) -> bool:
        if character == "\\":
            self._at = _At.ESCAPE
        else:
            self._at = _At.COLON if self._in_key else _At.AFTER
        return True

    def _take_escape(self, character: str) -> bool:
        if character == "u":
            self._at, self._hex_left = _At.HEX, 4
            return True
        self._at = _At.STRING
        return character in '"\\/bfnrt'

    def _take_digit(self, character: str) -> bool:
        kind = "e" if character == "E" else "9" if character in "123456789" else character
        step = _NUMBER_STEPS[self._number].get(kind)
        if step is None:
            return False
        self._number = step
        return True

    def _take_structure(self, character: str) -> bool:
        at = self._at
        if at is _At.ROOT:
            return character in self._roots and self._open(character)
        if at is _At.COLON:
            self._at = _At.VALUE
            return character == ":"
        if at is _At.AFTER:
            if character == ",":
                self._at = _At.KEY if self._closers[-1] == "}" else _At.VALUE
                return True
            return self._close(character)
        if at is _At.KEY or at is _At.FIRST_KEY:
            if character == '"':
                self._at, self._in_key = _At.STRING, True
                return True
            return at is _At.FIRST_KEY and self._close(character)
        if at is _At.FIRST_ITEM and character == "]":
            return self._close(character)
        return self._begin_value(character)

    def _begin_value(self, character: str) -> bool:
        if character in _CLOSERS:
            return self._open(character)
        if character == '"':
            self._at, self._in_key = _At.STRING, False
        elif character in _WORDS:
            self._at, self._word_left = _At.WORD, _WORDS[character][1:]
        elif character == "-" or ("0" <= character <= "9"):
            self._at = _At.NUMBER
            self._number = character if character in "-0" else "i"
        else:
            return False
        return True

    def _open(self, character: str) -> bool:
        self._closers.append(_CLOSERS[character])
        self._at = _At.FIRST_KEY if character == "{" else _At.FIRST_ITEM
        return len(self._closers) <= MAX_DEPTH

    def _close(self, character: str) -> bool:
        if character != self._closers[-1]:
            return False
        self._closers.pop()
        self._at = _At.AFTER
        self._done = not self._closers
        return True
