#!/usr/bin/env python3
"""Experts on a second GPU: the same bits, and what it costs or gains, on a random model of the real widths.

    python -m bench.device_split --json build/bench/split.json                  # cuda:0 with its experts on cuda:1
    python -m bench.device_split --plot build/bench/split.json --out split.svg  # the timelines, on any machine with matplotlib

Parts (`--only`): `exact` (prompts, rows and rows to verify on two devices against one, logits byte by byte), `speed` (one device, two as
they are, two with the second one slowed down), `timeline` (when which device works, from events in their streams).

The slow pair imitates a Radeon R9700 beside a Strix Halo: the second device has 1/2.5 of the memory bandwidth and hangs on a link of
4 PCIe 4 lanes. Its products are computed twice in even layers and three times in odd ones, and every transfer is repeated until it
takes as long as one of that size takes at 7 GB/s; both are rounded to whole repetitions. Kernel launches and latencies stay the H200's. The model's
router is random, so a hot set covers as large a share of the picks as of the experts: a real router's hot set covers more.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from bench.device_worker import random_tokens
from bench.split_slow import SlowPair, timeline
from pyluce.graph import RunnerOptions, TrunkRunner
from pyluce.native import load_libraries
from pyluce.native.devices import find_device, parse_device
from pyluce.placement.hot import HotSet

ROOT = Path(__file__).resolve().parents[1]
WARM_UP, STEPS = 8, 32
CHUNK, PROMPT = 4096, 8192


def open_runner(
    a: argparse.Namespace, expert: str | None, share: float, n_slots: int = 1, streams: int = 1
) -> TrunkRunner:
    """A runner; `share` of the experts of every layer are hot."""
    options = RunnerOptions(
        n_ctx=a.prompt + 1024, n_slots=n_slots, chunk_tokens=a.chunk, max_rollback=8, device=a.device,
        repack=False, expert_device=expert, hot_experts=hot_set(a.model, share) if expert and share else None,
        prompt_streams=streams,
    )  # fmt: skip
    return TrunkRunner(a.model, options)


def hot_set(model: Path, share: float) -> HotSet:
    """The first experts of every layer."""
    from pyluce.weights import open_model

    with open_model(model) as file:
        h = file.hparams
    return HotSet((tuple(range(int(share * h.n_expert))),) * h.n_layer)


def results(runner: TrunkRunner, a: argparse.Namespace) -> dict[str, bytes]:
    """A prompt, rows one by one, rows to verify, four sequences at once."""
    states = [runner.new_sequence() for _ in range(4)]
    n = runner.vocab_size
    found = {}
    for i, state in enumerate(states):
        last = runner.prefill(state, random_tokens(n, a.exact_prompt // (i + 1), i))
        assert last is not None
        found[f"prompt {i}"] = last.tobytes()
    one = [runner.decode([(states[0], token)]).tobytes() for token in random_tokens(n, 8, 10)]
    found["rows"] = b"".join(one)
    found["verify"] = runner.decode([(states[0], token) for token in random_tokens(n, 4, 11)]).tobytes()
    found["four"] = runner.decode(list(zip(states, random_tokens(n, 4, 12), strict=True))).tobytes()
    for state in states:
        state.free()
    return found


def exact(a: argparse.Namespace) -> dict[str, Any]:
    """Which results differ from one device's, for each share of hot experts; empty lists when all is well."""
    with open_runner(a, None, 0.0, n_slots=4) as runner:
        expected = results(runner, a)
    found: dict[str, Any] = {}
    for share, streams in ((0.0, 1), (0.125, 2), (0.5, 1), (1.0, 4)):
        with open_runner(a, a.expert_device, share, 4, streams) as runner:
            got = results(runner, a)
        name = f"{share:g} hot, {streams} streams"
        found[name] = [what for what, value in expected.items() if got[what] != value]
        print(f"  exact, {name}: {found[name] or 'equal'}", flush=True)
    return found


def seconds(work: Callable[[], object]) -> float:
    """How long it takes."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def speed_of(runner: TrunkRunner, a: argparse.Namespace) -> dict[str, list[float]]:
    """Milliseconds of a decode step of 1 and 4 rows; prompt tokens a second."""
    n = runner.vocab_size
    state = runner.new_sequence()
    found: dict[str, list[float]] = {}
    prompt = random_tokens(n, a.prompt, 1)
    rates = []
    for _ in range(1 + a.repetitions):
        state.clear()
        rates.append(a.prompt / seconds(lambda: runner.prefill(state, prompt, want="none")))
    found["prefill tokens/s"] = rates[1:]
    for rows in (1, 4):
        times = []
        for step in range(WARM_UP + STEPS):
            work = [(state, token) for token in random_tokens(n, rows, step)]
            times.append(1e3 * seconds(lambda: runner.decode_rows(work, [False] * rows)))  # noqa: B023
        found[f"decode of {rows} rows, ms"] = times[WARM_UP:]
    state.free()
    return found


def speed(a: argparse.Namespace) -> dict[str, Any]:
    """One device; two; two with the second slowed down: with shares of hot experts."""
    found: dict[str, Any] = {}

    def measure(name: str, expert: str | None, share: float, streams: int = 1) -> None:
        with open_runner(a, expert, share, streams=streams) as runner:
            found[name] = speed_of(runner, a)
        for what, values in found[name].items():
            print(f"  {name}: {what}: median {np.median(values):,.3f}", flush=True)

    measure("one device", None, 0.0)
    for share in (0.0, 0.125, 0.5):
        measure(f"two devices, {share:g} hot", a.expert_device, share)
    measure("two devices, 0 hot, 2 streams", a.expert_device, 0.0, 2)
    with SlowPair(a.device, a.expert_device) as slow:
        found["link"] = slow.link
        for share in (0.0, 0.125, 0.5):
            measure(f"slow pair, {share:g} hot", a.expert_device, share)
        for streams in (2, 4):
            measure(f"slow pair, 0 hot, {streams} streams", a.expert_device, 0.0, streams)
    return found


def timelines(a: argparse.Namespace) -> dict[str, Any]:
    """Of a step of one row, of four, and of a chunk, as is and slowed down."""
    found: dict[str, Any] = {}

    def add(title: str, share: float, streams: int = 1) -> None:
        with open_runner(a, a.expert_device, share, streams=streams) as runner:
            state = runner.new_sequence()
            runner.prefill(state, random_tokens(runner.vocab_size, a.chunk, 1), want="none")
            for rows in (1, 4):
                step = [(state, token) for token in random_tokens(runner.vocab_size, rows, 2)]
                for _ in range(WARM_UP):
                    runner.decode(step)
                found[f"{title}, {rows} rows"] = timeline(runner, lambda: runner.decode(step))  # noqa: B023
            prompt = random_tokens(runner.vocab_size, streams * a.chunk, 1)

            def fill() -> None:
                state.clear()
                runner.prefill(state, prompt, want="none")

            found[f"{title}, {streams} chunks"] = timeline(runner, fill)

    add("two devices, 0.125 hot", 0.125)
    with SlowPair(a.device, a.expert_device):
        add("slow pair, 0 hot", 0.0)
        add("slow pair, 0.5 hot", 0.5, 2)
    return found


def plot(source: Path, target: Path) -> None:
    """Bars of what each device does, one picture for each timeline."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    lines = json.loads(source.read_text())["timeline"]
    figure, axes = pyplot.subplots(len(lines), 1, figsize=(14, 2.2 * len(lines)), squeeze=False)
    for axis, (title, line) in zip(axes[:, 0], lines.items(), strict=True):
        for name, row, colour in (("target", 1, "tab:blue"), ("beside", 1, "tab:cyan"), ("expert", 0, "tab:orange")):
            for stream in sorted({bar[2] for bar in line[name]}):
                bars = [(begin, end - begin) for begin, end, of in line[name] if of == stream]
                axis.broken_barh(bars, (row + 0.1 + 0.2 * stream, 0.2), facecolors=colour)
        axis.set_yticks([0.5, 1.5], ["expert device", "target"])
        axis.set_title(
            f"{title}: {line['ms']:.2f} ms, target busy {line['target_busy']:.0%}, expert device {line['expert_busy']:.0%}",
            fontsize=9,
        )
        axis.set_xlabel("ms", fontsize=8)
    figure.tight_layout()
    figure.savefig(target)


PARTS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "exact": exact,
    "speed": speed,
    "timeline": timelines,
}


def main() -> int:
    """Run the parts; exit code 1 when a result differs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", type=Path, default=Path("build/bench/split.json"))
    parser.add_argument("--only", default=",".join(PARTS))
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--expert-device", default="cuda:1")
    parser.add_argument(
        "--model", type=Path, default=Path("/dev/shm/luce-full-12.gguf"), help="written if it is not there"
    )
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--preset", default="full")
    parser.add_argument("--prompt", type=int, default=PROMPT)
    parser.add_argument("--exact-prompt", type=int, default=2600)
    parser.add_argument("--chunk", type=int, default=CHUNK)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--plot", type=Path, help="plot this file's timelines instead of measuring")
    parser.add_argument("--out", type=Path, default=Path("split.svg"))
    a = parser.parse_args()
    if a.plot is not None:
        plot(a.plot, a.out)
        return 0
    if not a.model.is_file():
        unfinished = a.model.with_suffix(".part")
        command = ["tools/synth_gguf.py", str(unfinished), "--preset", a.preset, "--layers", str(a.layers)]
        subprocess.run([sys.executable, *command], cwd=ROOT, check=True)
        unfinished.replace(a.model)
    load_libraries(parse_device(a.device)[0])
    find_device(a.device)
    document: dict[str, Any] = json.loads(a.json.read_text()) if a.json.is_file() else {}
    a.json.parent.mkdir(parents=True, exist_ok=True)
    for part in a.only.split(","):
        print(part, flush=True)
        document[part] = PARTS[part](a)
        a.json.write_text(json.dumps(document))
    return 1 if any(any(wrong) for wrong in document.get("exact", {}).values()) else 0


if __name__ == "__main__":
    sys.exit(main())
