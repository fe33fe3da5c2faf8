"""Things that are closed once, in the reverse of the order in which they were made."""

from __future__ import annotations

from typing import Protocol, TypeVar


class Closable(Protocol):
    """Something that is closed once."""

    def close(self) -> None:
        """Free it."""


C = TypeVar("C", bound=Closable)
