"""A kernel's code as basic blocks of translated instructions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.rdna import access, alu, exchange, lanes, matrix
from tests.rdna.codeobject import Kernel
from tests.rdna.decode import Instruction, decode, measure
from tests.rdna.errors import RdnaError, UnknownInstruction
from tests.rdna.operands import put_scalar
from tests.rdna.stats import kind_of
from tests.rdna.waves import EXEC, VCC, Waves

Step = Callable[[Waves], None]
# memory is in order here and nothing is prefetched or cached, so waiting and hinting mean nothing
NOTHING = {
    "s_nop", "s_clause", "s_delay_alu", "s_wait_alu", "s_set_inst_prefetch_distance", "s_wait_idle", "s_sleep", "s_inst_prefetch",
    "buffer_gl0_inv", "buffer_gl1_inv", "global_inv", "global_wb", "global_wbinv", "s_icache_inv", "s_dcache_inv", "s_setprio",
    "s_waitcnt", "s_waitcnt_vscnt", "s_waitcnt_vmcnt", "s_waitcnt_lgkmcnt", "s_waitcnt_expcnt", "s_waitcnt_depctr", "s_wait_event",
    "s_wait_loadcnt", "s_wait_storecnt", "s_wait_samplecnt", "s_wait_bvhcnt", "s_wait_expcnt", "s_wait_dscnt", "s_wait_kmcnt",
    "s_wait_loadcnt_dscnt", "s_wait_storecnt_dscnt", "v_nop", "s_ttracedata", "s_ttracedata_imm",
}  # fmt: skip
BRANCHES: dict[str, Callable[[Waves], Any]] = {
    "s_cbranch_scc0": lambda w: ~w.scc,
    "s_cbranch_scc1": lambda w: w.scc,
    "s_cbranch_vccz": lambda w: w.s[VCC] == 0,
    "s_cbranch_vccnz": lambda w: w.s[VCC] != 0,
    "s_cbranch_execz": lambda w: w.s[EXEC] == 0,
    "s_cbranch_execnz": lambda w: w.s[EXEC] != 0,
}
ENDS = {"s_branch", "s_endpgm", "s_setpc_b64", "s_swappc_b64", "s_barrier", "s_barrier_wait", *BRANCHES}
WAIT_BEFORE_RELEASE = {"s_barrier_signal"}


@dataclass
class Block:
    """Straight-line code. ``last`` is the branch, barrier or end behind ``steps``; None where a leader follows."""

    start: int
    steps: list[Step]
    last: Instruction | None
    after: int
    opcodes: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    target: int = 0


class Program:
    """Translated code of one kernel, block by block as execution reaches them."""

    def __init__(self, arch: str, image: bytes | bytearray, entry: int, end: int, name: str) -> None:
        self.arch, self.image, self.entry, self.end, self.name = arch, image, entry, end, name
        self.blocks: dict[int, Block] = {}
        self.instructions: list[Instruction] = []  # those that access memory, numbered for the race record
        self.atomic: list[bool] = []
        self.leaders: set[int] = set()
        self.granule = 4
        self._scan()

    @classmethod
    def of(cls, kernel: Kernel) -> Program:
        """The kernel's program, made once."""
        if "program" not in kernel.cache:
            code, entry = kernel.code, kernel.descriptor.entry
            kernel.cache["program"] = cls(code.arch, code.image, entry, kernel.end, kernel.name)
        program: Program = kernel.cache["program"]
        return program

    def number(self, instruction: Instruction, atomic: bool) -> int:
        self.instructions.append(instruction)
        self.atomic.append(atomic)
        return len(self.instructions) - 1

    def _scan(self) -> None:
        """Branch targets, and the narrowest store."""
        pc = self.entry
        while pc < self.end:
            size, name = measure(self.image, pc, self.arch)
            if name.startswith("S_") and name.lower() in ENDS:
                self.leaders.add(pc + size)
                if "BRANCH" in name:
                    self.leaders.add(self.branch_target(decode(self.image, pc, self.arch)))
            elif "_STORE_" in name:
                narrow = name.replace("_D16_HI", "").replace("_D16", "")
                self.granule = min(self.granule, 1 if narrow.endswith("B8") else 2 if narrow.endswith("B16") else 4)
            pc += size

    @staticmethod
    def branch_target(i: Instruction) -> int:
        return i.pc + 4 + access.signed(i["simm16"], 16) * 4

    def block(self, pc: int) -> Block:
        if pc not in self.blocks:
            self.blocks[pc] = self._translate(pc)
        return self.blocks[pc]

    def _translate(self, start: int) -> Block:
        steps: list[Step] = []
        opcodes: Counter[str] = Counter()
        kinds: Counter[str] = Counter()
        pc, signalled = start, False
        while True:
            if not 0 <= pc < len(self.image):
                raise RdnaError(f"{self.name}: execution left the code at {pc:#x}.")
            i = decode(self.image, pc, self.arch)
            after = pc + i.size
            opcodes[i.name] += 1
            kinds[kind_of(i.form, i.name)] += 1
            if i.name in ENDS:
                block = Block(start, steps, i, after, opcodes, kinds)
                if "branch" in i.name:
                    block.target = self.branch_target(i)
                return block
            if i.name not in NOTHING:
                if signalled and i.form in ("DS", "GLOBAL", "FLAT", "SCRATCH", "MUBUF"):
                    # what others do behind the barrier may meet it: that cannot be said by whole epochs
                    raise UnknownInstruction(f"{i}: an access between a barrier's signal and its wait.")
                if i.name == "s_barrier_signal":
                    signalled = True
                    if i["ssrc0"] != 193:
                        raise UnknownInstruction(f"{i}: a barrier other than the workgroup's.")
                else:
                    steps.append(self.translate(i))
            if after in self.leaders:
                return Block(start, steps, None, after, opcodes, kinds)
            pc = after

    def translate(self, i: Instruction) -> Step:
        """The function that executes ``i``; UnknownInstruction names what is missing."""
        if i.form in ("VOP1", "VOP2", "VOPC", "VOP3", "VOP3SD", "VOP3_SDST", "VOP1_SDST"):
            return lanes.lane_access(self.arch, i) or alu.vector(self.arch, i)
        if i.form == "VOPD":
            return alu.dual(self.arch, i)
        if i.form == "VOP3P":
            return matrix.wmma(self.arch, i) if "wmma" in i.name else alu.packed(self.arch, i)
        if i.form in ("GLOBAL", "FLAT", "SCRATCH"):
            return exchange.atomic(i, self) or access.memory_step(i, self)
        if i.form == "DS":
            return exchange.lane_exchange(i) or exchange.atomic(i, self) or access.memory_step(i, self)
        if i.form == "SMEM":
            return access.scalar_load(i, self)
        if i.name == "s_getpc_b64":
            put = put_scalar(i["sdst"], 64)
            return lambda w: put(w, np.full(w.n, w.machine.base + i.pc + 4, np.uint64))
        if i.name == "s_sendmsg":
            if i["simm16"] != 3:  # 3: the vector registers are free already
                raise UnknownInstruction(f"{i}: message {i['simm16']}.")
            return lambda w: None
        if i.form in ("SOP1", "SOP2", "SOPC", "SOPK"):
            return alu.scalar(self.arch, i)
        raise UnknownInstruction(f"{i}: no meaning.")
