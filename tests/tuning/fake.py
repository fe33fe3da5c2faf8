"""Choices of a device that is not there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pyluce.native.tune import TuneKind

Key = tuple[TuneKind, int, int, int, int, int]


class FakeChoices:
    """Has the same candidates for every product of a kind."""

    driver = 12080

    def __init__(self, candidates: Mapping[TuneKind, Sequence[int]]) -> None:
        self._candidates = candidates
        self.chosen: dict[Key, int] = {}

    def candidates(self, kind: TuneKind, type_id: int, k: int, m: int, n_used: int, rows: int) -> list[int]:
        assert rows == 0 if kind is TuneKind.ROW else rows >= 16
        return list(self._candidates[kind])

    def choose(self, kind: TuneKind, type_id: int, k: int, m: int, n_used: int, rows: int, value: int) -> bool:
        if value not in self._candidates[kind]:
            return False
        self.chosen[kind, type_id, k, m, n_used, rows] = value
        return True

    def clear(self) -> None:
        self.chosen.clear()
