"""The state of sequences: where it lies, who owns which part, how it is cleared, rolled back and copied."""

from __future__ import annotations

from pyluce.state.layout import StateOptions, state_bytes
from pyluce.state.pages import OutOfPagesError, PageTable
from pyluce.state.pool import StatePool
from pyluce.state.prefix_cache import CacheStats, PrefixCache
from pyluce.state.sequence_state import RollbackError, SequencePart, SequenceState
from pyluce.state.snapshot import Snapshot
from pyluce.state.store import SnapshotStore, automatic_budget, cache_pages

__all__ = [
    "CacheStats",
    "OutOfPagesError",
    "PageTable",
    "PrefixCache",
    "RollbackError",
    "SequencePart",
    "SequenceState",
    "Snapshot",
    "SnapshotStore",
    "StateOptions",
    "StatePool",
    "automatic_budget",
    "cache_pages",
    "state_bytes",
]
