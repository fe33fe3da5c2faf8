"""What lies between a model's device and the one that holds its experts: measured where both are there, assumed for a plan elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from pyluce.native.backend import Backend
from pyluce.native.devices import find_device
from pyluce.native.errors import NativeError
from pyluce.native.link import measure_link, peer_access
from pyluce.weights.hparams import HParams

F32_BYTES: Final = 4
PCIE4_LANE_BYTES_S: Final = 16e9 / 8 * 128 / 130
"""PCIe 4.0: 16 GT/s a lane, 128b/130b."""
PAYLOAD_SHARE: Final = 0.85
"""Assumed: what is left of that beside packet headers."""
TRANSFER_S: Final = 15e-6
"""Assumed: an event on one device, a copy, a wait on the other."""
ASSUMED_LANES: Final = 4
"""As a Strix Halo has to a card."""


def pcie4_bytes_s(lanes: int) -> float:
    """Bytes a second that so many lanes of PCIe 4.0 carry one way, by the assumptions above."""
    return lanes * PCIE4_LANE_BYTES_S * PAYLOAD_SHARE


@dataclass(frozen=True, slots=True)
class PlannedLink:
    """Seconds of a transfer of 4 bytes, bytes a second of a large one.

    unmeasured: why these are assumptions; None: they were measured. peer_access: whether two GPUs reach each other's memory, None where it
    is not known. row_out_bytes, row_back_bytes: what a decoded row sends and gets in all layers where no expert is hot; 0: not said.
    """

    latency_s: float
    bytes_s: float
    unmeasured: str | None = None
    peer_access: bool | None = None
    row_out_bytes: int = 0
    row_back_bytes: int = 0
    n_layer: int = 0

    def carrying(self, hparams: HParams) -> PlannedLink:
        """The link with what a decoded row of this model moves: input and ids of the picks there, the picks' vectors back (docs/two-devices.md)."""
        h = hparams
        out, back = F32_BYTES * (h.n_embd + h.n_expert_used), F32_BYTES * h.n_embd * h.n_expert_used
        return replace(self, row_out_bytes=h.n_layer * out, row_back_bytes=h.n_layer * back, n_layer=h.n_layer)

    @property
    def row_s(self) -> float:
        """Seconds that those transfers take, two a layer, one after the other."""
        return 2 * self.n_layer * self.latency_s + (self.row_out_bytes + self.row_back_bytes) / self.bytes_s


def assumed_link(why: str) -> PlannedLink:
    """PCIe 4.0 x4; `why` says why it is not measured."""
    return PlannedLink(TRANSFER_S, pcie4_bytes_s(ASSUMED_LANES), why)


def look_at_link(target: str, expert: str) -> PlannedLink:
    """Measure the link between two devices as a run would use it, with peer access where the pair has it; assumptions where it cannot be.

    Raises ValueError for what is no device's name.
    """
    for name in (target, expert):
        try:
            find_device(name)
        except NativeError:
            return assumed_link(f"{name} is not there")
    try:
        with Backend(target) as a, Backend(expert) as b:
            peers = peer_access(target, expert, True)
            try:
                speed = measure_link(a, b)
            finally:
                if peers:
                    peer_access(target, expert, False)
    except NativeError as error:
        return assumed_link(str(error))
    return PlannedLink(speed.latency_s, speed.bytes_s, peer_access=peers)


def link_text(link: PlannedLink) -> str:
    """One line for people."""
    speed = f"{link.bytes_s / 1e9:,.2f} GB/s, {link.latency_s * 1e6:,.1f} us a transfer"
    if link.unmeasured is not None:
        return (
            f"not measured: {link.unmeasured}; assumed {speed} (PCIe 4.0 x{ASSUMED_LANES}: 16 GT/s a lane, 128b/130b, "
            f"{PAYLOAD_SHARE:.0%} of it payload; docs/split.md)"
        )
    return f"{speed}, measured{', peer access' if link.peer_access else ''}"


def link_of_report(found: Mapping[str, Any]) -> PlannedLink:
    """What a loaded model's report says under `experts`, `link`."""
    return PlannedLink(found["latency_s"], found["bytes_s"], peer_access=found["peer_access"])


def link_json(link: PlannedLink | None) -> dict[str, Any] | None:
    """As `luce plan --json` has it (docs/memory.md); None without a second device."""
    if link is None:
        return None
    assumed = link.unmeasured is not None
    return {
        "measured": not assumed,
        "latency_s": link.latency_s,
        "bytes_s": link.bytes_s,
        "peer_access": link.peer_access,
        "why_not_measured": link.unmeasured,
        "assumed": f"PCIe 4.0 x{ASSUMED_LANES}" if assumed else None,
        "row_out_bytes": link.row_out_bytes,
        "row_back_bytes": link.row_back_bytes,
        "row_s": link.row_s,
    }
