#!/usr/bin/env python3
"""What drafts gain on a device: forced acceptances on a random model of the real widths, luce-tiny's own head, prefill with the head.

    python -m bench.device_spec --device cuda:0 --json build/bench/spec.json            # writes the model if it is not there
    python -m bench.device_spec --device cpu --only tiny,prefill --model LUCE-TINY.gguf

Parts, each in what `--limit` leaves of the time:

* prefill: prompts of `--prompt` tokens with the head's keys and values, and on a runner without a head.
* forced: steps as the engine makes them (draft, one row graph, tokens chosen on the device, rollback), but how many drafts are right is
  drawn: each with the chance that is named, whatever the head said. Fixed widths and the adaptive one against a runner without a head.
* tiny: luce-tiny's greedy text with and without its head (the same tokens, or the part fails), for prose, code-like and repetitive text:
  drafts accepted, tokens a step, speed.

Speeds are medians of the repetitions, in tokens a second.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from bench.acceptance import PROMPTS
from pyluce.graph import RunnerOptions, TrunkRunner
from pyluce.native import load_libraries
from pyluce.native.devices import parse_device
from pyluce.native.vocabulary import Vocabulary
from pyluce.options import DEFAULT_MODEL
from pyluce.spec import MAX_DRAFTS, SpecOptions
from pyluce.spec.cost import Seed
from pyluce.spec.speculator import Candidate, Speculator
from pyluce.speculation import CPU_BESIDE, CPU_ROW
from pyluce.state import SequenceState
from pyluce.text import Tokenizer

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("prefill", "forced", "tiny")
CHANCES = (0.4, 0.6, 0.8)
WIDTHS = (2, 3, 4, 5, 8, 0)
Record = dict[str, Any]


class Steps:
    """Decodes one sequence, as the engine would; `accept` says how many drafts of a step are right, and which token comes next."""

    def __init__(self, runner: TrunkRunner, state: SequenceState, width: int, seed: Seed) -> None:
        self.runner = runner
        self.state = state
        self.speculator: Speculator[SequenceState] | None = None
        if width != 1:
            self.speculator = Speculator(SpecOptions(("mtp",), width), seed=seed)
        self.tokens = self.steps = 0

    def step(self, token: int, accept: Callable[[list[int], list[int]], tuple[int, int]]) -> int:
        """The token after `token`; `accept` takes the drafts and the best token of each row."""
        drafts: list[int] = []
        if self.speculator is not None:
            candidate = Candidate(1, self.state, token, (), self.state.length, MAX_DRAFTS)
            drafts = self.speculator.drafts(self.runner, [candidate])[0]
        rows = [(self.state, t) for t in (token, *drafts)]
        begun = time.perf_counter()
        found = self.runner.decode_rows(rows, [False] * len(rows))
        if self.speculator is not None:
            self.speculator.computed(self.runner, len(rows), time.perf_counter() - begun)
        best = [row if isinstance(row, int) else int(np.argmax(row)) for row in found]
        right, following = accept(drafts, best)
        if right < len(drafts):
            self.state.rollback(len(drafts) - right)
        if self.speculator is not None:
            self.speculator.verified(1, right)
        self.tokens += right + 1
        self.steps += 1
        return following


@contextmanager
def opened(model: Path, device: str, *, mtp: bool, n_ctx: int, chunk: int, n_slots: int = 1) -> Iterator[TrunkRunner]:
    options = RunnerOptions(
        n_ctx=n_ctx, n_slots=n_slots, device=device, mtp=mtp, chunk_tokens=chunk, max_rollback=MAX_DRAFTS if mtp else 0
    )
    begun = time.perf_counter()
    with TrunkRunner(model, options) as runner:
        print(
            f"  {model.name} {'with' if mtp else 'without'} head: {time.perf_counter() - begun:.1f} s to load",
            flush=True,
        )
        yield runner


def prefill_seconds(runner: TrunkRunner, tokens: list[int]) -> float:
    state = runner.new_sequence()
    try:
        begun = time.perf_counter()
        runner.prefill(state, tokens)
        return time.perf_counter() - begun
    finally:
        state.free()


def forced_rate(runner: TrunkRunner, width: int, chance: float, seconds: float, seed: Seed) -> tuple[float, float]:
    """(tokens a second, rows a step), the steps that build graphs before the clock starts not counted."""
    rng = random.Random(7)
    vocab = runner.vocab_size
    state = runner.new_sequence()
    try:
        runner.prefill(state, [rng.randrange(vocab) for _ in range(512)], want="none")

        def accept(drafts: list[int], best: list[int]) -> tuple[int, int]:
            right = 0
            while right < len(drafts) and rng.random() < chance:
                right += 1
            return right, rng.randrange(vocab)

        steps, token = Steps(runner, state, width, seed), 1
        quiet, begun = 0, time.perf_counter()
        while quiet < 12 and time.perf_counter() - begun < 2 * seconds:
            built = runner.graphs_built
            token = steps.step(token, accept)
            quiet = quiet + 1 if runner.graphs_built == built else 0
        steps.tokens = steps.steps = 0
        begun = time.perf_counter()
        while time.perf_counter() - begun < seconds and state.length < runner.options.n_ctx - 2 * MAX_DRAFTS:
            token = steps.step(token, accept)
        return steps.tokens / (time.perf_counter() - begun), steps.tokens / steps.steps
    finally:
        state.free()


def measure_prefill(runner: TrunkRunner, prompt: int, repetitions: int) -> list[float]:
    tokens = np.random.default_rng(3).integers(1, runner.vocab_size, prompt).tolist()
    return [prompt / prefill_seconds(runner, tokens) for _ in range(repetitions + 1)][1:]


def real_widths(a: argparse.Namespace, record: Record, wanted: Sequence[str], seed: Seed) -> None:
    """Prefill and forced acceptances on one model; the runner without a head first."""
    values: dict[bool, list[float]] = {}
    n_ctx = max(a.prompt, 4096) + 512
    with opened(a.model, a.device, mtp=False, n_ctx=n_ctx, chunk=a.chunk) as runner:
        if "prefill" in wanted:
            values[False] = measure_prefill(runner, a.prompt, a.repetitions)
        if "forced" in wanted:
            record["without head"] = forced_rate(runner, 1, 0.0, a.seconds, seed)[0]
    with opened(a.model, a.device, mtp=True, n_ctx=n_ctx, chunk=a.chunk) as runner:
        if "prefill" in wanted:
            values[True] = measure_prefill(runner, a.prompt, a.repetitions)
            off, on = (statistics.median(values[head]) for head in (False, True))
            record["prefill"] = {"without": values[False], "with": values[True], "costs": off / on - 1}
            print(f"  prefill of {a.prompt}: {off:,.0f} without head, {on:,.0f} with: {off / on - 1:+.1%}", flush=True)
        if "forced" in wanted:
            forced(runner, record, a.seconds, seed)


def forced(runner: TrunkRunner, record: Record, seconds: float, seed: Seed) -> None:
    """Every width at every chance."""
    base = record["without head"]
    rows = record["forced"] = {"width 1, head filled": forced_rate(runner, 1, 0.0, seconds, seed)[0]}
    print(f"  width 1: {base:.0f} without head, {rows['width 1, head filled']:.0f} with its keys filled", flush=True)
    for chance in CHANCES:
        shown = []
        for width in WIDTHS:
            rate, per_step = forced_rate(runner, width, chance, seconds, seed)
            rows[f"{chance} {width or 'adaptive'}"] = {"rate": rate, "tokens a step": per_step, "gain": rate / base}
            shown.append(f"{width or 'adaptive'}: {rate / base:.2f} ({per_step:.2f} tokens a step)")
        print(f"  chance {chance}: {', '.join(shown)}", flush=True)


def tiny(a: argparse.Namespace, record: Record, seed: Seed) -> bool:
    """luce-tiny on the device. False when a text with drafts was another one."""
    same = True
    rows: Record = {}
    texts: dict[tuple[str, int], list[int]] = {}
    with closing(Vocabulary(DEFAULT_MODEL)) as vocabulary:
        tokenizer = Tokenizer(vocabulary)
        prompts = {kind: [tokenizer.encode_text(text) for text in found] for kind, found in PROMPTS.items()}
        for mtp in (False, True):
            with opened(DEFAULT_MODEL, a.device, mtp=mtp, n_ctx=1024, chunk=512) as runner:
                for width in (4, 0) if mtp else (1,):
                    for kind, found in prompts.items():
                        rates, steps, tokens = [], 0, 0
                        for _ in range(a.repetitions):
                            for number, prompt in enumerate(found):
                                text, run, took = greedy(runner, prompt, width, a.tokens, seed)
                                same = same and texts.setdefault((kind, number), text) == text
                                rates.append(run.tokens / took)
                                steps, tokens = steps + run.steps, tokens + run.tokens
                        name = "without head" if not mtp else "width 4" if width else "adaptive"
                        rows[f"{kind}, {name}"] = {"rate": statistics.median(rates), "tokens a step": tokens / steps}
    for kind in prompts:
        off = rows[f"{kind}, without head"]["rate"]
        shown = [f"without head {off:.0f}"]
        for name in ("width 4", "adaptive"):
            row = rows[f"{kind}, {name}"]
            shown.append(
                f"{name} {row['rate']:.0f} ({row['rate'] / off:.2f}, {row['tokens a step']:.2f} tokens a step)"
            )
        print(f"  {kind}: {', '.join(shown)}", flush=True)
    record["tiny"] = rows | {"same texts": same}
    print("  every text is the one without drafts" if same else "  FAILED: a text with drafts differs", flush=True)
    return same


def greedy(runner: TrunkRunner, prompt: list[int], width: int, n: int, seed: Seed) -> tuple[list[int], Steps, float]:
    """`n` greedy tokens after a prompt, the steps, and their seconds."""
    state = runner.new_sequence()
    try:
        last = runner.prefill(state, prompt)
        assert last is not None
        text = [int(last.argmax())]

        def accept(drafts: list[int], best: list[int]) -> tuple[int, int]:
            right = next((i for i, draft in enumerate(drafts) if draft != best[i]), len(drafts))
            text.extend(best[: right + 1])
            return right, best[right]

        steps, token, begun = Steps(runner, state, width, seed), text[0], time.perf_counter()
        while len(text) < n:
            token = steps.step(token, accept)
        return text[:n], steps, time.perf_counter() - begun
    finally:
        state.free()


def write_model(path: Path, layers: int) -> None:
    """The random model with a head, unless it is there."""
    if path.is_file():
        return
    unfinished = path.with_suffix(".part")
    command = [sys.executable, "tools/synth_gguf.py", str(unfinished), "--preset", "full", "--layers", str(layers)]
    subprocess.run([*command, "--mtp"], cwd=ROOT, check=True)
    unfinished.replace(path)


def main() -> int:
    """Run the parts; 1 when a text with drafts was another one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--model", type=Path, default=Path("/dev/shm/luce-full-12-mtp.gguf"))
    parser.add_argument("--layers", type=int, default=12, help="of the model that is written")
    parser.add_argument("--only", default=",".join(PARTS), help="parts, with commas between")
    parser.add_argument("--prompt", type=int, default=16_384, help="tokens of a prompt that is prefilled")
    parser.add_argument("--chunk", type=int, default=8_192, help="rows of a full prefill graph")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each width at each chance")
    parser.add_argument("--tokens", type=int, default=200, help="of each of luce-tiny's texts")
    parser.add_argument("--json", type=Path, default=ROOT / "build" / "bench" / "spec.json")
    a = parser.parse_args()
    wanted = a.only.split(",")
    if unknown := set(wanted) - set(PARTS):
        parser.error(f"expected parts of {', '.join(PARTS)}, found {', '.join(sorted(unknown))}")
    load_libraries(parse_device(a.device)[0])
    seed = Seed(row=CPU_ROW, beside=CPU_BESIDE) if a.device == "cpu" else Seed()
    record: Record = {"device": a.device, "model": a.model.name, "date": time.strftime("%Y-%m-%d")}
    ok = True
    if "tiny" in wanted:
        ok = tiny(a, record, seed)
    if "prefill" in wanted or "forced" in wanted:
        write_model(a.model, a.layers)
        real_widths(a, record, wanted, seed)
    a.json.parent.mkdir(parents=True, exist_ok=True)
    a.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
