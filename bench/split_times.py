"""Seconds of a decode step and of a prompt's chunk, on one device and on two: what `bench.split_model` is made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from bench import split_ours as ours
from bench import split_parameters as p
from bench.split_ours import Product
from bench.split_parameters import H200, R9700, STRIX, Device, Link
from bench.split_pipeline import Span, Stage, run_pipeline, seconds_of

WIDTHS: Final = range(1, 9)


def tokens(acceptance: float, width: int) -> float:
    """Tokens that a step of `width` rows gives, with drafts that are accepted alike."""
    return (1 - acceptance**width) / (1 - acceptance)


def distinct(width: int) -> float:
    """Experts that `width` consecutive rows load, of those that one loads."""
    return float(width**p.ROWS_EXPONENT)


def best(speed: Callable[[int], float]) -> tuple[float, int]:
    """The best speed over the widths, and its width."""
    return max((speed(width), width) for width in WIDTHS)


@dataclass(frozen=True)
class Decode:
    """A step of the reference system. Two unknowns come from its figures for a Strix Halo alone, outside the two columns:

    what a kernel costs beyond its bytes, from decode without drafts; what a row more costs in the dense products, from what drafts gain.
    """

    @cached_property
    def kernel_seconds(self) -> float:
        """Beyond its bytes."""
        moved = p.DENSE_BYTES + p.N_LAYER * p.N_USED * p.EXPERT_BYTES + 2 * p.GDN_BYTES + p.KV_BYTES
        return (1 / p.PLAIN_DECODE - moved / STRIX.bandwidth) / p.KERNELS

    @cached_property
    def row_seconds(self) -> float:
        """Of dense products, for each further row, on a Strix Halo."""
        low, high = 0.0, 0.05
        for _ in range(60):
            row = (low + high) / 2
            speed, _ = best(lambda w, row=row: tokens(p.DRAFT_ACCEPTANCE, w) / self.alone(w, row))  # type: ignore[misc]
            low, high = (row, high) if speed * self.alone(1, row) > p.DRAFT_GAIN else (low, row)
        return low

    @cached_property
    def prose_acceptance(self) -> float:
        """Of drafts of prose, from what they gain after 16K tokens."""
        low, high = 0.0, 0.99
        for _ in range(60):
            acceptance = (low + high) / 2
            speed, _ = best(lambda w, a=acceptance: tokens(a, w) / (self.alone(w) + self.at_16k(STRIX, w)))  # type: ignore[misc]
            gain = speed * (self.alone(1) + self.at_16k(STRIX, 1))
            low, high = (acceptance, high) if gain < p.PROSE_GAIN else (low, acceptance)
        return low

    def at_16k(self, device: Device, width: int) -> float:
        """What a step takes longer after 16K tokens: one row as published, a further one the block keys that it scores, the keys and values
        that it attends to and what its draft reads.
        """
        further = p.KEYS_AT_16K + p.KV_BYTES + p.DRAFT_KV_AT_16K
        return p.SLOWER_AT_16K * STRIX.bandwidth / device.bandwidth + (width - 1) * further / device.bandwidth

    def target(self, device: Device, width: int, row: float, kernels: int) -> float:
        """Everything but routed experts, drafts included."""
        read = p.DENSE_BYTES + p.GDN_BYTES * (1 + width) + p.KV_BYTES
        draft = p.DRAFT_BYTES / device.bandwidth + p.KERNELS_OF_DRAFT * self.kernel_seconds
        further = row * STRIX.lanes / device.lanes + draft
        return read / device.bandwidth + kernels * self.kernel_seconds + (width - 1) * further

    def experts(self, device: Device, width: int, share: float) -> float:
        """Reading `share` of the experts that the rows pick."""
        return share * distinct(width) * p.N_LAYER * p.N_USED * p.EXPERT_BYTES / device.bandwidth

    def alone(self, width: int, row: float | None = None) -> float:
        """Seconds of a step on a Strix Halo alone."""
        row = self.row_seconds if row is None else row
        return self.target(STRIX, width, row, p.KERNELS) + self.experts(STRIX, width, 1.0)

    def split(self, width: int, coverage: float, link: Link) -> float:
        """Seconds of a step of both. Hot picks run while the others do; the sum of a layer comes back."""
        there = self.experts(STRIX, width, 1 - coverage) + p.KERNELS_OF_EXPERTS * self.kernel_seconds
        here = self.experts(R9700, width, coverage)
        moved = 2 * width * p.N_EMBD * 4 / link.bandwidth
        wires = p.N_LAYER * (2 * link.latency + moved)
        return self.target(R9700, width, self.row_seconds, p.KERNELS - p.KERNELS_OF_EXPERTS) + max(there + wires, here)


@dataclass(frozen=True)
class OurDecode:
    """A step of ours: each product takes the larger of its bytes on the device and its time on the H200, scaled by lanes, which is measured for
    several rows too; a launch costs what the reference's do. Drafts as the reference's. `all_picks`: every pick's vector comes back, instead of
    a layer's sum.
    """

    reference: Decode
    all_picks: bool = True

    def product(self, device: Device, product: Product, width: int, picked: float = 1.0) -> float:
        """Seconds of a product on a device; `picked`: bytes that the rows read, of those that one reads."""
        return max(picked * product.n_bytes / device.bandwidth, product.of(width) * H200.lanes / device.lanes)

    def layer(self, device: Device, width: int, *, shared: bool) -> float:
        """Products and launches of a layer but its routed experts; `shared`: with the shared one, which has its own where routed ones are away."""
        products = [ours.INPUT, ours.OUTPUT, ours.MIXES, ours.ROUTER, *([ours.SHARED] if shared else [])]
        launches = ours.LAUNCHES * self.reference.kernel_seconds
        return sum(self.product(device, product, width) for product in products) + launches

    def target(self, device: Device, width: int, *, shared: bool) -> float:
        """Everything but routed experts."""
        state = (p.GDN_BYTES * (1 + width) + p.KV_BYTES) / device.bandwidth
        draft = p.DRAFT_BYTES / device.bandwidth + p.KERNELS_OF_DRAFT / 2 * self.reference.kernel_seconds
        layers = p.N_LAYER * self.layer(device, width, shared=shared)
        return layers + self.product(device, ours.HEAD, width) + state + (width - 1) * draft

    def experts(self, device: Device, width: int, share: float) -> float:
        """`share` of the experts that the rows pick; what was measured has the shared one in it."""
        return share * p.N_LAYER * self.product(device, ours.EXPERTS, width, distinct(width))

    def alone(self, width: int) -> float:
        """Seconds of a step on a Strix Halo alone."""
        shared = p.N_LAYER * ours.SHARED.n_bytes / STRIX.bandwidth
        return self.target(STRIX, width, shared=False) + self.experts(STRIX, width, 1.0) + shared

    def split(self, width: int, coverage: float, link: Link) -> float:
        """Seconds of a step of both."""
        back = width * p.N_EMBD * 4 * (p.N_USED * (1 - coverage) if self.all_picks else 1)
        wires = p.N_LAYER * (2 * link.latency + (width * p.N_EMBD * 4 + back) / link.bandwidth)
        there = self.experts(STRIX, width, 1 - coverage) + wires
        return self.target(R9700, width, shared=True) + max(there, self.experts(R9700, width, coverage))

    def measured_step(self, width: int) -> float:
        """Seconds of a step of the measured layers on the H200 itself, where the experts' rows are random: 10 a row."""
        layer = self.layer(H200, width, shared=False) + self.product(H200, ours.EXPERTS, width, width)
        state = p.GDN_BYTES * (1 + width) * ours.MEASURED_LAYERS / p.N_LAYER / H200.bandwidth
        return ours.MEASURED_LAYERS * layer + self.product(H200, ours.HEAD, width) + state


@dataclass(frozen=True, slots=True)
class ChunkTimes:
    """Seconds a prompt row: of the target's part on the R9700 and on the Strix Halo, and of the experts there. Bytes a row and layer each way."""

    target: float
    target_alone: float
    experts: float
    out_bytes: float
    back_bytes: float

    def alone(self) -> float:
        """Tokens a second of a Strix Halo."""
        return 1 / (self.target_alone + self.experts)

    def stage(self, rows: int, link: Link) -> Stage:
        """A layer of a stream of so many rows."""
        part = rows / p.N_LAYER
        return Stage(
            before=self.target * part * 0.95,
            send=link.latency + rows * self.out_bytes / link.bandwidth,
            experts=self.experts * part,
            back=link.latency + rows * self.back_bytes / link.bandwidth,
            after=self.target * part * 0.05,
        )

    def pipeline(self, rows: int, n_streams: int, link: Link) -> list[Span]:
        """A chunk of so many rows."""
        return run_pipeline([self.stage(rows // n_streams, link)] * n_streams, p.N_LAYER)

    def split(self, rows: int, n_streams: int, link: Link) -> float:
        """Tokens a second of both."""
        return rows / seconds_of(self.pipeline(rows, n_streams, link))


def reference_chunk() -> ChunkTimes:
    """The reference's prompt: dense products as published, streams by their bytes, experts what is left of a chunk on a Strix Halo alone."""
    dense, streams = p.DENSE_OF_CHUNK / p.CHUNK, p.STREAM_BYTES / STRIX.bandwidth
    fill = p.DRAFT_KV_SHARE / p.PLAIN_PREFILL
    experts = 1 / p.PLAIN_PREFILL - dense - streams
    on_card = (dense + fill) * STRIX.flops / R9700.flops + streams * STRIX.bandwidth / R9700.bandwidth
    return ChunkTimes(on_card, dense + streams, experts, 2 * p.N_EMBD, 2 * p.N_EMBD)


def our_chunk(*, all_picks: bool) -> ChunkTimes:
    """Ours: products at the share of the matrix units' peak that they reach on the H200, streams by their bytes, the rest by lanes."""
    each = p.N_LAYER / ours.MEASURED_LAYERS / ours.CHUNK_ROWS

    def on(device: Device) -> float:
        products = ours.CHUNK_DENSE * H200.flops / device.flops + ours.CHUNK_REST * H200.lanes / device.lanes
        return products * each + max(p.STREAM_BYTES / device.bandwidth, ours.CHUNK_STREAMS * each)

    experts = ours.CHUNK_EXPERTS * each * H200.flops / STRIX.flops
    back = p.N_EMBD * 4 * (p.N_USED if all_picks else 1)
    return ChunkTimes(on(R9700), on(STRIX), experts, p.N_EMBD * 4, back)
