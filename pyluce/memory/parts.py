"""The parts of a plan, and where a model's weights go."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from pyluce.memory.facts import ModelFacts
from pyluce.memory.machine import Machine, MemoryKind
from pyluce.weights.tensors import PLE_TABLE

if TYPE_CHECKING:
    from pyluce.memory.planner import SizeMeter


class Place(Enum):
    """Where bytes lie. On a CPU the target is the host's memory."""

    TARGET = "target"
    EXPERT = "expert device"
    HOST = "host"
    DISK = "disk"


@dataclass(frozen=True, slots=True)
class Part:
    """So many bytes of something. `mapped`: pages of the model's file, which the system may drop and read again."""

    place: Place
    what: str
    n_bytes: int
    mapped: bool = False


def weight_parts(facts: ModelFacts, machine: Machine, meter: SizeMeter) -> tuple[list[Part], list[str]]:
    """Weights by place, and notes for the reader."""
    if facts.published is not None:
        return _published_parts(facts, machine)
    tensors = [t for t in facts.tensors.values() if t.name != PLE_TABLE]
    table = facts.tensors.get(PLE_TABLE)
    parts = [Part(Place.DISK, "n-gram table", table.n_bytes)] if table is not None else []
    if machine.target.kind is MemoryKind.CPU:
        mapped = sum(t.n_bytes for t in tensors) - meter.repacked_bytes
        parts.append(Part(Place.TARGET, "weights, mapped", mapped, mapped=True))
        parts.append(Part(Place.TARGET, "weights, repacked", meter.repacked_bytes))
        return parts, []
    device = facts.device_tensors
    names = {t.name for t in device}
    on_host = sum(t.n_bytes for t in tensors if t.name not in names)
    parts.append(Part(Place.HOST, "token embedding, mapped", on_host, mapped=True))
    if machine.expert is None:
        parts.append(Part(Place.TARGET, "weights", meter.copied_bytes(device)))
        return parts, []
    parts.append(Part(Place.TARGET, "weights", meter.copied_bytes([t for t in device if not t.is_expert])))
    parts.append(Part(Place.TARGET, "hot experts", machine.hot_bytes))
    parts.append(Part(Place.EXPERT, "routed experts", meter.copied_bytes([t for t in device if t.is_expert])))
    return parts, []


def _published_parts(facts: ModelFacts, machine: Machine) -> tuple[list[Part], list[str]]:
    """From totals: how much of them the token embedding is, which stays on the host, is not known."""
    assert facts.published is not None
    total, experts = facts.published.loaded_bytes, facts.published.expert_bytes
    notes = list(facts.published.notes)
    if machine.target.kind is MemoryKind.CPU:
        notes.append("how much of the weights a CPU would repack is not known; all are counted as mapped")
        return [Part(Place.TARGET, "weights, mapped", total, mapped=True)], notes
    if machine.expert is None:
        return [Part(Place.TARGET, "weights", total)], notes
    if experts is None:
        raise ValueError(f"{facts.name}: how large the routed experts are is not published, so no split can be planned")
    parts = [
        Part(Place.TARGET, "weights", total - experts),
        Part(Place.TARGET, "hot experts", machine.hot_bytes),
        Part(Place.EXPERT, "routed experts", experts),
    ]
    return parts, notes
