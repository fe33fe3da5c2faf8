"""Executes a dispatch: workgroups, waves, control flow, barriers.

Waves at the same instruction run in step, as arrays; where their control flow parts, those behind run until they reach the
others. Memory accesses happen in program order and complete at once, so a missing wait is not seen. A kernel whose
workgroups wait for each other is not supported. Rounding must be to nearest even and denormals kept, as the HIP compiler
sets them by default; another mode stops the run.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.rdna.codeobject import Kernel
from tests.rdna.errors import RaceError, RdnaError, UnknownInstruction
from tests.rdna.memory import Memory
from tests.rdna.program import BRANCHES, Program
from tests.rdna.races import MAX_WAVES, Races
from tests.rdna.stats import Stats
from tests.rdna.waves import EXEC, LANES, SGPRS, Waves

RUNNING, WAITING, DONE = 0, 1, 2
RESIDENT = 256  # waves that run in step at most, unless one workgroup has more
TTMP7, TTMP9 = 115, 117
Triple = tuple[int, int, int]


def run(
    kernel: Kernel,
    memory: Memory,
    grid: Triple,
    block: Triple,
    args: Sequence[Any] | bytes,
    lds_bytes: int = 0,
    races: bool | str = True,
    max_instructions: int = 500_000_000,
    workgroups: range | None = None,
) -> Stats:
    """Run ``kernel`` on ``grid`` workgroups of ``block`` threads (x, y, z).

    ``args``: the explicit arguments in order, each an int (an address or a number), a float, a numpy scalar or bytes, or the
    bytes of the whole argument block; hidden arguments are filled in. ``lds_bytes``: dynamic LDS beside the kernel's own.
    ``races``: True raises RaceError at the end when there were any, "collect" leaves them in the Stats, False does not look.
    ``workgroups`` restricts the run to those numbers (x fastest). OutOfBounds and UnknownInstruction stop the run.
    """
    return Machine(kernel, memory, grid, block, args, lds_bytes, races, max_instructions, workgroups).run()


class Machine:
    """One dispatch. Arrays over the resident waves; see ``Waves`` for what a step sees of them."""

    def __init__(
        self, kernel: Kernel, memory: Memory, grid: Triple, block: Triple, args: Sequence[Any] | bytes, lds_bytes: int,
        races: bool | str, max_instructions: int, workgroups: range | None,
    ) -> None:  # fmt: skip
        self.kernel, self.memory, self.grid, self.block = kernel, memory, grid, block
        self.threads = block[0] * block[1] * block[2]
        d = kernel.descriptor
        if min(*grid, *block) < 1 or self.threads > kernel.max_block:
            raise RdnaError(f"{kernel.demangled}: expected blocks of 1 to {kernel.max_block} threads, found {block}.")
        if d.float_mode() != (0, 0, 3, 3):
            raise UnknownInstruction(f"{kernel.demangled}: float mode {d.float_mode()}, expected (0, 0, 3, 3).")
        self.program = Program.of(kernel)
        self.stats = Stats()
        self.races = Races(self.program.granule, self.program.instructions, self.program.atomic) if races else None
        self.raise_races = races is True
        self.budget = max_instructions
        self.base = memory.load_code(kernel.code)
        self.lds_bytes = d.lds_bytes + lds_bytes
        self.lds_stride = -(-self.lds_bytes // 16) * 16
        self.scratch_bytes = d.scratch_bytes
        self.scratch_stride = -(-d.scratch_bytes // 4) * 4
        self.stats.largest_lds = self.lds_bytes
        self.temporary: list[int] = []
        self.conflicts: dict[Any, int] = {}  # bank conflicts and sectors of access patterns seen
        self.kernarg = self._temporary(self._arguments(args), "kernel arguments")
        self.group_waves = -(-self.threads // LANES)
        self.workgroups = workgroups if workgroups is not None else range(grid[0] * grid[1] * grid[2])

    # ---- set-up

    def _arguments(self, args: Sequence[Any] | bytes) -> bytes:
        d, explicit = self.kernel.descriptor, [a for a in self.kernel.arguments if not a.hidden]
        block = bytearray(
            -(-max(d.kernarg_bytes, 8) // 64) * 64
        )  # scalar loads may read to the end of 16 aligned bytes
        if isinstance(args, (bytes, bytearray)):
            size = max((a.offset + a.size for a in explicit), default=0)
            if len(args) < size:
                raise RdnaError(f"{self.kernel.demangled}: expected {size} bytes of arguments, found {len(args)}.")
            block[:size] = args[:size]
        else:
            if len(args) != len(explicit):
                raise RdnaError(f"{self.kernel.demangled}: expected {len(explicit)} arguments, found {len(args)}.")
            for number, (argument, value) in enumerate(zip(explicit, args, strict=True)):
                data = self._bytes(value, argument.size)
                if len(data) != argument.size:
                    raise RdnaError(
                        f"argument {number}: expected {argument.size} bytes, found {len(data)} ({value!r})."
                    )
                block[argument.offset : argument.offset + argument.size] = data
        for argument in self.kernel.arguments:
            if argument.hidden:
                value = self._hidden(argument.kind)
                block[argument.offset : argument.offset + argument.size] = value.to_bytes(argument.size, "little")
        return bytes(block)

    def _temporary(self, data: bytes, name: str) -> int:
        self.temporary.append(self.memory.alloc(data, name, align=64))
        return self.temporary[-1]

    @staticmethod
    def _bytes(value: Any, size: int) -> bytes:
        if isinstance(value, (bytes, bytearray)):
            return bytes(value)
        if isinstance(value, (np.generic, np.ndarray)):
            return value.tobytes()
        if isinstance(value, float):
            return struct.pack("<f" if size == 4 else "<d", value)
        if isinstance(value, bool):
            return bytes([value])
        return int(value).to_bytes(size, "little", signed=value < 0)

    def _hidden(self, kind: str) -> int:
        for prefix, values in (
            ("hidden_block_count_", self.grid),
            ("hidden_group_size_", self.block),
            ("hidden_remainder_", (0, 0, 0)),
            ("hidden_global_offset_", (0, 0, 0)),
        ):
            if kind.startswith(prefix):
                return values["xyz".index(kind[-1])]
        if kind == "hidden_grid_dims":
            return 3 if self.grid[2] * self.block[2] > 1 else 2 if self.grid[1] * self.block[1] > 1 else 1
        if kind == "hidden_dynamic_lds_size":
            return self.lds_bytes - self.kernel.descriptor.lds_bytes
        return 0  # queues, heaps, host calls: an access through such a pointer is out of bounds

    def _packet(self) -> int:
        """The dispatch packet that some kernels read their sizes from."""
        sizes = [g * b for g, b in zip(self.grid, self.block, strict=True)]
        dims = self._hidden("hidden_grid_dims")
        head = struct.pack(
            "<6H5IQQQQ", 0, dims, *self.block, 0, *sizes, self.scratch_bytes, self.lds_bytes, 0, self.kernarg, 0, 0
        )
        return self._temporary(head, "dispatch packet")

    def _start(self, chunk: Sequence[int]) -> None:
        """Registers of the waves of these workgroups, as the hardware sets them up."""
        d, waves = self.kernel.descriptor, self.group_waves
        total = len(chunk) * waves
        if total > MAX_WAVES:
            raise RdnaError(f"{self.kernel.demangled}: a workgroup of {waves} waves.")
        self.wave_ids = np.arange(total)
        self.lane_ids = np.arange(total * LANES)
        self.first_lanes = np.arange(total) * LANES
        self.group_of = np.repeat(np.arange(len(chunk)), waves)
        self.vectors = np.zeros((d.vgprs, total, LANES), np.uint32)
        self.scalars = np.zeros((SGPRS, total), np.uint32)
        self.scc = np.zeros(total, bool)
        self.pc = np.full(total, d.entry, np.int64)
        self.state = np.zeros(total, np.int8)
        self.lds = np.full(len(chunk) * self.lds_stride + 16, 0xA5, np.uint8)
        self.scratch = np.full(total * LANES * self.scratch_stride, 0xA5, np.uint8)
        if self.races is not None:
            self.races.next_chunk(self.group_of)
        thread = np.arange(waves)[:, None] * LANES + np.arange(LANES)
        active = thread < self.threads
        x, y, z = self.block[0], self.block[1], self.block[2]
        packed = thread % x | (thread // x % y) << 10 | (thread // (x * y) % z) << 20
        self.vectors[0] = np.tile(np.where(active, packed, 0).astype(np.uint32), (len(chunk), 1))
        self.scalars[EXEC] = np.tile(np.packbits(active, axis=1, bitorder="little").view(np.uint32)[:, 0], len(chunk))
        number = np.repeat(np.array(chunk, np.int64), waves)
        gx, gy = self.grid[0], self.grid[1]
        self._scalar_setup(number % gx, number // gx % gy, number // (gx * gy))

    def _scalar_setup(self, x: np.ndarray, y: np.ndarray, z: np.ndarray) -> None:
        d, s, at = self.kernel.descriptor, self.scalars, 0
        for bit, size in ((0, 4), (1, 2), (2, 2), (3, 2), (4, 2), (5, 2), (6, 1)):
            if not d.properties >> bit & 1:
                continue
            if bit in (1, 3):
                address = self._packet() if bit == 1 else self.kernarg
                s[at], s[at + 1] = address & 0xFFFFFFFF, address >> 32
            elif bit != 4:
                raise UnknownInstruction(f"{self.kernel.demangled}: user register {bit} of the descriptor.")
            at += size
        if at > d.user_sgprs:
            raise RdnaError(f"{self.kernel.demangled}: {at} user registers set up, the descriptor has {d.user_sgprs}.")
        if self.program.arch == "rdna4":
            s[TTMP9], s[TTMP7] = x, y | z << 16
            return
        at = d.user_sgprs
        for bit, value in ((7, x), (8, y), (9, z)):
            if d.rsrc2 >> bit & 1:
                s[at] = value
                at += 1

    # ---- execution

    def run(self) -> Stats:
        per = max(1, RESIDENT // self.group_waves)
        try:
            with np.errstate(all="ignore"):
                for start in range(0, len(self.workgroups), per):
                    self._start(self.workgroups[start : start + per])
                    self._chunk()
        finally:
            for address in self.temporary:
                self.memory.free(address)
        self.stats.groups = len(self.workgroups)
        self.stats.waves = self.stats.groups * self.group_waves
        if self.races is not None:
            self.stats.races = list(self.races.found.values())
            if self.stats.races and self.raise_races:
                texts = "\n".join(str(race) for race in self.stats.races[:10])
                raise RaceError(f"{self.kernel.demangled}: {len(self.stats.races)} races.\n{texts}")
        return self.stats

    def _chunk(self) -> None:
        while True:
            running = self.state == RUNNING
            if not running.any():
                if not self._release():
                    return
                continue
            lowest = int(self.pc[running].min())
            here = running & (self.pc == lowest)
            others = self.pc[running & ~here]
            stop = int(others.min()) if others.size else -1
            self._batch(np.flatnonzero(here), lowest, stop)

    def _release(self) -> bool:
        """Let workgroups pass whose waves all wait (or have ended); False when nothing is left to run."""
        waiting = self.state == WAITING
        if not waiting.any():
            return False
        self.state[waiting] = RUNNING
        self.stats.barriers += len(np.unique(self.group_of[waiting]))
        if self.races is not None:
            self.races.barrier(waiting)
        return True

    def _batch(self, chosen: np.ndarray, pc: int, stop: int) -> None:
        """Run the chosen waves from ``pc`` until they part, wait, end, or come to ``stop`` or beyond."""
        first, count = int(chosen[0]), len(chosen)
        step = int(chosen[1]) - first if count > 1 else 1
        index: Any = chosen
        if int(chosen[-1]) == first + step * (count - 1) and (np.diff(chosen) == step).all():
            index = slice(first, int(chosen[-1]) + 1, step)
        regular = isinstance(index, slice) and step == 1
        vectors, scalars, scc = self.vectors[:, index], self.scalars[:, index], self.scc[index]
        if not regular:  # steps write through flat views: each register contiguous
            vectors, scalars, scc = np.ascontiguousarray(vectors), np.ascontiguousarray(scalars), scc.copy()
        w = Waves(self, vectors, scalars, scc, index)
        program, stats = self.program, self.stats
        executed: dict[int, int] = {}
        try:
            while True:
                block = program.block(pc)
                executed[pc] = executed.get(pc, 0) + 1
                for run_step in block.steps:
                    run_step(w)
                self.budget -= len(block.steps) * count
                if self.budget < 0:
                    raise RdnaError(f"{self.kernel.demangled}: more instructions than max_instructions; does it end?")
                following = self._leave(block, w)
                if following is None:
                    return
                pc = following
                if 0 <= stop <= pc:
                    self.pc[index] = pc
                    return
        finally:
            if not regular:
                self.vectors[:, index], self.scalars[:, index], self.scc[index] = vectors, scalars, scc
            for start, times in executed.items():
                block = program.blocks.get(start)
                if block is not None:
                    for name, n in block.opcodes.items():
                        stats.opcodes[name] += n * times * count
                    for name, n in block.kinds.items():
                        stats.kinds[name] += n * times * count

    def _leave(self, block: Any, w: Waves) -> int | None:
        """Where all waves go next, or None when they do not go on together."""
        last = block.last
        if last is None:
            return int(block.after)
        name = last.name
        if name == "s_branch":
            return int(block.target)
        if name in BRANCHES:
            taken = BRANCHES[name](w)
            if taken.all():
                return int(block.target)
            if not taken.any():
                return int(block.after)
            self.pc[w.index] = np.where(taken, block.target, block.after)
            return None
        if name in ("s_barrier", "s_barrier_wait"):
            self.pc[w.index] = block.after
            self.state[w.index] = WAITING
            return None
        if name == "s_endpgm":
            self.state[w.index] = DONE
            return None
        source = last["ssrc0"]
        address = (w.s[source] | (w.s[source + 1].astype(np.uint64) << 32)).astype(np.int64) - self.base
        if name == "s_swappc_b64":
            back = self.base + last.pc + 4
            w.put_scalar(last["sdst"], back & 0xFFFFFFFF)
            w.put_scalar(last["sdst"] + 1, back >> 32)
        if (address == address[0]).all():
            return int(address[0])
        self.pc[w.index] = address
        return None

    def count_conflicts(self, w: Waves, addresses: np.ndarray, lanes: np.ndarray, size: int) -> None:
        """Bank conflicts of one LDS access, of at most 8 waves and scaled to all."""
        self.stats.lds_accesses += w.n
        if w.n > 8:
            sample = lanes < 8 * LANES
            addresses, lanes = addresses[sample], lanes[sample]
        if addresses.size:
            # moving all addresses alike rotates the banks and changes nothing
            relative = (addresses - addresses[0]).astype(np.uint32)
            key = (size, int(addresses[0]) & 3, relative.tobytes(), lanes.tobytes())
            if key not in self.conflicts:
                self.conflicts[key] = _conflicts(addresses, lanes, size)
            self.stats.lds_conflicts += self.conflicts[key] * w.n // min(w.n, 8)

    def count_sectors(self, w: Waves, addresses: np.ndarray, lanes: np.ndarray, size: int) -> None:
        """Pieces of 64 bytes that a load touches, of at most 8 waves and scaled to all."""
        if w.n > 8:
            sample = lanes < 8 * LANES
            addresses, lanes = addresses[sample], lanes[sample]
        if addresses.size:
            start = int(addresses[0]) & 63
            relative = addresses - addresses[0]
            key = (-size, start, relative.tobytes(), lanes.tobytes())
            if key not in self.conflicts:
                self.conflicts[key] = _sectors(relative.view(np.int64) + start, lanes >> 5, size)
            self.stats.global_sectors += self.conflicts[key] * w.n // min(w.n, 8)


def _sectors(addresses: np.ndarray, waves: np.ndarray, size: int) -> int:
    """Distinct pieces of 64 bytes, summed over the waves."""
    first, last = addresses >> 6, (addresses + size - 1) >> 6
    total = 0
    for wave in np.unique(waves):
        mine = waves == wave
        total += len(np.unique(np.concatenate([first[mine], last[mine]])))
    return total


def _conflicts(addresses: np.ndarray, lanes: np.ndarray, size: int) -> int:
    """Cycles beyond the first of each pass: different words in the same of the 32 banks.

    A pass is 128 bytes: 32 lanes of up to 4 bytes, 16 of 8, 8 of 16 (an assumption for the estimate).
    """
    words = (addresses >> np.uint64(2)).astype(np.int64)
    passes = lanes // (LANES * 4 // max(4, size))
    spread = words[:, None] + np.arange(max(1, size // 4))
    key = np.unique(passes[:, None] * (1 << 24) + spread)
    counts = np.bincount((key >> 24) * 32 + (key & 31), minlength=(int(passes.max()) + 1) * 32)
    return int(np.maximum(counts.reshape(-1, 32).max(axis=1) - 1, 0).sum())
