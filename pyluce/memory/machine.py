"""The memory that a plan is made for: one device that computes, the host, perhaps a second device for the experts."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyluce.memory.link import PlannedLink


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
    """`target` computes; `expert` holds routed experts where they lie elsewhere, `hot_bytes` of them again on the target.

    `hot` says which, `link` what lies between the two, for people: no size depends on either.
    """

    target: DeviceMemory
    host_free_bytes: int
    expert: DeviceMemory | None = None
    hot_bytes: int = 0
    hot: str | None = None
    link: PlannedLink | None = None

    @property
    def two_gpus(self) -> bool:
        """Two GPUs of one backend, which wait for each other without the host."""
        backend = self.target.name.partition(":")[0]
        return (
            self.expert is not None
            and self.target.kind is not MemoryKind.CPU
            and self.expert.name.partition(":")[0] == backend
        )

    @property
    def shares_host_memory(self) -> bool:
        """What the host keeps and what the device keeps come out of the same memory."""
        return self.target.kind is not MemoryKind.DISCRETE

    @property
    def expert_shares_host_memory(self) -> bool:
        """What the host keeps and the experts come out of the same memory."""
        return self.expert is not None and self.expert.kind is not MemoryKind.DISCRETE

    @property
    def expert_available_bytes(self) -> int:
        """What the expert device may use: with shared memory no more than the host has; 0 without one."""
        if self.expert is None:
            return 0
        if self.expert_shares_host_memory:
            return min(self.expert.free_bytes, self.host_free_bytes)
        return self.expert.free_bytes

    @property
    def available_bytes(self) -> int:
        """What the target may use: with shared memory no more than the host has."""
        if self.shares_host_memory:
            return min(self.target.free_bytes, self.host_free_bytes)
        return self.target.free_bytes
