"""Single instructions on registers that a test sets: what the per-instruction tests stand on."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import numpy as np

from tests.rdna.decode import decode
from tests.rdna.memory import Memory
from tests.rdna.program import Program
from tests.rdna.stats import Stats
from tests.rdna.waves import EXEC, LANES, SGPRS, Waves


def isa(arch: str) -> Any:
    """tinygrad's encoders for "rdna3" or "rdna4"."""
    return importlib.import_module(f"tinygrad.runtime.autogen.amd.{arch}.ins")


class Bench:
    """``waves`` waves with 64 vector registers, all lanes active, 1 KiB of LDS for each workgroup of one wave."""

    def __init__(self, arch: str, waves: int = 1) -> None:
        self.arch, self.memory = arch, Memory()
        self.vectors = np.zeros((64, waves, LANES), np.uint32)
        self.scalars = np.zeros((SGPRS, waves), np.uint32)
        self.scalars[EXEC] = 0xFFFFFFFF
        self.scc = np.zeros(waves, bool)
        ids = np.arange(waves)
        self.machine = SimpleNamespace(
            memory=self.memory,
            stats=Stats(),
            races=None,
            base=0,
            group_of=ids,
            wave_ids=ids,
            lane_ids=np.arange(waves * LANES),
            first_lanes=ids * LANES,
            lds=np.zeros(waves * 1024, np.uint8),
            lds_bytes=1024,
            lds_stride=1024,
            scratch=np.zeros(waves * LANES * 64, np.uint8),
            scratch_bytes=64,
            scratch_stride=64,
            count_conflicts=lambda *_: None,
            count_sectors=lambda *_: None,
        )

    def set(self, register: int, values: Any) -> None:
        """A vector register, from floats (as float32) or integers; one number for all lanes, or 32."""
        array = np.asarray(values)
        bits = (
            array.astype(np.float32).view(np.uint32)
            if array.dtype.kind == "f"
            else array.astype(np.int64).astype(np.uint32)
        )
        self.vectors[register] = bits

    def get(self, register: int, dtype: Any = np.uint32) -> np.ndarray:
        """Wave 0's lanes of a vector register, [32]."""
        return self.vectors[register, 0].view(dtype)

    def run(self, *instructions: Any) -> None:
        """Execute encoded instructions (tinygrad's, or bytes) one after another."""
        with np.errstate(all="ignore"):
            for instruction in instructions:
                data = instruction if isinstance(instruction, bytes) else instruction.to_bytes()
                program = Program(self.arch, data + b"\0" * 16, 0, 0, "bench")
                step = program.translate(decode(program.image, 0, self.arch))
                step(Waves(self.machine, self.vectors, self.scalars, self.scc, slice(None)))
