"""What is asked about the placement of experts, checked before any work."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pyluce.placement.hot import DEFAULT_BUDGET_MIB
from pyluce.placement.learner import DEFAULT_SWAP_MIB_S

EXPERT_DEVICE_NAME: Final = re.compile(r"cpu|(cuda|hip|vulkan):[0-9]{1,3}|rpc:[^\s:/]+:[0-9]{1,5}")
AUTO: Final = "auto"
MAX_BUDGET_MIB: Final = 1 << 30


@dataclass(frozen=True, slots=True)
class PlacementOptions:
    """Where the routed experts live, and which of them on the target too.

    * expert_device: the device that holds all of them; None: the target itself.
    * expert_placement: which are hot: the path of a routing table; "auto": learned while serving; "auto:PATH": learned, beginning
      with a table; None: no expert is hot.
    * expert_budget_mib: MiB of the target for hot experts; None is 8192. Only with a placement.
    * expert_swap_mib_s: MiB a second that "auto" may copy to the target; None is 64. Only with "auto".

    Raises ValueError naming the option.
    """

    device: str
    expert_device: str | None = None
    expert_placement: str | None = None
    expert_budget_mib: int | None = None
    expert_swap_mib_s: float | None = None

    def __post_init__(self) -> None:
        self._check_devices()
        budget, swap = self.expert_budget_mib, self.expert_swap_mib_s
        if self.expert_placement is not None:
            if self.expert_device is None:
                raise ValueError(
                    "expert_placement: expected with expert_device only, which holds the experts that are not hot, found none"
                )
            table = self.table
            if table is not None and not table.is_file():
                raise ValueError(
                    f"expert_placement: expected auto, auto:FILE or the file of a routing table, found none at {table}"
                )
        if budget is not None:
            if self.expert_placement is None:
                raise ValueError("expert_budget_mib: expected with expert_placement only, found none")
            if isinstance(budget, bool) or not isinstance(budget, int) or not 0 <= budget <= MAX_BUDGET_MIB:
                raise ValueError(f"expert_budget_mib: expected 0 to {MAX_BUDGET_MIB}, found {budget!r}")
        if swap is not None:
            if not self.learns:
                raise ValueError("expert_swap_mib_s: expected with expert_placement auto only, found none")
            if isinstance(swap, bool) or not 0.0 <= swap < float("inf"):
                raise ValueError(f"expert_swap_mib_s: expected a number of at least 0, found {swap!r}")

    def _check_devices(self) -> None:
        there = self.expert_device
        if there is None:
            return
        if EXPERT_DEVICE_NAME.fullmatch(there) is None:
            raise ValueError(f"expert_device: expected cpu, cuda:N, hip:N, vulkan:N or rpc:HOST:PORT, found {there!r}")
        if there == self.device:
            raise ValueError(
                f"expert_device: expected another device than the target, found {there} twice; leave it out to keep the experts there"
            )

    @property
    def learns(self) -> bool:
        """The hot set follows what is asked."""
        return self.expert_placement is not None and self.expert_placement.split(":", 1)[0] == AUTO

    @property
    def table(self) -> Path | None:
        """The routing table that the hot set is chosen from, or begins with."""
        given = self.expert_placement
        if given is None or given == AUTO:
            return None
        return Path(given.removeprefix(f"{AUTO}:"))

    @property
    def budget_bytes(self) -> int:
        """Bytes of the target for hot experts; 0 without a placement."""
        if self.expert_placement is None:
            return 0
        mib = DEFAULT_BUDGET_MIB if self.expert_budget_mib is None else self.expert_budget_mib
        return mib << 20

    @property
    def swap_mib_s(self) -> float:
        """MiB a second that swaps may move."""
        return DEFAULT_SWAP_MIB_S if self.expert_swap_mib_s is None else self.expert_swap_mib_s
