"""How many chunks of a prompt are computed at once where nobody asks for a number: two, if two GPUs gain by it and kept prompts lose nothing."""

from __future__ import annotations

from typing import Final

from pyluce.memory.machine import Machine
from pyluce.memory.rows import CAP_SLOTS

AUTOMATIC: Final = 0
AUTOMATIC_STREAMS: Final = 2
"""Two equal GPUs gain 1.4 times with two, nothing more with four (docs/measurements.md)."""
SMALLEST_ROWS: Final = 1024
"""Rows of a chunk from which the reference system computes several at once."""


def against_streams(machine: Machine, n_slots: int, n_ctx: int, chunk: int) -> str | None:
    """Why prompts run in one stream whatever memory there is; None where two may be had. chunk 0: the planner chooses the rows."""
    if machine.expert is None:
        return "one device"
    if not machine.two_gpus:
        return f"the host waits for each layer between {machine.target.name} and {machine.expert.name}"
    rows = chunk or n_ctx // AUTOMATIC_STREAMS
    if rows < SMALLEST_ROWS:
        what = f"chunks of {rows:,} rows" if chunk else f"half a context of {n_ctx:,} tokens"
        return f"{what}, two streams need {SMALLEST_ROWS:,}"
    if chunk >= n_ctx:
        return "a whole context is one chunk"
    if n_slots > 1 and AUTOMATIC_STREAMS * chunk > CAP_SLOTS:
        return f"two chunks of {chunk:,} rows would keep other slots waiting, at most {CAP_SLOTS:,} rows may"
    return None
