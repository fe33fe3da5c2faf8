"""The registers of waves that run in step: one array element per wave, or per wave and lane."""

from __future__ import annotations

from typing import Any

import numpy as np

U32 = np.uint32
LANES = 32
# numbers of the special scalar registers in the encoding of operands
VCC, M0, NULL, EXEC = 106, 125, 124, 126
SGPRS = 128


class Waves:
    """``n`` waves at one program counter. ``v[r]`` is vector register r, [n, 32] of uint32 (``f``: as float32); ``s[r]``
    scalar register r, [n], ``c[r]`` the same as a column [n, 1] to combine with vectors."""

    def __init__(self, machine: Any, vectors: np.ndarray, scalars: np.ndarray, scc: np.ndarray, index: Any) -> None:
        self.machine = machine
        self.vectors, self.scalars = vectors, scalars
        self.n = scalars.shape[1]
        self.v = list(vectors)
        self.f = list(vectors.view(np.float32))
        self.s = list(scalars)
        self.c = list(scalars[:, :, None])
        self.scc = scc
        self.index = index  # which waves of the machine these are
        self.groups: np.ndarray = machine.group_of[index]  # workgroup of each wave, counted in the machine
        self.index_array: np.ndarray = machine.wave_ids[index]
        self.all_lanes = machine.lane_ids[: self.n * LANES]
        self.first_lanes = machine.first_lanes[: self.n]
        self.full = False
        self._mask: Any = None
        self.exec_changed()

    def exec_changed(self) -> None:
        self.full = bool((self.s[EXEC] == 0xFFFFFFFF).all())
        self._mask = None

    @property
    def mask(self) -> np.ndarray:
        """Active lanes, [n, 32] of bool."""
        if self._mask is None:
            self._mask = self.bits(EXEC)
        return self._mask

    def bits(self, register: int) -> np.ndarray:
        """A scalar register as lanes, [n, 32] of bool."""
        return unpack(self.s[register])

    def put(self, register: int, value: Any) -> None:
        """Write a vector register in the active lanes (integers of any type, reduced to 32 bits)."""
        if self.full:
            self.v[register][...] = value
        else:
            np.copyto(self.v[register], value, where=self.mask, casting="unsafe")

    def put_scalar(self, register: int, value: Any) -> None:
        if register == NULL:
            return
        self.s[register][...] = value
        if register == EXEC:
            self.exec_changed()

    def put_lanes(self, register: int, lanes: Any) -> None:
        """Write a mask register from one bool per lane; inactive lanes give 0."""
        if lanes.shape != (self.n, LANES):
            lanes = np.broadcast_to(lanes, (self.n, LANES))
        if not self.full:
            lanes = lanes & self.mask
        self.put_scalar(register, pack(lanes))


def unpack(values: np.ndarray) -> np.ndarray:
    """[n] of uint32 -> [n, 32] of bool, bit 0 first."""
    octets = np.ascontiguousarray(values).view(np.uint8).reshape(-1, 4)
    return np.unpackbits(octets, axis=1, bitorder="little").view(bool)


def pack(lanes: np.ndarray) -> np.ndarray:
    """[n, 32] of bool -> [n] of uint32."""
    return np.packbits(lanes, axis=1, bitorder="little").view(U32).reshape(-1)
