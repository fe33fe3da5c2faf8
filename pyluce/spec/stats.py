"""What speculation did so far: plain numbers, published with the engine's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType


def _empty() -> Mapping[int, int]:
    return MappingProxyType({})


@dataclass(frozen=True, slots=True)
class SourceStats:
    """One source of drafts. By depth, from 1: drafts that were verified after all before them were accepted, and those accepted."""

    drafted: int = 0
    reached: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class SpecStats:
    """Counters never fall.

    * sources: by name. widths: steps of a sequence by how many rows it had.
    * step_seconds: measured mean time of a row graph by its rows; draft_seconds: of drafting by its depth; both of the shortest
      context range that was measured.
    """

    width: int = 1
    sources: Mapping[str, SourceStats] = field(default_factory=lambda: MappingProxyType({}))
    widths: Mapping[int, int] = field(default_factory=_empty)
    step_seconds: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))
    draft_seconds: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def drafted(self) -> int:
        """Drafts that were verified."""
        return sum(source.drafted for source in self.sources.values())

    @property
    def accepted(self) -> int:
        """Drafts that became part of an answer."""
        return sum(sum(source.accepted) for source in self.sources.values())
