"""The memory that a plan is made for: one device that computes, the host, perhaps a second device for the experts."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class MemoryKind(Enum):
    """Where a device's memory is: the CPU's own, the host's shared with a GPU (unified), or apart from it (discrete)."""

    CPU = "cpu"
    UNIFIED = "unified"
    DISCRETE = "discrete"


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """One device: bytes that are free for this model now. `architecture` is for people."""

    name: str
    kind: MemoryKind
    free_bytes: int
    architecture: str | None = None


@dataclass(frozen=True, slots=True)
class Machine:
    """`target` computes; `expert` holds routed experts where they lie elsewhere, `hot_bytes` of them again on the target."""

    target: DeviceMemory
    host_free_bytes: int
    expert: DeviceMemory | None = None
    hot_bytes: int = 0

    @property
    def shares_host_memory(self) -> bool:
        """What the host keeps and what the device keeps come out of the same memory."""
        return self.target.kind is not MemoryKind.DISCRETE

    @property
    def available_bytes(self) -> int:
        """What the target may use: with shared memory no more than the host has."""
        if self.shares_host_memory:
            return min(self.target.free_bytes, self.host_free_bytes)
        return self.target.free_bytes
