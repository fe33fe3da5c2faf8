"""Loads, stores and atomics: global memory, LDS, scratch, and flat addresses over all three."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.rdna.decode import Instruction
from tests.rdna.errors import OutOfBounds, UnknownInstruction
from tests.rdna.operands import LDS_APERTURE, SCRATCH_APERTURE, scalar_source
from tests.rdna.waves import LANES, NULL, Waves

Step = Callable[[Waves], None]
NAME = re.compile(
    r"(global|flat|scratch|ds)_(load|store)_(?:(d16_hi|d16)_)?([uib])(8|16|32|64|96|128)(?:_(d16_hi|d16))?$"
)
TWO = re.compile(r"ds_(load|store)_2addr_(stride64_)?b(32|64)$")


def signed(value: int, bits: int) -> int:
    return value - (1 << bits) if value >> (bits - 1) else value


# ---- bytes of a buffer


def gather(data: np.ndarray, offsets: np.ndarray, size: int) -> list[np.ndarray]:
    """``size`` bytes at each offset, as uint32 words (one narrower word for 1 and 2 bytes)."""
    if size == 1:
        return [data.take(offsets).astype(np.uint32)]
    unit = 2 if size == 2 else 4
    kind = np.uint16 if size == 2 else np.uint32
    whole = data.ctypes.data % unit == 0 and not (offsets & (unit - 1)).any()
    if whole:
        view = data[: data.nbytes & ~(unit - 1)].view(kind)
        index = offsets >> (1 if size == 2 else 2)
        words = [view.take(index + k if k else index) for k in range(max(1, size // 4))]
    else:
        octets = data.take(offsets[:, None] + np.arange(size))
        joined = octets.view(kind)
        words = [joined[:, k] for k in range(joined.shape[1])]
    return [words[0].astype(np.uint32)] if size == 2 else words


def scatter(data: np.ndarray, offsets: np.ndarray, size: int, words: list[np.ndarray]) -> None:
    """The reverse; of lanes with the same address the last stays."""
    if size == 1:
        data[offsets] = words[0].astype(np.uint8)
        return
    unit = 2 if size == 2 else 4
    kind = np.uint16 if size == 2 else np.uint32
    if data.ctypes.data % unit == 0 and not (offsets & (unit - 1)).any():
        view = data[: data.nbytes & ~(unit - 1)].view(kind)
        index = offsets >> (1 if size == 2 else 2)
        for k in range(max(1, size // 4)):
            view[index + k] = words[k]
        return
    octets = np.stack([w.astype(kind) for w in words], axis=1).view(np.uint8)
    data[offsets[:, None] + np.arange(size)] = octets


# ---- one address space at a time; the arrays hold the active lanes only


class Space:
    """Where accesses go: resolves addresses to (data, offsets, lanes, key for races, name)."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def resolve(self, w: Waves, addresses: np.ndarray, lanes: Any, size: int, i: Instruction, write: bool) -> list[Any]:
        """``addresses``: uint64 [k]; ``lanes``: flat indices [k] of wave * 32 + lane."""
        machine = w.machine
        if self.kind == "global":
            found = []
            for buffer, chosen in machine.memory.find(addresses, size, i):
                offsets = (addresses[chosen] - np.uint64(buffer.start)).view(np.int64)
                if write and buffer.protected and int(offsets.min()) < buffer.protected:
                    raise OutOfBounds(f"{i}: writes to {buffer}, whose first {buffer.protected} bytes are read only.")
                found.append((buffer.bytes, offsets, chosen, buffer.start, buffer.end - buffer.start, str(buffer)))
            return found
        offsets = addresses.view(np.int64)
        limit = machine.lds_bytes if self.kind == "lds" else machine.scratch_bytes
        if ((offsets < 0) | (offsets + size > limit)).any():
            worst = int(offsets[(offsets < 0) | (offsets + size > limit)][0])
            name = "the workgroup's LDS" if self.kind == "lds" else "the lane's scratch"
            raise OutOfBounds(f"{i}: {size} bytes at {worst:#x} are outside {name}, which has {limit} bytes.")
        if self.kind == "lds":
            base = w.groups[lanes >> 5] * machine.lds_stride
            return [(machine.lds, offsets + base, ..., "lds", machine.lds.nbytes, "LDS")]
        base = (w.index_array[lanes >> 5] * LANES + (lanes & 31)) * machine.scratch_stride
        return [(machine.scratch, offsets + base, ..., "", 0, "scratch")]


SPACES = {name: Space(name) for name in ("global", "lds", "scratch")}


def active(w: Waves, addresses: Any) -> tuple[np.ndarray, np.ndarray, Any]:
    """Addresses of the active lanes [k], their flat indices [k], and the mask (None when all are active)."""
    shaped = np.broadcast_to(addresses, (w.n, LANES))
    if w.full:
        return np.ascontiguousarray(shaped).reshape(-1), w.all_lanes, None
    mask = w.mask
    return shaped[mask], np.flatnonzero(mask), mask


def load(
    w: Waves, space: Space, addresses: np.ndarray, lanes: Any, size: int, i: Instruction, number: int
) -> list[Any]:
    """Words of ``size`` bytes at each address."""
    words: list[Any] = []
    for data, offsets, chosen, key, nbytes, name in space.resolve(w, addresses, lanes, size, i, False):
        part = gather(data, offsets, size)
        if chosen is ...:
            words = part
        else:
            words = words or [np.zeros(len(addresses), np.uint32) for _ in part]
            for whole, piece in zip(words, part, strict=True):
                whole[chosen] = piece
        if w.machine.races is not None and key:
            waves = w.index_array[lanes[chosen] >> 5]
            w.machine.races.record(key, nbytes, offsets, size, waves, number, False, name)
    return words


def store(
    w: Waves, space: Space, addresses: Any, lanes: Any, size: int, words: list[Any], i: Instruction, n: int
) -> None:
    for data, offsets, chosen, key, nbytes, name in space.resolve(w, addresses, lanes, size, i, True):
        part = [word[chosen] for word in words]
        if w.machine.races is not None and key:
            low = (1 << 8 * min(size, 4)) - 1
            before = gather(data, offsets, size)
            unchanged = np.ones(len(offsets), bool)
            for a, b in zip(before, part, strict=True):
                unchanged &= (a & low) == (b & low)
            waves = w.index_array[lanes[chosen] >> 5]
            w.machine.races.record(key, nbytes, offsets, size, waves, n, True, name, unchanged)
        scatter(data, offsets, size, part)


# ---- instructions


def global_address(i: Instruction) -> Callable[[Waves], Any]:
    """[n, 32] or [n, 1] of uint64; scratch: the offset in the lane's scratch."""
    vaddr = i.fields.get("addr", i.fields.get("vaddr"))
    assert vaddr is not None
    offset = signed(i["offset"], 13) if "offset" in i.fields else signed(i["ioffset"], 24)
    offset64 = np.uint64(offset & 0xFFFFFFFF_FFFFFFFF)
    r, s = vaddr - 256, i.fields.get("saddr", NULL)
    if i.form == "SCRATCH":
        use_vector = bool(i["sve"])

        def scratch(w: Waves) -> Any:
            total = np.full((w.n, 1), offset64, np.uint64)
            if use_vector:
                total = total + w.v[r].view(np.int32).astype(np.int64).view(np.uint64)
            return total if s == NULL else total + w.c[s].view(np.int32).astype(np.int64).view(np.uint64)

        return scratch
    if s == NULL or i.form == "FLAT":
        return lambda w: (w.v[r] | (w.v[r + 1].astype(np.uint64) << 32)) + offset64
    return lambda w: ((w.c[s] | (w.c[s + 1].astype(np.uint64) << 32)) + offset64) + w.v[r]


def pieces(w: Waves, i: Instruction, addresses: Any, lanes: Any) -> list[tuple[Space, Any, Any]]:
    """Which space each address is in: (space, addresses there, indices or ...)."""
    if i.form == "GLOBAL":
        return [(SPACES["global"], addresses, ...)]
    if i.form == "SCRATCH":
        return [(SPACES["scratch"], addresses, ...)]
    if i.form == "DS":
        return [(SPACES["lds"], addresses, ...)]
    high = (addresses >> np.uint64(32)).astype(np.int64)
    found = []
    for name, aperture in (("lds", LDS_APERTURE), ("scratch", SCRATCH_APERTURE)):
        chosen = np.flatnonzero(high == aperture)
        if chosen.size:
            found.append((SPACES[name], addresses[chosen] & np.uint64(0xFFFFFFFF), chosen))
    rest = np.flatnonzero((high != LDS_APERTURE) & (high != SCRATCH_APERTURE))
    if rest.size == len(addresses):
        return [(SPACES["global"], addresses, ...)]
    if rest.size:
        found.append((SPACES["global"], addresses[rest], rest))
    return found


def tally(w: Waves, space: Space, size: int, count: int, write: bool, addresses: Any, lanes: Any) -> None:
    stats, total = w.machine.stats, size * count
    if space.kind == "global":
        if write:
            stats.global_stored += total
        else:
            stats.global_loaded += total
            w.machine.count_sectors(w, addresses, lanes, size)
    elif space.kind == "scratch":
        stats.scratch_bytes += total
    else:
        if write:
            stats.lds_stored += total
        else:
            stats.lds_loaded += total
        w.machine.count_conflicts(w, addresses, lanes, size)


def memory_step(i: Instruction, machine: Any) -> Step:
    """GLOBAL, FLAT, SCRATCH and DS loads and stores."""
    match = NAME.match(i.name)
    if not match:
        two = TWO.match(i.name)
        if two:
            return _two_addresses(i, machine, two)
        raise UnknownInstruction(f"{i}: no meaning for this memory instruction.")
    _, direction, d16, kind, bits, d16_after = match.groups()
    d16 = d16 or d16_after
    size = int(bits) // 8
    count = max(1, size // 4)
    address = ds_address(i) if i.form == "DS" else global_address(i)
    number = machine.number(i, False)
    if direction == "store":
        source = i.fields.get("data", i.fields.get("vsrc", i.fields.get("data0")))
        assert source is not None
        r = source - 256
        shift = 16 if d16 == "d16_hi" else 0

        def store_step(w: Waves) -> None:
            chosen, lanes, mask = active(w, address(w))
            if not len(chosen):
                return
            words = [w.v[r + k].reshape(-1) if mask is None else w.v[r + k][mask] for k in range(count)]
            if shift:
                words = [words[0] >> shift]
            for space, at, part in pieces(w, i, chosen, lanes):
                tally(w, space, size, len(at), True, at, lanes[part])
                store(w, space, at, lanes[part], size, [word[part] for word in words], i, number)

        return store_step
    r = i["vdst"] - 256

    def load_step(w: Waves) -> None:
        chosen, lanes, mask = active(w, address(w))
        if not len(chosen):
            return
        words: list[Any] = []
        for space, at, part in pieces(w, i, chosen, lanes):
            tally(w, space, size, len(at), False, at, lanes[part])
            piece = load(w, space, at, lanes[part], size, i, number)
            if part is ...:
                words = piece
            else:
                words = words or [np.zeros(len(chosen), np.uint32) for _ in piece]
                for whole, some in zip(words, piece, strict=True):
                    whole[part] = some
        if kind == "i" and size < 4:
            shift = 32 - 8 * size
            words = [((words[0] << shift).view(np.int32) >> shift).view(np.uint32)]
        for k in range(count):
            row = w.v[r + k]
            value = words[k]
            if d16:
                old = row.reshape(-1) if mask is None else row[mask]
                value = (old & 0xFFFF) | (value << 16) if d16 == "d16_hi" else (old & 0xFFFF0000) | (value & 0xFFFF)
            if mask is None:
                row.reshape(-1)[...] = value
            else:
                row[mask] = value

    return load_step


def ds_address(i: Instruction) -> Callable[[Waves], Any]:
    r, offset = i["addr"] - 256, np.uint64(i["offset0"] | i["offset1"] << 8)
    if i.fields.get("gds"):
        raise UnknownInstruction(f"{i}: global data share.")
    return lambda w: w.v[r].astype(np.uint64) + offset


def _two_addresses(i: Instruction, machine: Any, match: re.Match[str]) -> Step:
    direction, stride, bits = match.groups()
    size = int(bits) // 8
    unit = size * (64 if stride else 1)
    r, offsets = i["addr"] - 256, (np.uint64(i["offset0"] * unit), np.uint64(i["offset1"] * unit))
    number, space = machine.number(i, False), SPACES["lds"]
    count = size // 4

    def step(w: Waves) -> None:
        chosen, lanes, mask = active(w, w.v[r].astype(np.uint64))
        if not len(chosen):
            return
        loaded = []
        for part, offset in enumerate(offsets):
            tally(w, space, size, len(chosen), direction == "store", chosen + offset, lanes)
            if direction == "load":
                loaded += load(w, space, chosen + offset, lanes, size, i, number)
                continue
            source = i[f"data{part}"] - 256
            rows = [w.v[source + k] for k in range(count)]
            words = [row.reshape(-1) if mask is None else row[mask] for row in rows]
            store(w, space, chosen + offset, lanes, size, words, i, number)
        for k, value in enumerate(loaded):
            row = w.v[i["vdst"] - 256 + k]
            if mask is None:
                row.reshape(-1)[...] = value
            else:
                row[mask] = value

    return step


def scalar_load(i: Instruction, machine: Any) -> Step:
    """s_load_b32 to b512 (and the narrow loads of RDNA4)."""
    match = re.match(r"s_load_([uib])(8|16|32|64|96|128|256|512)$", i.name)
    if not match:
        raise UnknownInstruction(f"{i}: no meaning for this scalar memory instruction.")
    kind, size = match.group(1), int(match.group(2)) // 8
    base = i["sbase"]
    offset = signed(i["offset"], 21) if "offset" in i.fields else signed(i["ioffset"], 24)
    more = None if i["soffset"] == NULL else scalar_source(i["soffset"], 32, "B32")
    offset64, d = np.uint64(offset & 0xFFFFFFFF_FFFFFFFF), i["sdata"]
    space, number = SPACES["global"], machine.number(i, False)
    mask = np.uint64(0xFFFFFFFF_FFFFFFFC if size >= 4 else 0xFFFFFFFF_FFFFFFFF)

    def step(w: Waves) -> None:
        address = (w.s[base] | (w.s[base + 1].astype(np.uint64) << 32)) + offset64
        if more is not None:
            address = address + more(w)
        address = address & mask
        words = load(w, space, address, w.first_lanes, size, i, number)
        w.machine.stats.scalar_loaded += size * w.n
        if kind == "i" and size < 4:
            shift = 32 - 8 * size
            words = [((words[0] << shift).view(np.int32) >> shift).view(np.uint32)]
        for k, value in enumerate(words):
            w.put_scalar(d + k, value)

    return step
