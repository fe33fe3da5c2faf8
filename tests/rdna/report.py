"""What the kernels of one layer of the real model cost on AMD GPUs, estimated from executed instructions, beside upstream's.

    LUCE_LIBRARY_DIR=build/fakehip/bin python -m tests.rdna.report [--rows 1 2 4 8] [--only TEXT] [--groups 4]

Every op goes through ggml-hip's own dispatch on the fake device. Of each launch a few workgroups are executed, spread over the
grid, and counted for all of it: the work of our kernels is the same in each. Counts are exact for those; cycles are an
ESTIMATE from public rates (`Gpu`), as if every unit were always busy: the largest of issue, LDS and memory. Experts: 16 stand
for 512, of which a row picks 10 as ever.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pyluce.native import load_libraries, luce
from pyluce.native.ggml import (
    GGMLType,
    ggml_dsv4_hc_pre_gated,
    ggml_gated_delta_net,
    ggml_mul_mat,
    ggml_mul_mat_id,
)
from pyluce.native.luce import Phase
from pyluce.native.quants import row_bytes
from pyluce.selftest.bench import Array, OpBench, Weight
from pyluce.selftest.cases import rows_table
from tests.rdna.dispatch import run
from tests.rdna.fakehip.build import built
from tests.rdna.kernels.device import ARCHS, FakeDevice, Interpreter, Launch
from tests.rdna.stats import Stats

H, S, LOW, GDN_K, GDN_V, GDN_D, E, USED, FF = 2560, 4, 320, 16, 48, 128, 512, 10, 640
CHANNELS = (2 * GDN_K + GDN_V) * GDN_D
EPS = 1e-6


@dataclass(frozen=True)
class Gpu:
    """Public figures: SIMDs of 32 lanes, clock, memory; cycles of a SIMD for one wave instruction of each kind."""

    simds: int
    ghz: float
    memory_gb: float
    wmma: int

    def cycles(self, stats: Cost) -> tuple[float, str]:
        """Clocks of the whole GPU for this much work, and what bounds it."""
        kinds = stats.kinds
        vector = kinds["valu"] + kinds["vopd"] + kinds["dot"] + 4 * kinds["trans"] + self.wmma * kinds["wmma"]
        scalar = kinds["salu"] + kinds["smem"] + kinds["branch"]
        access = kinds["global"] + kinds["flat"] + kinds["scratch"]
        units = {
            "vector": vector / self.simds,
            "scalar": scalar / self.simds,
            "address": access * 2 / self.simds,  # 16 addresses a clock
            "LDS": (stats.lds_bytes / 128 + stats.lds_conflicts)
            / (self.simds / 2),  # 128 bytes a clock and compute unit
            "memory": stats.least / (self.memory_gb / self.ghz),
        }
        bound = max(units, key=lambda unit: units[unit])
        return units[bound], bound


GPUS = {"gfx1151": Gpu(80, 2.9, 256.0, 32), "gfx1201": Gpu(128, 2.92, 640.0, 16)}


@dataclass
class Cost:
    """Sums over launches, scaled to their grids; `least` as in `Work`."""

    least: float
    kinds: Counter[str] = field(default_factory=Counter)
    loaded: float = 0.0
    stored: float = 0.0
    sectors: float = 0.0
    lds_bytes: float = 0.0
    lds_conflicts: float = 0.0
    launches: list[str] = field(default_factory=list)

    def add(self, launch: Launch) -> None:
        """A launch of which `stats.groups` workgroups were executed."""
        stats = launch.stats
        assert stats is not None
        scale = int(np.prod(launch.grid)) / stats.groups
        for kind, count in stats.kinds.items():
            self.kinds[kind] += count * scale  # type: ignore[assignment]
        self.loaded += (stats.global_loaded + stats.scalar_loaded) * scale
        self.stored += stats.global_stored * scale
        self.sectors += 64 * stats.global_sectors * scale
        self.lds_bytes += (stats.lds_loaded + stats.lds_stored) * scale
        self.lds_conflicts += stats.lds_conflicts * scale
        self.launches.append(launch.name.split("<")[0])


class Sample(Interpreter):
    """Executes at most `groups` workgroups of a launch, spread over its grid."""

    def __init__(self, groups: int) -> None:
        super().__init__(races=False)
        self.groups = groups

    def __call__(self, launch: Launch) -> Stats:
        total = int(np.prod(launch.grid))
        chosen = range(0, total, -(-total // self.groups)) if total > 64 else range(total)
        kernel, memory = launch.code.kernels[launch.kernel], self.memory.refresh()
        return run(kernel, memory, launch.grid, launch.block, launch.args, launch.shared, False, workgroups=chosen)


@dataclass(frozen=True)
class Work:
    """One op of the layer: ours, and what upstream computes for the same (None: nothing like it). `least`: bytes of every
    operand and the result, once."""

    name: str
    least: int
    arrays: dict[str, Array | Weight]
    ours: Callable[[int, dict[str, int]], int | None]
    theirs: Callable[[int, dict[str, int]], int | None] | None = None
    source: str = ""
    dtype: Any = np.float32


def zeros(type_name: str, *shape: int) -> Weight:
    """Weights whose values do not matter: [..., n_in]."""
    kind = GGMLType[type_name]
    return Weight(kind, np.zeros((*shape[:-1], row_bytes(kind, shape[-1])), np.uint8), shape[-1])


def product(name: str, type_name: str, n_in: int, n_out: int, rows: int, phase: Phase, experts: bool = False) -> Work:
    """A dense product, or one of each row's picks among experts."""
    rng = np.random.default_rng(0)
    if not experts:
        arrays: dict[str, Array | Weight] = {
            "w": zeros(type_name, n_out, n_in),
            "x": rng.standard_normal((rows, n_in), np.float32),
        }
    else:
        arrays = {
            "w": zeros(type_name, 16, n_out, n_in),
            "x": rng.standard_normal((rows, 1, n_in), np.float32),
            "ids": rng.random((rows, 16)).argsort(1)[:, :USED].astype(np.int32),
        }

    def build(c: int, x: dict[str, int], chosen: Phase) -> int:
        node = ggml_mul_mat_id(c, x["w"], x["x"], x["ids"]) if experts else ggml_mul_mat(c, x["w"], x["x"])
        luce.ggml_luce_set_phase(node, chosen)
        return node

    source = {"F32": "mmvf.cu", "Q8_0": "mmvq.cu", "Q4_K": "mmvq.cu"}[type_name]
    if phase is Phase.CHUNK:
        source = f"template-instances/mmq-instance-{type_name.lower()}.cu"
    used = min(16, USED * rows) if experts else 1
    least = used * n_out * row_bytes(GGMLType[type_name], n_in) + 4 * rows * (n_in + n_out * (USED if experts else 1))
    shown = f"{name} {type_name} {n_in}x{n_out}{f' top {USED}' if experts else ''}"
    return Work(shown, least, arrays, lambda c, x: build(c, x, phase), lambda c, x: build(c, x, Phase.UPSTREAM), source)


def decode(rows: int) -> Iterator[Work]:
    """The ops of a layer with a recurrence, for so many rows of as many sequences."""
    rng = np.random.default_rng(1)

    def values(*shape: int) -> Array:
        return rng.standard_normal(shape, np.float32)

    residual, gate = values(rows, S * H), values(rows, S * H)
    yield Work(
        "hc_combine", 4 * (rows * (3 * S * H + H + S) + S * H), {"r": residual, "b": values(rows, H), "i": values(rows, S), "n": values(S * H)},
        lambda c, x: luce.ggml_luce_hc_combine(c, x["r"], x["b"], x["i"], x["n"], EPS),
    )  # fmt: skip
    yield product("HC down", "Q8_0", S * H, LOW, rows, Phase.ROW)
    yield product("HC up", "Q8_0", LOW, S * H, rows, Phase.ROW)
    yield Work(
        "hc_mix", 4 * rows * (2 * S * H + H), {"x": residual.reshape(rows, S, H), "g": gate.reshape(rows, S, H), "x2": residual, "g2": gate},
        lambda c, x: luce.ggml_luce_hc_mix(c, x["x2"], x["g2"], S),
        lambda c, x: ggml_dsv4_hc_pre_gated(c, x["x"], x["g"], 1.0 / S), "dsv4-hc.cu",
    )  # fmt: skip
    yield product("qkv", "Q8_0", H, CHANNELS, rows, Phase.ROW)
    yield product("z", "Q8_0", H, GDN_V * GDN_D, rows, Phase.ROW)
    yield product("out", "Q8_0", GDN_V * GDN_D, H, rows, Phase.ROW)
    yield gdn(rows)
    yield product("router", "F32", H, E, rows, Phase.ROW)
    yield product("experts gate", "Q4_K", H, FF, rows, Phase.ROW, experts=True)
    yield product("shared gate", "Q8_0", H, FF, rows, Phase.ROW)
    logits = values(rows, E)
    yield Work(
        "route",
        4 * rows * (E + USED),
        {"x": logits},
        lambda c, x: luce.ggml_luce_route(c, x["x"], USED),
        dtype=np.int32,
    )
    yield Work(
        "moe_combine", 4 * rows * ((USED + 2) * H + E + USED + 1),
        {
            "p": values(rows, USED, H), "x": logits, "ids": logits.argsort(1)[:, :USED].astype(np.int32),
            "s": values(rows, H), "g": values(rows, 1),
        },
        lambda c, x: luce.ggml_luce_moe_combine(c, x["p"], x["x"], x["ids"], x["s"], x["g"]),
    )  # fmt: skip


def gdn(rows: int) -> Work:
    """The recurrence; upstream's has no convolution, norms or gates in it, so it does less."""
    rng = np.random.default_rng(2)

    def values(*shape: int) -> Array:
        return rng.standard_normal(shape, np.float32) * np.float32(0.1)

    d, nv, nk = GDN_D, GDN_V, GDN_K
    arrays: dict[str, Array | Weight] = {
        "qkv": values(rows, CHANNELS), "z": values(rows, nv * d), "beta": values(rows, nv), "alpha": values(rows, nv),
        "conv": values(4, CHANNELS), "misc": values(2 * nv + d), "state": values(rows, 2, nv * d * d),
        "history": values(rows, 5, CHANNELS), "rows": rows_table(*((slot, 9, 1) for slot in range(rows))),
    }  # fmt: skip
    theirs = {"q": (nk, d), "k": (nk, d), "v": (nv, d), "g": (nv, 1), "b": (nv, 1)}
    arrays |= {name: values(rows, 1, *shape) for name, shape in theirs.items()} | {"s": values(rows, nv, d, d)}
    return Work(
        "gdn", 4 * (rows * (2 * nv * d * d + 5 * CHANNELS + 2 * nv * d + 2 * nv) + 4 * CHANNELS), arrays,
        lambda c, x: luce.ggml_luce_gdn(
            c, x["qkv"], x["z"], x["beta"], x["alpha"], x["conv"], x["misc"], x["state"], x["history"], x["rows"], nk, EPS, True, 0
        ),
        lambda c, x: ggml_gated_delta_net(c, x["q"], x["k"], x["v"], x["g"], x["b"], x["s"], 1),
        "gated_delta_net.cu",
    )  # fmt: skip


def prefill(rows: int) -> Iterator[Work]:
    """The products of one tile of a prompt."""
    yield product("qkv", "Q8_0", H, CHANNELS, rows, Phase.CHUNK)
    yield product("router", "F32", H, E, rows, Phase.CHUNK)
    yield product("experts gate", "Q4_K", H, FF, rows, Phase.CHUNK, experts=True)


def measure(work: Work, build: Callable[[int, dict[str, int]], int | None], device: str, groups: int) -> Cost:
    """Launches of one op, executed in part and scaled."""
    with FakeDevice(Sample(groups)) as fake, OpBench(work.arrays, device=device) as bench:
        bench.run(build, work.dtype)
        fake.check()
        cost = Cost(work.least)
        for launch in fake.launches:
            cost.add(launch)
    return cost


HEAD = """| | rows | launches | vector | dot | VOPD | WMMA | trans | scalar | LDS | conflicts | moved | cycles | bound by | upstream | cycles |
|-|-|-|-|-|-|-|-|-|-|-|-|-|-|-|-|"""


def thousands(value: float) -> str:
    """In thousands, two digits."""
    return f"{value / 1000:.2g}" if value < 99_500 else f"{value / 1000:.0f}"


def line(work: Work, rows: int, gpu: Gpu, ours: Cost, theirs: Cost | None) -> str:
    """One row of the table."""
    k = ours.kinds
    cycles, bound = gpu.cycles(ours)
    cells = [work.name, str(rows), str(len(ours.launches))]
    cells += [thousands(k[kind]) for kind in ("valu", "dot", "vopd", "wmma", "trans")]
    cells += [thousands(k["salu"] + k["smem"] + k["branch"]), thousands(k["lds"]), thousands(ours.lds_conflicts)]
    cells += [f"{(ours.loaded + ours.stored) / work.least:.2f}", thousands(cycles), bound]
    cells += ["", ""] if theirs is None else [thousands(sum(theirs.kinds.values())), thousands(gpu.cycles(theirs)[0])]
    return f"| {' | '.join(cells)} |"


def main(argv: list[str] | None = None) -> int:
    """Prints a table an architecture."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--rows", type=int, nargs="*", default=[1, 4], metavar="N", help="rows of a step (default: 1 4)"
    )
    parser.add_argument(
        "--tile", type=int, default=128, metavar="N", help="rows of the prefill tile; 0: none (default: 128)"
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="ops with this in their name")
    parser.add_argument("--groups", type=int, default=3, metavar="N", help="workgroups of a launch that are executed")
    parser.add_argument("--ours", action="store_true", help="without upstream's kernels")
    arguments = parser.parse_args(argv)
    load_libraries("hip")
    for number, arch in enumerate(ARCHS):
        print(f"\n{arch}, thousands\n\n{HEAD}", flush=True)
        steps = [(rows, work) for rows in arguments.rows for work in decode(rows)]
        if arguments.tile:
            steps += [(arguments.tile, work) for work in prefill(arguments.tile)]
        for rows, work in steps:
            if arguments.only not in work.name:
                continue
            device = f"hip:{number}"
            ours = measure(work, work.ours, device, arguments.groups)
            wanted = None if arguments.ours or (work.theirs and missing(work)) else work.theirs
            theirs = measure(work, wanted, device, arguments.groups) if wanted else None
            print(line(work, rows, GPUS[arch], ours, theirs), flush=True)
    return 0


def missing(work: Work) -> bool:
    """Whether the kernels of upstream that it takes were left out of this build."""
    return work.source not in built()


if __name__ == "__main__":
    sys.exit(main())
