"""The thinking budget: reasoning that has used it up is ended by the engine, so that an answer follows.

Ending it means that the next tokens are not chosen but given: the tokens that end the reasoning in the model's own template. They are fed
like any other token, a row each, so the rows after them are what the model computes for a text in which it had stopped by itself, and
every schedule gives the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from pyluce.engine.errors import RequestError
from pyluce.text.stream import ReasoningMarkers

LARGEST_ANSWER_ROOM: Final = 8192


def reasoning_limit(budget: int | None, max_tokens: int, n_end: int) -> int | None:
    """How many tokens the reasoning may have: the budget, or less so that room for the answer remains.

    The room is a quarter of `max_tokens`, at most 8,192 tokens and at least one, besides the `n_end` tokens that end the reasoning.
    None without a budget: then the reasoning may take all of `max_tokens`, and the answer ends with `length`.
    """
    if budget is None:
        return None
    room = max(1, min(LARGEST_ANSWER_ROOM, max_tokens // 4))
    return min(budget, max(0, max_tokens - n_end - room))


def check_budget(budget: object, end: Sequence[int], reasoning: ReasoningMarkers | None) -> None:
    """Raise RequestError for a budget that cannot be kept."""
    if isinstance(budget, bool) or not isinstance(budget, int):
        raise RequestError(f"thinking_budget: expected an integer, found {type(budget).__name__}")
    if budget < 0:
        raise RequestError(f"thinking_budget: expected at least 0, found {budget}")
    if reasoning is None:
        raise RequestError("thinking_budget: expected with an answer that may reason only")
    if not end:
        raise RequestError("thinking_budget: expected the tokens that end the reasoning (thinking_end), found none")


class ThinkingBudget:
    """Counts the tokens of the reasoning, and gives those that end it."""

    def __init__(self, limit: int | None, end: Sequence[int]) -> None:
        """`limit`: None for none; `end`: the tokens that end the reasoning."""
        self._limit = limit
        self._end = tuple(end)
        self._given = 0
        self._count = 0

    @property
    def count(self) -> int:
        """Tokens of the reasoning so far, its end marker included."""
        return self._count

    @property
    def giving(self) -> bool:
        """The end was begun and is not complete."""
        return 0 < self._given < len(self._end)

    def next_token(self, in_reasoning: bool) -> int | None:
        """The token that must come next, or None when it is to be chosen. `in_reasoning`: the text so far ends inside the reasoning."""
        over = in_reasoning and self._limit is not None and self._count >= self._limit
        self._count += in_reasoning
        if not self.giving and not (over and self._given == 0):
            return None
        self._given += 1
        return self._end[self._given - 1]
