"""What our kernels take on an H200, for the model of two devices. The one place to change when kernels change: docs/measurements.md has the tables.

Random model of the real widths, 12 layers, Q8_0 dense, Q4_K and IQ4_NL experts. Row products are timed alone, from memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from bench.split_parameters import (
    EXPERT_BYTES,
    HC_WEIGHTS,
    HEAD_WEIGHTS,
    MS,
    N_EMBD,
    N_EXPERT,
    N_USED,
    Q8,
    SHARED_WEIGHTS,
    US,
)

MEASURED_LAYERS: Final = 12
ROWS: Final = (1, 4, 8)


@dataclass(frozen=True, slots=True)
class Product:
    """Products of a layer that follow each other: seconds with each of `ROWS` rows, and the bytes of weights that one row reads."""

    seconds: tuple[float, float, float]
    n_bytes: float

    def of(self, rows: float) -> float:
        """Seconds with so many rows, 1 to 8: straight lines between what was measured."""
        (a, b, c), (x, y, z) = self.seconds, ROWS
        return a + (b - a) * (rows - x) / (y - x) if rows <= y else b + (c - b) * (rows - y) / (z - y)


# The general kernel's, which AMD devices take (0b0b1a2): the table of row products has them in its last column; what came later is NVIDIA's alone
LAUNCHES: Final = 193 / MEASURED_LAYERS  # of a layer, the head's shared among them
STEPS: Final = {
    1: 1.74 * MS,
    4: 2.88 * MS,
}  # whole steps with their host's part, what the model is checked with
INPUT: Final = Product((15.8 * US, 23.2 * US, 40.6 * US), 45e6)  # of a GDN layer; taken for full attention's as well
OUTPUT: Final = Product((10.6 * US, 20.5 * US, 29.5 * US), 6144 * N_EMBD * Q8)
MIXES: Final = Product(
    (2 * 11.2 * US, 2 * 17.7 * US, 2 * 22.4 * US), HC_WEIGHTS * Q8
)  # down, up and mix of both hyper-connections
ROUTER: Final = Product((4.8 * US, 7.8 * US, 10.8 * US), N_EMBD * N_EXPERT * 4)
EXPERTS: Final = Product(
    (26.4 * US, 61.7 * US, 101.4 * US), N_USED * EXPERT_BYTES
)  # gate, up and down, the shared expert's among them
HEAD: Final = Product((175 * US, 202 * US, 432 * US), HEAD_WEIGHTS * Q8)
# without routed ones beside it: one row at 5a95d42; four and eight not measured, they grow as the hyper-connections' down (6.0, 11.2, 15.7)
SHARED: Final = Product((11.9 * US, 11.9 * 11.2 / 6.0 * US, 11.9 * 15.7 / 6.0 * US), SHARED_WEIGHTS * Q8)

# "Where a prefill chunk of 8,192 goes", 9e64a77 (0b0b1a2 reads as many tokens a second): seconds of 12 layers
CHUNK_ROWS: Final = 8192
CHUNK: Final = 275 * MS
CHUNK_DENSE: Final = 61 * MS
CHUNK_EXPERTS: Final = 87 * MS
CHUNK_STREAMS: Final = 20 * MS  # hyper-connections and sums
CHUNK_REST: Final = (
    CHUNK - CHUNK_DENSE - CHUNK_EXPERTS - CHUNK_STREAMS
)  # GDN 38, attention 19, everything that the table does not name
