"""The parts of a plan, and where a model's weights go."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING

from pyluce.memory.experts import expert_bytes, routed_experts
from pyluce.memory.facts import ModelFacts, TensorFact
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
    routed = routed_experts(facts) if machine.expert is not None else []
    away = {t.name for t in routed}
    if machine.target.kind is MemoryKind.CPU:
        mine = [t for t in tensors if t.name not in away]
        repacked = meter.repacked_bytes(mine)
        parts.append(Part(Place.TARGET, "weights, mapped", sum(t.n_bytes for t in mine) - repacked, mapped=True))
        parts.append(Part(Place.TARGET, "weights, repacked", repacked))
        return [*parts, *_expert_parts(routed, machine, meter)], []
    device = facts.device_tensors
    names = {t.name for t in device}
    on_host = sum(t.n_bytes for t in tensors if t.name not in names)
    parts.append(Part(Place.HOST, "token embedding, mapped", on_host, mapped=True))
    parts.append(Part(Place.TARGET, "weights", meter.copied_bytes([t for t in device if t.name not in away])))
    return [*parts, *_expert_parts(routed, machine, meter)], []


def _expert_parts(routed: list[TensorFact], machine: Machine, meter: SizeMeter) -> list[Part]:
    """What a second device takes, and the copies of it on the target; nothing without one."""
    if machine.expert is None:
        return []
    return [
        Part(Place.TARGET, "hot experts", machine.hot_bytes),
        Part(Place.EXPERT, "routed experts", meter.copied_bytes(routed)),
    ]


def _published_parts(facts: ModelFacts, machine: Machine) -> tuple[list[Part], list[str]]:
    """From totals: how much of them the token embedding is, which stays on the host, is not known."""
    assert facts.published is not None
    total, experts = facts.published.loaded_bytes, facts.published.expert_bytes
    notes = list(facts.published.notes)
    head = [Part(Place.TARGET, "draft head", facts.published.sidecar_bytes or 0)] if facts.has_head else []
    if machine.target.kind is MemoryKind.CPU:
        if machine.expert is not None:
            raise ValueError(
                f"{facts.name}: expected a GPU as the device of a split, whose types a CPU's plan needs, found cpu"
            )
        notes.append("how much of the weights a CPU would repack is not known; all are counted as mapped")
        return [replace(p, mapped=True) for p in (Part(Place.TARGET, "weights, mapped", total), *head)], notes
    if machine.expert is None:
        return [Part(Place.TARGET, "weights", total), *head], notes
    expert_bytes(facts)  # refuses what is not published
    assert experts is not None
    if machine.hot_bytes:
        notes.append("hot experts are counted with the mean size of an expert")
    parts = [
        Part(Place.TARGET, "weights", total - experts),
        *head,
        Part(Place.TARGET, "hot experts", machine.hot_bytes),
        Part(Place.EXPERT, "routed experts", experts),
    ]
    return parts, notes
