"""Prompt lookup: a text that repeats itself says what comes next. No model, no state on a device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

NGRAM: Final = 3
LONG_MATCH: Final = 8


@dataclass(frozen=True, slots=True)
class Match:
    """Drafts, and how many tokens before them stood there as well: `NGRAM` to `LONG_MATCH`, which stands for any number beyond."""

    tokens: list[int]
    length: int

    @property
    def long(self) -> bool:
        """So much was the same that what follows probably is."""
        return self.length >= LONG_MATCH


class PromptLookup:
    """Finds where the last `NGRAM` tokens of a sequence stood before, the latest such place, and drafts what followed there."""

    def __init__(self, tokens: Iterable[int]) -> None:
        """`tokens`: the sequence so far, at any length."""
        self._tokens: list[int] = []
        self._followers: dict[tuple[int, ...], int] = {}
        self.extend(tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """The sequence goes on with these."""
        for token in tokens:
            self._remember()
            self._tokens.append(token)

    def draft(self, count: int, after: Sequence[int] = ()) -> Match | None:
        """Up to `count` tokens that may follow the sequence and `after`, which are drafts themselves; None when its last tokens are new.

        What followed may run into the end of the sequence; then the drafts themselves are what follows, as in a text that repeats.
        """
        known = len(self._tokens)
        if count <= 0 or known < NGRAM:
            return None
        tail = [*self._tokens[-LONG_MATCH:], *after]
        start = self._followers.get(tuple(tail[-NGRAM:]))
        if start is None:
            return None
        length = NGRAM
        while length < min(LONG_MATCH, len(tail), start) and self._tokens[start - 1 - length] == tail[-1 - length]:
            length += 1
        follow = [*after]
        first = len(follow)
        for at in range(start, start + count):
            follow.append(self._tokens[at] if at < known else follow[at - known])
        return Match(follow[first:], length)

    def _remember(self) -> None:
        """What stands before the token that is about to come is followed by its place."""
        if len(self._tokens) >= NGRAM:
            self._followers[tuple(self._tokens[-NGRAM:])] = len(self._tokens)
