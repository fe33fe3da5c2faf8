"""What a run executed and moved."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from tests.rdna.races import Race


@dataclass
class Stats:
    """Counts of one dispatch. Instructions are counted once per wave that executes them, bytes once per active lane."""

    opcodes: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)  # salu, valu, vopd, wmma, dot, trans, lds, global, ...
    waves: int = 0
    groups: int = 0
    barriers: int = 0  # per workgroup
    global_loaded: int = 0  # bytes that the lanes asked for
    global_stored: int = 0
    scalar_loaded: int = 0  # bytes, per wave
    lds_loaded: int = 0
    lds_stored: int = 0
    scratch_bytes: int = 0
    lds_accesses: int = 0  # wave instructions that access LDS
    lds_conflicts: int = 0  # cycles beyond the first that bank conflicts cost them (32 banks of 4 bytes)
    global_sectors: int = 0  # 64-byte pieces that the loads of a wave touch, summed over the instructions
    largest_lds: int = 0
    races: list[Race] = field(default_factory=list)

    @property
    def instructions(self) -> int:
        return sum(self.opcodes.values())

    @property
    def wmma(self) -> int:
        return self.kinds["wmma"]


def kind_of(form: str, name: str) -> str:
    """The unit that executes an instruction, for the cost report."""
    if form == "SOPP" or name.startswith(("s_wait", "s_barrier", "buffer_gl", "global_inv", "global_wb")):
        return "branch" if "branch" in name else "barrier" if "barrier" in name else "control"
    if form == "SMEM":
        return "smem"
    if form.startswith("SOP"):
        return "salu"
    if form == "DS":
        return "lds"
    if form in ("GLOBAL", "FLAT", "SCRATCH", "MUBUF"):
        return form.lower()
    if "wmma" in name:
        return "wmma"
    if form == "VOPD":
        return "vopd"
    if name.startswith("v_dot"):
        return "dot"
    if any(name.startswith(f"v_{t}") for t in ("exp", "log", "rcp", "rsq", "sqrt", "sin", "cos", "s_")):
        return "trans"
    return "valu"
