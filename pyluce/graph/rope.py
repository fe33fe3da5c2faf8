"""Rotation angles of positions."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt


class RopeTable:
    """cos | sin of every position's angles, F32 [rope_dim] each, computed block by block when first needed.

    angle_i = position * base^(-2i / rope_dim) in float32, as the model's reference computes it; text positions are the
    same in all M-RoPE sections, so the sections do not matter.
    """

    BLOCK: Final = 4096

    def __init__(self, rope_dim: int, base: float) -> None:
        exponents = np.arange(0, rope_dim, 2, dtype=np.float32) / np.float32(rope_dim)
        self._frequency = (np.float32(1.0) / np.float32(base) ** exponents).astype(np.float32)
        self._blocks: dict[int, npt.NDArray[np.float32]] = {}

    def warm(self, first: int, count: int) -> None:
        """Compute the angles of these positions, so that filling them in is a copy. Any thread may."""
        for block in range(first // self.BLOCK, (first + count - 1) // self.BLOCK + 1):
            self._block(block)

    def fill(self, out: npt.NDArray[np.float32], first: int) -> None:
        """Rows of `out` [n, rope_dim] for the positions first .. first + n - 1."""
        done = 0
        while done < len(out):
            block, at = divmod(first + done, self.BLOCK)
            count = min(len(out) - done, self.BLOCK - at)
            out[done : done + count] = self._block(block)[at : at + count]
            done += count

    def fill_block_starts(self, out: npt.NDArray[np.float32], first: int, ratio: int) -> None:
        """Rows of `out` [n, rope_dim] for the first positions of the blocks of `ratio` that the rows lie in."""
        starts = np.arange(first, first + len(out)) // ratio * ratio
        for block in range(int(starts[0]) // self.BLOCK, int(starts[-1]) // self.BLOCK + 1):
            chosen = starts // self.BLOCK == block
            out[chosen] = self._block(block)[starts[chosen] % self.BLOCK]

    def fill_at(self, out: npt.NDArray[np.float32], positions: list[int]) -> None:
        """The first rows of `out` [T, rope_dim] for a few positions, at least one."""
        block = positions[0] // self.BLOCK
        if len(positions) > 3 and block == min(positions) // self.BLOCK == max(positions) // self.BLOCK:
            places = [position % self.BLOCK for position in positions]
            self._block(block).take(places, 0, out[: len(positions)], "clip")  # the default mode copies twice
            return
        for row, position in enumerate(positions):
            out[row] = self._block(position // self.BLOCK)[position % self.BLOCK]

    @property
    def n_bytes(self) -> int:
        """Bytes of the angles that were computed so far."""
        return sum(block.nbytes for block in self._blocks.values())

    def _block(self, index: int) -> npt.NDArray[np.float32]:
        if index not in self._blocks:
            positions = np.arange(index * self.BLOCK, (index + 1) * self.BLOCK, dtype=np.float32)
            angles = (positions[:, None] * self._frequency[None, :]).astype(np.float64)
            self._blocks[index] = np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
        return self._blocks[index]
