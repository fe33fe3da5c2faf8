"""Instructions that read or write other lanes than their own, or registers chosen at run time."""

from __future__ import annotations

import numpy as np

from tests.rdna.alu import Step, meaning_of, modified_source
from tests.rdna.decode import Instruction
from tests.rdna.errors import OutOfBounds, UnknownInstruction
from tests.rdna.operands import scalar_source, vector_source
from tests.rdna.waves import LANES, M0, Waves


def lane_access(arch: str, i: Instruction) -> Step | None:
    """v_readlane, v_readfirstlane, v_writelane; the scalar-result transcendentals of RDNA4; None for anything else."""
    if i.name == "v_readfirstlane_b32":
        read = vector_source(i["src0"], 32, "B32", i.literal)

        def first(w: Waves) -> None:
            value = np.broadcast_to(read(w), (w.n, LANES))
            lane = np.zeros(w.n, np.int64) if w.full else np.argmax(w.mask, axis=1)  # no lane active: lane 0
            w.put_scalar(i["vdst"], value[np.arange(w.n), lane])

        return first
    if i.name == "v_readlane_b32":
        read, select = vector_source(i["src0"], 32, "B32"), scalar_source(i["src1"], 32, "B32", i.literal)

        def readlane(w: Waves) -> None:
            lane = np.broadcast_to(select(w) & 31, (w.n,))
            w.put_scalar(i["vdst"], read(w)[np.arange(w.n), lane])

        return readlane
    if i.name == "v_writelane_b32":
        value, select = scalar_source(i["src0"], 32, "B32", i.literal), scalar_source(i["src1"], 32, "B32", i.literal)
        register = i["vdst"] - 256

        def writelane(w: Waves) -> None:  # whatever the execution mask says
            w.v[register][np.arange(w.n), np.broadcast_to(select(w) & 31, (w.n,))] = value(w)

        return writelane
    if i.name in ("v_permlane16_b32", "v_permlanex16_b32"):
        return _permlane16(i)
    if i.name == "v_swap_b32":
        a, b = i["vdst"] - 256, i["src0"] - 256

        def swap(w: Waves) -> None:
            old = w.v[a].copy()
            w.put(a, w.v[b])
            w.put(b, old)

        return swap
    if i.name in ("v_movrels_b32", "v_movreld_b32"):
        return _relative(i)
    if i.name.startswith("v_s_"):
        m = meaning_of(arch, i.op)
        read = modified_source(
            scalar_source(i["src0"], 32, "F32", i.literal), 32, bool(i["neg"] & 1), bool(i["abs"] & 1)
        )
        if i["omod"] or i["clmp"] or m.inputs != ("S0",):
            raise UnknownInstruction(f"{i}: output modifier.")
        return lambda w: w.put_scalar(i["vdst"], m.function(read(w))[0])
    return None


def _relative(i: Instruction) -> Step:
    """A register whose number is M0 more than written: the source of v_movrels_b32, the destination of v_movreld_b32."""
    read, d = vector_source(i["src0"], 32, "B32", i.literal), i["vdst"] - 256
    first = i["src0"] - 256 if i.name == "v_movrels_b32" else d

    def step(w: Waves) -> None:
        register = first + w.s[M0].astype(np.int64)
        if (register < 0).any() or (register >= len(w.v)).any():
            raise OutOfBounds(f"{i}: M0 leads to vector register {int(register.max())} of {len(w.v)}.")
        wave = np.arange(w.n)
        if i.name == "v_movrels_b32":
            w.put(d, w.vectors[register, wave])
        else:
            w.vectors[register, wave] = np.where(w.mask, read(w), w.vectors[register, wave])

    return step


def _permlane16(i: Instruction) -> Step:
    """Any lane of the own (or the other) row of 16, chosen by 4 bits for each lane of the row in two scalars."""
    read = vector_source(i["src0"], 32, "B32")
    low, high = (scalar_source(i[f"src{k}"], 32, "B32", i.literal) for k in (1, 2))
    other = 16 if "x16" in i.name else 0
    fetch_inactive, bound = bool(i["opsel"] & 1), bool(i["opsel"] & 2)
    lane = np.arange(LANES)

    def step(w: Waves) -> None:
        select = low(w).astype(np.uint64) | high(w).astype(np.uint64) << np.uint64(32)
        within = (
            np.broadcast_to(select, (w.n,))[:, None] >> ((lane & 15) * 4).astype(np.uint64) & np.uint64(15)
        ).astype(int)
        source = ((lane & 16) ^ other) | within
        value = np.take_along_axis(np.broadcast_to(read(w), (w.n, LANES)), source, axis=1)
        if not w.full and not fetch_inactive:
            active = np.take_along_axis(w.mask, source, axis=1)
            old = np.uint32(0) if bound else w.v[i["vdst"] - 256]
            value = np.where(active, value, old)
        w.put(i["vdst"] - 256, value)

    return step
