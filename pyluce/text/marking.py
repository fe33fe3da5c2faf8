"""Keeps text that only *looks* like a special token from being parsed as one.

A chat template mixes its own markup (`<|im_start|>`) with strings that users, tools and documents supply. Only the template's own
markup may become special tokens. So, before rendering, every place in a supplied string that spells a special token gets an
invisible mark behind its first character; after rendering the marks are taken out again, and a special token that contains a marked
character is literal text. Strings that spell no special token, nearly all of them, reach the template unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

# Unicode noncharacters: never assigned, so no text has a reason to hold them
_MARKS = [chr(code) for code in range(0xFDD0, 0xFDF0)]


class SpecialTexts:
    """The spellings of a vocabulary's special tokens."""

    def __init__(self, texts: Iterable[str]) -> None:
        self.texts = frozenset(text for text in texts if text)
        longest_first = sorted(self.texts, key=lambda text: (-len(text), text))
        self._pattern = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
        self._beginnings = frozenset(text[:size] for text in self.texts for size in range(1, len(text)))
        self._longest = len(longest_first[0]) if longest_first else 0

    def without(self, texts: Iterable[str]) -> SpecialTexts:
        """The same set less `texts`."""
        return SpecialTexts(self.texts.difference(texts))

    def find(self, text: str) -> list[tuple[int, int]]:
        """The places `(start, end)` in `text` that spell a special token: leftmost first, of several at one place the longest."""
        if self._pattern is None:
            return []
        return [match.span() for match in self._pattern.finditer(text)]

    def mark(self, text: str, mark: str) -> str:
        """`text` with `mark` behind the first character of each special token, and of the beginning of one at the very end."""
        starts = {start for start, _ in self.find(text)}
        for size in range(min(self._longest - 1, len(text)), 0, -1):
            if text[-size:] in self._beginnings:
                starts.add(len(text) - size)
        if not starts:
            return text
        cuts = [0, *(start + 1 for start in sorted(starts)), len(text)]
        return mark.join(text[begin:end] for begin, end in pairwise(cuts))


def choose_mark(*values: Any) -> str:
    """A character that occurs in no string of `values`. Raises ValueError when every candidate is taken."""
    present: set[str] = set()
    for text in _strings(values):
        present.update(character for character in _MARKS if character in text)
    for mark in _MARKS:
        if mark not in present:
            return mark
    raise ValueError(
        "the messages hold every one of the noncharacters U+FDD0 to U+FDEF, so none is left to mark literal text with"
    )


def map_strings(value: Any, change: Any) -> Any:
    """A copy of plain data (mappings, sequences, strings) with `change` applied to every string, keys included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {map_strings(key, change): map_strings(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [map_strings(item, change) for item in value]
    return value


def unmark(text: str, mark: str) -> tuple[str, list[int]]:
    """`text` without its marks, and for each mark the index of the character that it stood behind."""
    parts = text.split(mark)
    marked: list[int] = []
    length = 0
    for part in parts[:-1]:
        length += len(part)
        marked.append(length - 1)
    return "".join(parts), marked


def _strings(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _strings(item)
