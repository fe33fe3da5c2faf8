"""What to draft with and how far, checked before any work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

MAX_WIDTH: Final = 8
MAX_DRAFTS: Final = MAX_WIDTH - 1
SOURCES: Final = ("mtp", "lookup")
ROW_BUDGET: Final = 32


@dataclass(frozen=True, slots=True)
class SpecOptions:
    """How to speculate. A width counts rows: the next token and its drafts.

    * sources: of the drafts: "mtp" (the model's head), "lookup" (what followed the last tokens earlier in the text), or both.
    * width: 0 is adaptive, 1 off, 2 to 8 fixed.

    Raises ValueError naming the field.
    """

    sources: tuple[str, ...] = ()
    width: int = 0

    def __post_init__(self) -> None:
        check_sources(self.sources)
        check_width(self.width)

    @property
    def enabled(self) -> bool:
        """Drafts are made."""
        return bool(self.sources) and self.width != 1

    @property
    def max_drafts(self) -> int:
        """Drafts of one sequence in one step at most: what the state must be able to take back."""
        if not self.enabled:
            return 0
        return MAX_DRAFTS if self.width == 0 else self.width - 1


def check_sources(sources: Sequence[str]) -> None:
    """Raise ValueError for an unknown source, or one that is named twice."""
    for name in sources:
        if name not in SOURCES:
            raise ValueError(f"spec: expected some of {', '.join(SOURCES)}, found {name!r}")
    if len(set(sources)) != len(sources):
        raise ValueError(f"spec: expected each source once, found {','.join(sources)}")


def check_width(width: object) -> None:
    """Raise ValueError unless `width` is 0 to 8."""
    if isinstance(width, bool) or not isinstance(width, int):
        raise ValueError(f"verify_width: expected an integer, found {type(width).__name__}")
    if not 0 <= width <= MAX_WIDTH:
        raise ValueError(f"verify_width: expected 0 (adaptive), 1 (off) or 2 to {MAX_WIDTH}, found {width}")


def parse_sources(text: str) -> tuple[str, ...]:
    """The sources of a comma-separated list; "off" is none."""
    if text.strip() == "off":
        return ()
    sources = tuple(part.strip() for part in text.split(","))
    check_sources(sources)
    return sources
