"""pyluce beside upstream's llama-bench on the CPU: same models, same threads, same run, pair after pair.

    make bench              # or: python build.py --bench && python -m bench.cpu_vs_upstream [--rounds 5] [--threads 1] [--processor-time]

llama-bench comes from the same tree as our libraries. Its graphs are libllama's, and every patch of ours leaves kernels as
they are unless a graph asks for a pyluce phase, so it runs upstream's own kernels: its figures are upstream's speed. It runs
as a user would run it (repacked weights, f16 K/V, flash attention on "auto", ubatch 512). Rounds alternate which of the two goes
first; a ratio is taken of two processes that ran one after the other and the median over rounds is printed, so a busy machine
harms both alike.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from bench.floor import ROOT, Floor, Machine, measure_machine, weight_floor
from tools.synth import FULL, write_model

PREFILL = (512, 2048)
DECODE = 128
DEPTHS = (0, 512)
TESTS = [*(f"prefill {n}" for n in PREFILL), *(f"decode at {d}" for d in DEPTHS)]
GOALS = {"prefill": 0.9, "decode": 1.0}
Q4_K = replace(
    FULL, n_layer=4, n_embd=1024, n_vocab=32768, n_head=16, head_dim=128, rope_dim=32, rope_sections=(6, 5, 5, 0), n_expert=64,
    n_expert_used=8, n_ff_exp=512, n_ff_shexp=512, hc_low_rank=128, ssm_k_heads=4, ssm_v_heads=8, indexer_top_k=256,
).with_type("Q4_K")  # fmt: skip
"""Between luce-tiny and the real widths: far larger than the caches, and a 2,048-token prompt takes seconds, not minutes."""
RANDOM_MODEL = ROOT / "build" / "models" / f"random-q4_k-{Q4_K.n_layer}x{Q4_K.n_embd}.gguf"


@dataclass(frozen=True)
class Setting:
    """How to measure. `processor_time`: seconds of the processes instead of the wall's, for a machine that others use too."""

    threads: int = 1
    processor_time: bool = False


def upstream_rate(model: Path, setting: Setting, test: str) -> float:
    """Tokens a second of one test, in one process of llama-bench.

    Its processor time can only be had of whole processes: that of one with three repetitions less that of one with one.
    """
    program = ROOT / "build" / "cpu" / "bin" / "llama-bench"
    if not program.is_file():
        raise SystemExit(f"expected {program}, found none: python build.py --bench")
    kind, size = parse_test(test)
    what = ["-p", str(size), "-n", "0"] if kind == "prefill" else ["-p", "0", "-n", str(DECODE), "-d", str(size)]
    command = [str(program), "-m", str(model), "-t", str(setting.threads), "-o", "json", *what]
    if not setting.processor_time:
        return float(json.loads(_run([*command, "-r", "1"]))[0]["avg_ts"])
    seconds = _processor_s([*command, "-r", "3"]) - _processor_s([*command, "-r", "1"])
    return 2 * (size if kind == "prefill" else DECODE) / seconds


def our_rate(model: Path, setting: Setting, test: str) -> float:
    """The same test by our runner, in a process of its own."""
    kind, size = parse_test(test)
    what = ["--prefill", str(size)] if kind == "prefill" else ["--decode", str(DECODE), "--depth", str(size)]
    what += ["--processor-time"] if setting.processor_time else []
    return float(_run([sys.executable, "-m", "bench.ours", str(model), "--threads", str(setting.threads), *what]))


def parse_test(test: str) -> tuple[str, int]:
    """"prefill 512" -> ("prefill", 512); "decode at 0" -> ("decode", 0)."""
    words = test.split()
    return words[0], int(words[-1])


def measure(model: Path, setting: Setting, rounds: int) -> list[dict[str, dict[str, float]]]:
    """`rounds` times all tests; for each test the two sides directly after each other, in turn A first and B first."""
    sides = [("upstream", upstream_rate), ("ours", our_rate)]
    pairs: list[dict[str, dict[str, float]]] = []
    for i in range(rounds):
        pair: dict[str, dict[str, float]] = {name: {} for name, _ in sides}
        for test in TESTS:
            for name, rate in sides if i % 2 == 0 else reversed(sides):
                pair[name][test] = rate(model, setting, test)
        pairs.append(pair)
        print(f"  round {i + 1} of {rounds}: " + ", ".join(f"{t} {ratio(pair, t):.2f}" for t in TESTS), flush=True)
    return pairs


def ratio(pair: dict[str, dict[str, float]], test: str) -> float:
    """Our speed over upstream's within one round."""
    return pair["ours"][test] / pair["upstream"][test]


def table(model: Path, pairs: list[dict[str, dict[str, float]]], floor: Floor, machine: Machine) -> str:
    """A markdown table of medians; the last column is the share of the machine's own speed that we reach."""
    lines = [
        f"### {model.stem}",
        "",
        f"Floor: a decoded token reads {floor.decode_bytes / 2**20:.1f} MiB of weights and takes {floor.decode_flops / 1e6:.0f} MFLOP, "
        f"a prompt token {floor.chunk_flops / 1e6:.0f} MFLOP. One thread here reads {machine.read_bytes_s / 1e9:.1f} GB/s "
        f"from a buffer of that size and multiplies float32 matrices at {machine.matmul_flops_s / 1e9:.0f} GFLOP/s.",
        "",
        "| test | upstream tok/s | pyluce tok/s | ratio (min to max) | goal | pyluce does |",
        "|---|---|---|---|---|---|",
    ]
    for test in TESTS:
        ratios = sorted(ratio(pair, test) for pair in pairs)
        ours, theirs = (statistics.median(pair[side][test] for pair in pairs) for side in ("ours", "upstream"))
        is_decode = test.startswith("decode")
        done = f"{ours * floor.decode_bytes / 1e9:.1f} GB/s" if is_decode else f"{ours * floor.chunk_flops / 1e9:.0f} GFLOP/s"
        goal = GOALS[parse_test(test)[0]]
        middle = statistics.median(ratios)
        lines.append(
            f"| {test} | {theirs:,.1f} | {ours:,.1f} | {middle:.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}) "
            f"| {goal:.1f} {'met' if middle >= goal else 'missed'} | {done} |"
        )
    return "\n".join(lines)


def main() -> int:
    """Measure every model, print the tables, write the record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", type=Path, action="append", help="instead of luce-tiny and the random model")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--processor-time", action="store_true", help="processor seconds, when other processes run (1 thread)")
    parser.add_argument("--json", type=Path, default=ROOT / "build" / "bench" / "cpu_vs_upstream.json", metavar="FILE")
    arguments = parser.parse_args()
    if arguments.processor_time and arguments.threads != 1:
        parser.error("--processor-time: expected --threads 1 (waiting threads spin)")
    setting = Setting(arguments.threads, arguments.processor_time)
    record: dict[str, object] = {
        "date": time.strftime("%Y-%m-%d"),
        "commit": _run(["git", "-C", str(ROOT), "describe", "--always", "--dirty"]).strip(),
        "processor": processor_name(),
        "setting": asdict(setting),
        "build": json.loads((ROOT / "build" / "cpu" / "bin" / "luce-build.json").read_text())["stamp"],
    }
    clock = "processor time" if setting.processor_time else "wall time"
    print(f"{record['date']}, {record['commit']}, {record['processor']}, {setting.threads} thread(s), {clock}\n")
    for model in arguments.model or default_models():
        floor = weight_floor(model)
        machine = measure_machine(floor.decode_bytes)
        pairs = measure(model, setting, arguments.rounds)
        print("\n" + table(model, pairs, floor, machine) + "\n")
        record[model.name] = {"floor": floor.as_dict(), "machine": asdict(machine), "rounds": pairs}
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(record, indent=1) + "\n")
    print(f"written: {arguments.json}")
    return 0


def default_models() -> list[Path]:
    """luce-tiny and the random model, which is written on first use."""
    tiny = sorted((ROOT / "pyluce" / "data").rglob("luce-tiny*.gguf"))
    if not tiny:
        raise SystemExit("expected luce-tiny*.gguf in pyluce/data, found none")
    if not RANDOM_MODEL.is_file():
        print(f"writing {RANDOM_MODEL.relative_to(ROOT)}", flush=True)
        write_model(RANDOM_MODEL, Q4_K)
    return [tiny[0], RANDOM_MODEL]


def processor_name() -> str:
    """The processor as the system names it, and the threads that this process may use."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.processor() or platform.machine()
    return f"{name}, {len(os.sched_getaffinity(0))} cores"


def _processor_s(command: list[str]) -> float:
    """User and system seconds of a command."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    _run(command)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def _run(command: list[str]) -> str:
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    if result.returncode != 0:
        raise SystemExit(f"{' '.join(command)}\n  failed ({result.returncode}): {result.stderr[-2000:]}")
    return result.stdout


if __name__ == "__main__":
    sys.exit(main())
