"""What the machine must at least do for a token: bytes read and floating-point operations, before anything is timed.

    python -m bench.floor BYTES     # what one thread of this machine does, for a model of that size; run by measure_machine()
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from pyluce.weights import open_model
from pyluce.weights.tensors import OUTPUT, PLE_TABLE, TOKEN_EMBEDDING, TensorInfo

ROOT = Path(__file__).resolve().parents[1]
EXPERT_MARK = "_exps."


@dataclass(frozen=True)
class Floor:
    """Costs of one token that depend on the weights only (attention over the context comes on top).

    decode_bytes: weight bytes read for one decoded token, LM head included, of the routed experts only the used ones.
    chunk_flops: operations for one prompt token (two per weight used, without the LM head). decode_flops: with it.
    weight_bytes: all tensors but the PLE table and the token embedding.
    """

    decode_bytes: int
    decode_flops: int
    chunk_flops: int
    weight_bytes: int

    def as_dict(self) -> dict[str, int]:
        """For the JSON record."""
        return asdict(self)


@dataclass(frozen=True)
class Machine:
    """Measured with numpy, one thread: read_bytes_s over a buffer of the model's size, float32 matmul flops_s."""

    read_bytes_s: float
    matmul_flops_s: float


def weight_floor(path: Path) -> Floor:
    """Add up the model's tensors."""
    with open_model(path) as model:
        share = model.hparams.n_expert_used / model.hparams.n_expert
        tensors = dict(model.tensors)
    rows = {TOKEN_EMBEDDING, PLE_TABLE}
    head = tensors.get(OUTPUT, tensors[TOKEN_EMBEDDING])
    body = {name: info for name, info in tensors.items() if name not in rows and name != OUTPUT}
    used = sum(info.nbytes * _share(name, share) for name, info in body.items())
    flops = sum(2 * _values(info) * _share(name, share) for name, info in body.items() if len(info.ne) > 1)
    return Floor(
        decode_bytes=round(used) + head.nbytes,
        decode_flops=round(flops) + 2 * _values(head),
        chunk_flops=round(flops),
        weight_bytes=sum(info.nbytes for info in body.values()) + head.nbytes,
    )


def measure_machine(weight_bytes: int) -> Machine:
    """Measure in a process of its own, where numpy's matmul has one thread and the kernel that it picks for this processor."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OPENBLAS_")}
    command = [sys.executable, "-m", "bench.floor", str(weight_bytes)]
    result = subprocess.run(
        command, env=environment | {"OPENBLAS_NUM_THREADS": "1"}, cwd=ROOT, check=True, capture_output=True, text=True
    )
    return Machine(**json.loads(result.stdout))


def machine_here(weight_bytes: int) -> Machine:
    """Best of ten passes in this process."""
    buffer = np.ones(max(min(weight_bytes, 1 << 30), 1 << 20) // 8, dtype=np.float64)
    read_s = min(_seconds(buffer.sum) for _ in range(10))
    side = 1024
    a = np.ones((side, side), dtype=np.float32)
    out = np.empty_like(a)
    matmul_s = min(_seconds(lambda: np.matmul(a, a, out=out)) for _ in range(10))
    return Machine(buffer.nbytes / read_s, 2 * side**3 / matmul_s)


def _share(name: str, used_of_all: float) -> float:
    return used_of_all if EXPERT_MARK in name else 1.0


def _values(info: TensorInfo) -> int:
    return int(np.prod(info.ne, dtype=np.int64))


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


if __name__ == "__main__":
    print(json.dumps(asdict(machine_here(int(sys.argv[1])))))
