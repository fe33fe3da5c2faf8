"""What the model of two devices is fed with: sizes of Qwen3.8-Flash-Next, devices, published times. Every number has its source. What was
measured of ours is in `bench.split_ours`.

"Reference" is the reference system's documents about a Strix Halo alone and an R9700 with it. Its table of both (`PUBLISHED`) is what is
predicted; nothing is taken from that table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pyluce.memory.link import TRANSFER_S, pcie4_bytes_s

GB: Final = 1e9
MS: Final = 1e-3
US: Final = 1e-6

N_LAYER: Final = 48
N_EMBD: Final = 2560
N_FF: Final = 640
N_EXPERT: Final = 512
N_USED: Final = 10
HC: Final = 4

Q8: Final = 34 / 32  # bytes a weight of Q8_0
EXPERT_BYTES: Final = 71.7 * 2**30 / (N_LAYER * N_EXPERT)  # published total of UD-Q4_K_XL's routed experts

# weights of a layer's dense part, from the shapes: projections, two hyper-connections (rank 320), shared expert
HC_WEIGHTS: Final = 2 * (2 * HC * N_EMBD * 320 + HC * HC * N_EMBD)
SHARED_WEIGHTS: Final = 3 * N_EMBD * N_FF
LINEAR_WEIGHTS: Final = N_EMBD * (10240 + 6144 + 96) + 6144 * N_EMBD
FULL_WEIGHTS: Final = N_EMBD * (12288 + 512 + 512 + 640) + 6144 * N_EMBD
HEAD_WEIGHTS: Final = N_EMBD * 248320 + 2 * HC * N_EMBD * 320
PLE_WEIGHTS: Final = N_EMBD * (HC * N_EMBD + N_EMBD)
TRUNK_WEIGHTS: Final = 36 * LINEAR_WEIGHTS + 12 * FULL_WEIGHTS + N_LAYER * (HC_WEIGHTS + SHARED_WEIGHTS) + PLE_WEIGHTS
ROUTER_WEIGHTS: Final = N_LAYER * N_EMBD * N_EXPERT
DENSE_BYTES: Final = (TRUNK_WEIGHTS + HEAD_WEIGHTS) * Q8 + ROUTER_WEIGHTS * 4  # "dense mostly Q8_0"; routers in F32
GDN_BYTES: Final = 36 * 48 * 128 * 128 * 4  # recurrent state of a sequence: read once, written for each row
KV_BYTES: Final = 2048 * 24576  # keys and values of the 2,048 tokens that a row attends to

DRAFT_WEIGHTS: Final = FULL_WEIGHTS + HC_WEIGHTS + SHARED_WEIGHTS + 2 * N_EMBD * N_EMBD + 64000 * N_EMBD
DRAFT_BYTES: Final = (DRAFT_WEIGHTS + N_USED * 3 * N_EMBD * N_FF) * Q8

EXPERT_FLOP: Final = 2 * N_LAYER * N_USED * 3 * N_EMBD * N_FF  # of a row
DENSE_FLOP: Final = 2 * (TRUNK_WEIGHTS + ROUTER_WEIGHTS)  # without the head, which prompts need once
STREAM_BYTES: Final = N_LAYER * 2 * 7 * HC * N_EMBD * 4
"""Of a prompt row: norms and sums over four residual streams in F32 (read, normalise, write; gate; combine), 7 passes for each of two
hyper-connections a layer."""


@dataclass(frozen=True, slots=True)
class Device:
    """bandwidth: bytes a second that a kernel reads; flops: half precision on the matrix units, peak; lanes: F32 lanes times clock."""

    name: str
    bandwidth: float
    flops: float
    lanes: float


# 256 GB/s by its memory (LPDDR5X-8000, 256 bits); rocm_bandwidth_test reads 212 (llm-tracker.info, Strix-Halo).
# 40 CUs at 2.9 GHz, 512 FLOP a clock each.
MEASURED_SHARE: Final = 212 / 256
STRIX: Final = Device("Strix Halo", 256 * GB * MEASURED_SHARE, 59.4e12, 40 * 64 * 2.9e9)
# 640 GB/s by its memory (20 Gb/s, 256 bits), the same share of it assumed; 64 CUs at 2.92 GHz, 1,024 FLOP a clock each (data sheet: 191 TFLOP/s).
R9700: Final = Device("R9700", 640 * GB * MEASURED_SHARE, 191e12, 64 * 64 * 2.92e9)
H200: Final = Device("H200", 4.3e12, 790e12, 132 * 128 * 1.98e9)  # measured bandwidth and products (design documents)


@dataclass(frozen=True, slots=True)
class Link:
    """Between the devices: bytes a second each way, and seconds until a transfer and who waits for it have begun."""

    name: str
    bandwidth: float
    latency: float = TRANSFER_S


# 16 GT/s a lane, 128b/130b, and 85 % of that as payload (assumed; a Strix Halo has at most x4 of generation 4 to a card)
LINKS: Final = {f"x{n}": Link(f"PCIe 4.0 x{n}", pcie4_bytes_s(n)) for n in (4, 8, 16)}

# Reference, Strix Halo alone
PLAIN_DECODE: Final = 24.75  # tokens a second, one slot, no drafts: 24.7 to 24.9
KERNELS: Final = 2800  # launches of a decode step
KERNELS_OF_EXPERTS: Final = 5 * N_LAYER
KERNELS_OF_DRAFT: Final = 90  # as a layer and a half
DRAFT_GAIN: Final = 40.4 / 22.3  # code, drafts on against off
DRAFT_ACCEPTANCE: Final = 0.84  # of the drafts, in that measurement
PROSE_GAIN: Final = 26.8 / 20.1  # prose after 16K
SLOWER_AT_16K: Final = (
    1 / 22.4 - 1 / 24.1
)  # seconds a step of one row without drafts, of another series of measurements
KEYS_AT_16K: Final = (
    12 * 16384 // 4 * 128 * 4
)  # bytes of block keys that a row's indexer reads: 12 layers, a block of 4 tokens, F32
DRAFT_KV_AT_16K: Final = 16384 * 2048  # bytes that a draft's attention reads, which is dense
PLAIN_PREFILL: Final = 1220.0  # tokens a second at 16K: 1,200 to 1,240
DENSE_OF_CHUNK: Final = 0.841  # seconds of the dense products in a chunk of 4,096 rows
CHUNK: Final = 4096
DRAFT_KV_SHARE: Final = 0.09  # what filling the draft head's keys costs a prompt: 5 to 13 %

# Four consecutive rows load 2.5 times the experts of one (Cohere, "Why MoE models get more from speculative decoding", 2026): rows^0.66
ROWS_EXPONENT: Final = 0.661

# Reference, the two columns: (Strix Halo alone, R9700 with it), tokens a second
PUBLISHED: Final = {
    "decode, short": (40.5, 75.5),
    "decode, short, no expert hot": (None, 69.0),
    "decode, code": (41.4, 63.1),
    "decode after 16K": (26.0, 44.5),
    "prefill 16K": (1270.0, 1820.0),
}
