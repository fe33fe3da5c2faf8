"""Rows of a step by the sequence that they belong to."""

from __future__ import annotations

from collections.abc import Sequence

from pyluce.state import SequenceState

Group = tuple[SequenceState, list[int]]


def check_tokens(tokens: Sequence[int], n_vocab: int) -> None:
    """Raise ValueError, naming the first, for an id that the vocabulary does not have."""
    if not tokens or (min(tokens) >= 0 and max(tokens) < n_vocab):
        return
    for i, token in enumerate(tokens):
        if not 0 <= token < n_vocab:
            raise ValueError(f"token {i}: expected an id from 0 to {n_vocab - 1}, found {token}")


def group_rows(rows: Sequence[tuple[SequenceState, int]]) -> tuple[list[Group], list[int]]:
    """Rows by sequence, and where each of the rows so ordered stood."""
    if len(rows) == 1:
        state, token = rows[0]
        return [(state, [token])], [0]
    groups: dict[int, Group] = {}
    places: dict[int, list[int]] = {}
    for i, (state, token) in enumerate(rows):
        slot = state.slot
        if slot in groups:
            groups[slot][1].append(token)
            places[slot].append(i)
        else:
            groups[slot] = (state, [token])
            places[slot] = [i]
    if len(groups) == len(rows):
        return list(groups.values()), list(range(len(rows)))
    return list(groups.values()), [i for slot in groups for i in places[slot]]
