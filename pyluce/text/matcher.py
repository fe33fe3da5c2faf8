"""Finds the first of several strings in a text that arrives in pieces."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple


class Match(NamedTuple):
    """A pattern that was found, and the part of the fed piece that follows it."""

    pattern: str
    rest: str


class Matcher:
    """An Aho-Corasick automaton over characters that also says which text is safe to show.

    The pattern whose *last* character comes first wins; of patterns that end at the same character the longest wins. Text that may
    still become the beginning of a pattern is held back, at most one character less than the longest pattern. A character costs
    amortised constant time, whatever came before it.
    """

    def __init__(self, patterns: Sequence[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._fail = [0]
        self._depth = [0]
        self._found: list[str | None] = [None]
        for pattern in patterns:
            self._insert(pattern)
        self._link()
        self._state = 0
        self._held = ""

    def feed(self, text: str) -> tuple[str, Match | None]:
        """Take the next piece; return the text that no pattern can contain any more, and the match that ended in this piece.

        After a match the matcher is back in its initial state; feed the match's `rest` where it belongs.
        """
        buffer = self._held + text
        state = self._state
        for index in range(len(self._held), len(buffer)):
            state = self._advance(state, buffer[index])
            found = self._found[state]
            if found is not None:
                self._state, self._held = 0, ""
                end = index + 1
                return buffer[: end - len(found)], Match(found, buffer[end:])
        keep = self._depth[state]
        self._state, self._held = state, buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep], None

    def flush(self) -> str:
        """Return the text held back, because nothing follows it; the matcher is back in its initial state."""
        held, self._state, self._held = self._held, 0, ""
        return held

    def _insert(self, pattern: str) -> None:
        if not pattern:
            raise ValueError("a pattern must not be empty")
        node = 0
        for character in pattern:
            following = self._next[node].get(character)
            if following is None:
                following = len(self._next)
                self._next[node][character] = following
                self._next.append({})
                self._fail.append(0)
                self._depth.append(self._depth[node] + 1)
                self._found.append(None)
            node = following
        self._found[node] = pattern

    def _link(self) -> None:
        pending = deque(self._next[0].values())
        while pending:
            node = pending.popleft()
            for character, following in self._next[node].items():
                pending.append(following)
                self._fail[following] = self._advance(self._fail[node], character)
            if self._found[node] is None:
                self._found[node] = self._found[self._fail[node]]

    def _advance(self, state: int, character: str) -> int:
        while True:
            following = self._next[state].get(character)
            if following is not None:
                return following
            if state == 0:
                return 0
            state = self._fail[state]
