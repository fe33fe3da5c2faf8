"""The state of sequences: where it lies, who owns which part, how it is cleared, rolled back and copied."""

from __future__ import annotations

from pyluce.state.pages import OutOfPagesError, PageTable
from pyluce.state.pool import StateOptions, StatePool
from pyluce.state.sequence_state import RollbackError, SequencePart, SequenceState

__all__ = [
    "OutOfPagesError",
    "PageTable",
    "RollbackError",
    "SequencePart",
    "SequenceState",
    "StateOptions",
    "StatePool",
]
