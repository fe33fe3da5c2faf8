"""Atomics, and data between lanes through the LDS hardware."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.rdna.access import Step, active, ds_address, global_address, pieces, tally
from tests.rdna.decode import Instruction
from tests.rdna.errors import OutOfBounds, UnknownInstruction
from tests.rdna.waves import LANES, Waves

NAME = re.compile(r"(global_atomic|flat_atomic|ds)_(?!load_|store_)(\w+?)(_rtn)?_([uifb])(32|64)$")
OPERATIONS: dict[tuple[str, str], Callable[[Any, Any], Any]] = {
    ("add", "u"): lambda old, x: old + x,
    ("add", "f"): lambda old, x: old + x,
    ("sub", "u"): lambda old, x: old - x,
    ("and", "b"): lambda old, x: old & x,
    ("or", "b"): lambda old, x: old | x,
    ("xor", "b"): lambda old, x: old ^ x,
    ("swap", "b"): lambda old, x: x,
    ("storexchg", "b"): lambda old, x: x,
    ("min", "u"): np.minimum,
    ("max", "u"): np.maximum,
    ("min", "i"): np.minimum,
    ("max", "i"): np.maximum,
}


def atomic(i: Instruction, machine: Any) -> Step | None:
    """Lanes one after another where addresses repeat; the wave order is that of their numbers."""
    match = NAME.match(i.name)
    if not match:
        return None
    where, operation, returns, kind, bits = match.groups()
    key = (operation.removesuffix("_num"), kind)
    if bits != "32" or key not in OPERATIONS:
        raise UnknownInstruction(f"{i}: no meaning for this atomic.")
    function = OPERATIONS[key]
    dtype = {"u": np.uint32, "b": np.uint32, "i": np.int32, "f": np.float32}[kind]
    address = ds_address(i) if where == "ds" else global_address(i)
    source = i.fields.get("data", i.fields.get("vsrc", i.fields.get("data0")))
    assert source is not None
    r, d = source - 256, i["vdst"] - 256
    returned = bool(returns) if where == "ds" else bool(i.fields.get("glc", 0) or i.fields.get("th", 0) & 1)
    number = machine.number(i, True)

    def step(w: Waves) -> None:
        chosen, lanes, mask = active(w, address(w))
        if not len(chosen):
            return
        value = (w.v[r].reshape(-1) if mask is None else w.v[r][mask]).view(dtype)
        old_values = np.zeros(len(chosen), dtype)
        for space, at, part in pieces(w, i, chosen, lanes):
            tally(w, space, 4, len(at), True, at, lanes[part])
            operands, olds = value[part], np.zeros(len(at), dtype)
            for data, offsets, some, space_key, nbytes, name in space.resolve(w, at, lanes[part], 4, i, True):
                if (offsets & 3).any():
                    raise OutOfBounds(f"{i}: an atomic at an address that is no multiple of 4.")
                words, index, x = data[: data.nbytes & ~3].view(dtype), offsets >> 2, operands[some]
                before = np.zeros(len(index), dtype)
                if len(np.unique(index)) == len(index):
                    before[...] = words[index]
                    words[index] = function(before, x)
                else:
                    for k, at_word in enumerate(index):
                        before[k] = words[at_word]
                        words[at_word] = function(words[at_word : at_word + 1], x[k : k + 1])[0]
                olds[some] = before
                if w.machine.races is not None and space_key:
                    waves = w.index_array[lanes[part][some] >> 5]
                    w.machine.races.record(space_key, nbytes, offsets, 4, waves, number, True, name)
            old_values[part] = olds
        if returned:
            if mask is None:
                w.v[d].reshape(-1)[...] = old_values.view(np.uint32)
            else:
                w.v[d][mask] = old_values.view(np.uint32)

    return step


def lane_exchange(i: Instruction) -> Step | None:
    """ds_bpermute_b32, ds_permute_b32, ds_swizzle_b32: data between lanes through the LDS hardware."""
    if i.name == "ds_bpermute_b32":
        a, x, d, offset = i["addr"] - 256, i["data0"] - 256, i["vdst"] - 256, i["offset0"] | i["offset1"] << 8

        def bpermute(w: Waves) -> None:
            source = ((w.v[a] + np.uint32(offset)) >> 2) & 31
            value = np.take_along_axis(w.v[x], source.astype(np.int64), axis=1)
            if not w.full:
                active = np.take_along_axis(w.mask, source.astype(np.int64), axis=1)
                value = np.where(active, value, np.uint32(0))
            w.put(d, value)

        return bpermute
    if i.name == "ds_permute_b32":
        a, x, d, offset = i["addr"] - 256, i["data0"] - 256, i["vdst"] - 256, i["offset0"] | i["offset1"] << 8

        def permute(w: Waves) -> None:
            target = (((w.v[a] + np.uint32(offset)) >> 2) & 31).astype(np.int64)
            result = np.zeros((w.n, LANES), np.uint32)
            rows, columns = np.nonzero(w.mask)
            result[rows, target[rows, columns]] = w.v[x][rows, columns]
            w.put(d, result)

        return permute
    if i.name == "ds_swizzle_b32":
        offset = i["offset0"] | i["offset1"] << 8
        lane = np.arange(LANES)
        if offset >= 0xC000:
            raise UnknownInstruction(f"{i}: swizzle mode {offset:#x}.")
        if offset & 0x8000:
            source = (lane & ~3) | np.array([offset >> 2 * k & 3 for k in range(4)])[lane & 3]
        else:
            source = ((lane & (offset & 31)) | (offset >> 5 & 31)) ^ (offset >> 10 & 31)
        x, d = i["addr"] - 256, i["vdst"] - 256
        if i.fields.get("data0", 256) != 256:
            x = i["addr"] - 256

        def swizzle(w: Waves) -> None:
            value = w.v[x][:, source]
            if not w.full:
                value = np.where(w.mask[:, source], value, np.uint32(0))
            w.put(d, value)

        return swizzle
    return None
