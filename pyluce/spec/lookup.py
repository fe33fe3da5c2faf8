"""Prompt lookup: a text that repeats itself says what comes next. No model, no state on a device."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

NGRAM: Final = 3


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

    def draft(self, count: int) -> list[int]:
        """Up to `count` tokens that may follow; none when the last tokens are new.

        What followed may run into the end of the sequence; then the drafts themselves are what follows, as in a text that repeats.
        """
        known = len(self._tokens)
        start = self._followers.get(tuple(self._tokens[-NGRAM:])) if known >= NGRAM else None
        if start is None:
            return []
        out: list[int] = []
        for at in range(start, start + count):
            out.append(self._tokens[at] if at < known else out[at - known])
        return out

    def _remember(self) -> None:
        """What stands before the token that is about to come is followed by its place."""
        if len(self._tokens) >= NGRAM:
            self._followers[tuple(self._tokens[-NGRAM:])] = len(self._tokens)
