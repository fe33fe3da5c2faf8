#!/usr/bin/env python3
"""What drafts gain on a device: forced acceptances on a random model of the real widths, luce-tiny's own head, prefill with the head.

    python -m bench.device_spec --device cuda:0 --json build/bench/spec.json            # writes the model if it is not there
    python -m bench.device_spec --device cuda:0 --sides ours,upstream --only forced     # beside upstream's own MTP
    python -m bench.device_spec --device cpu --only tiny,prefill --model LUCE-TINY.gguf

Parts:

* prefill: prompts of `--prompt` tokens with the head's keys and values, and on a runner without a head.
* forced: steps as the engine makes them (draft, one row graph, tokens chosen on the device, rollback), but how many drafts are right is
  drawn: each with the chance that is named, whatever the head said. Fixed widths and the adaptive one against a runner without a head,
  after prompts of `--after` tokens.
* tiny: luce-tiny's greedy text with and without its head (the same tokens, or the part fails), for prose, code-like and repetitive text:
  drafts accepted, tokens a step, speed.

Sides: ours, and upstream's libllama of the same build (`bench.upstream_mtp`), one after the other, upstream in a process of its own. Both
make as many steps with the same draws. Speeds are medians of the repetitions, in tokens a second.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np

from bench.acceptance import PROMPTS
from bench.drafts import (
    AFTER,
    CHANCES,
    TINY_WIDTHS,
    WARM_UP,
    WIDTHS,
    Accept,
    Acceptance,
    Forced,
    Record,
    forced_rates,
    greedy_text,
    prompt_tokens,
)
from bench.spec_report import report
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
SIDES = ("ours", "upstream")
ADAPTIVE = 0
QUIET, MOST_WARM_UP = 12, 200
"""Before the clock starts, a fixed width makes so many steps in a row that build no graph, out of so many at most; the adaptive one, which
learns what steps cost, makes all of those."""


class Steps:
    """Decodes one sequence, as the engine would."""

    def __init__(self, runner: TrunkRunner, state: SequenceState, width: int, seed: Seed) -> None:
        self.runner = runner
        self.state = state
        self.speculator: Speculator[SequenceState] | None = None
        if width != 1:
            self.speculator = Speculator(SpecOptions(("mtp",), width), seed=seed)
        self.tokens = self.steps = 0

    def step(self, token: int, accept: Accept) -> int:
        """Decode `token` and drafts after it; the token that follows those that `accept` finds right."""
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

    def wait(self) -> None:
        """Nothing: a step ends when the device is done."""


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


def forced_row(
    runner: TrunkRunner, start: SequenceState, width: int, chance: float, a: argparse.Namespace, seed: Seed
) -> Record:
    """One width at one chance, after what `start` holds."""
    vocab = runner.vocab_size
    state = start.copy()
    try:
        steps, draws, token = Steps(runner, state, width, seed), Forced(chance, vocab, WARM_UP), 1
        quiet = 0
        while (quiet < QUIET or width == ADAPTIVE) and steps.steps < MOST_WARM_UP:
            built = runner.graphs_built
            token = steps.step(token, draws.accept)
            quiet = quiet + 1 if runner.graphs_built == built else 0
        return forced_rates(steps, vocab, chance, a.repetitions, a.steps)
    finally:
        state.free()


@contextmanager
def prefilled(runner: TrunkRunner, length: int) -> Iterator[SequenceState]:
    """A sequence with a random prompt."""
    state = runner.new_sequence()
    try:
        runner.prefill(state, prompt_tokens(runner.vocab_size, length), want="none")
        yield state
    finally:
        state.free()


def measure_prefill(runner: TrunkRunner, prompt: int, repetitions: int) -> list[float]:
    tokens = prompt_tokens(runner.vocab_size, prompt)
    return [prompt / prefill_seconds(runner, tokens) for _ in range(repetitions + 1)][1:]


def real_widths(a: argparse.Namespace, record: Record, wanted: Sequence[str], seed: Seed) -> None:
    """Prefill and forced acceptances on one model; the runner without a head first."""
    values: dict[bool, list[float]] = {}
    room = (MOST_WARM_UP + a.repetitions * a.steps) * (MAX_DRAFTS + 1)
    n_ctx = max(a.prompt if "prefill" in wanted else 0, max(a.after) + room if "forced" in wanted else 0) + 64
    after: Record = {str(length): {} for length in a.after}
    for mtp in (False, True):
        with opened(a.model, a.device, mtp=mtp, n_ctx=n_ctx, chunk=a.chunk, n_slots=2) as runner:
            if "prefill" in wanted:
                values[mtp] = measure_prefill(runner, a.prompt, a.repetitions)
            if "forced" in wanted:
                for length in a.after:
                    with prefilled(runner, length) as start:
                        forced(runner, start, after[str(length)], a, seed)
    if "prefill" in wanted:
        off, on = (statistics.median(values[mtp]) for mtp in (False, True))
        record["prefill"] = {"without": values[False], "with": values[True], "costs": off / on - 1}
    if "forced" in wanted:
        record["forced"] = after


def forced(runner: TrunkRunner, start: SequenceState, rows: Record, a: argparse.Namespace, seed: Seed) -> None:
    """Every width at every chance, or on a runner without a head one row a step."""
    base = forced_row(runner, start, 1, 0.0, a, seed)
    if not runner.options.mtp:
        rows["without head"] = base
        return
    off = rows["without head"]["rate"]
    rows["width 1, head filled"] = base | {"gain": base["rate"] / off}
    for chance in CHANCES:
        for width in (*WIDTHS, ADAPTIVE):
            row = forced_row(runner, start, width, chance, a, seed)
            rows[f"{chance} {width or 'adaptive'}"] = row | {"gain": row["rate"] / off}
        print(f"  ours: after {start.length}, chance {chance}", flush=True)


def tiny(a: argparse.Namespace, record: Record, seed: Seed) -> bool:
    """luce-tiny on the device. False when a text with drafts was another one."""
    texts: dict[tuple[str, int], list[int]] = {}
    same = True
    rows: Record = {}
    with closing(Vocabulary(DEFAULT_MODEL)) as vocabulary:
        tokenizer = Tokenizer(vocabulary)
        prompts = {kind: [tokenizer.encode_text(text) for text in found] for kind, found in PROMPTS.items()}
    for mtp in (False, True):
        with opened(DEFAULT_MODEL, a.device, mtp=mtp, n_ctx=1024, chunk=512) as runner:
            for width in (*TINY_WIDTHS, ADAPTIVE) if mtp else (1,):
                for kind, found in prompts.items():
                    rates, counts, steps, tokens = [], Acceptance(), 0, 0
                    for _ in range(a.repetitions):
                        for number, prompt in enumerate(found):
                            text, run, took = greedy(runner, prompt, width, a.tokens, counts, seed)
                            same = same and texts.setdefault((kind, number), text) == text
                            rates.append(run.tokens / took)
                            steps, tokens = steps + run.steps, tokens + run.tokens
                    name = "without head" if not mtp else f"width {width}" if width else "adaptive"
                    row = {"rate": statistics.median(rates), "tokens a step": tokens / steps}
                    rows[f"{kind}, {name}"] = row | {"acceptance": counts.rates()}
    record["tiny"] = rows | {"same texts": same}
    print("  every text is the one without drafts" if same else "  FAILED: a text with drafts differs", flush=True)
    return same


def greedy(
    runner: TrunkRunner, prompt: list[int], width: int, n: int, counts: Acceptance, seed: Seed
) -> tuple[list[int], Steps, float]:
    """`n` greedy tokens after a prompt, the steps, and their seconds."""
    state = runner.new_sequence()
    try:
        last = runner.prefill(state, prompt)
        assert last is not None
        steps = Steps(runner, state, width, seed)
        text, took = greedy_text(steps, int(last.argmax()), n, counts)
        return text, steps, took
    finally:
        state.free()


def upstream(a: argparse.Namespace, wanted: Sequence[str]) -> Record:
    """The same parts by upstream's libllama."""
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "record.json"
        command = [sys.executable, "-m", "bench.upstream_spec", ",".join(wanted), "--device", a.device]
        command += ["--model", str(a.model), "--record", str(record), "--prompt", str(a.prompt)]
        command += ["--after", *map(str, a.after), "--chunk", str(a.upstream_chunk), "--tokens", str(a.tokens)]
        command += ["--repetitions", str(a.repetitions), "--steps", str(a.steps)]
        command += ["--on-host"] if a.on_host else []
        code = subprocess.run(command, cwd=ROOT, check=False).returncode
        found: Record = json.loads(record.read_text()) if record.is_file() else {}
        return found | {"ended": code == 0}


def write_model(path: Path, layers: int) -> None:
    """The random model with a head, unless it is there."""
    if path.is_file():
        return
    unfinished = path.with_suffix(".part")
    command = [sys.executable, "tools/synth_gguf.py", str(unfinished), "--preset", "full", "--layers", str(layers)]
    subprocess.run([*command, "--mtp"], cwd=ROOT, check=True)
    unfinished.replace(path)


def lengths(text: str) -> list[int]:
    """ "512,16384" as integers."""
    found = [int(part) for part in text.split(",")]
    if min(found) < 1:
        raise argparse.ArgumentTypeError(f"expected lengths from 1 on, found {text}")
    return found


def main() -> int:
    """Run the parts; 1 when a text with drafts was another one, or upstream's process ended early."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--model", type=Path, default=Path("/dev/shm/luce-full-12-mtp.gguf"))
    parser.add_argument("--layers", type=int, default=12, help="of the model that is written")
    parser.add_argument("--only", default=",".join(PARTS), help="parts, with commas between")
    parser.add_argument("--prompt", type=int, default=16_384, help="tokens of a prompt that is prefilled")
    parser.add_argument("--chunk", type=int, default=8_192, help="rows of a full prefill graph")
    parser.add_argument("--after", type=lengths, default=AFTER, help="tokens before forced steps, with commas between")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--steps", type=int, default=64, help="forced steps of a repetition")
    parser.add_argument("--tokens", type=int, default=200, help="of each of luce-tiny's texts")
    parser.add_argument("--sides", default="ours", help="ours, upstream or both")
    parser.add_argument("--upstream-chunk", type=int, default=2_048, help="upstream's ubatch")
    parser.add_argument("--on-host", action="store_true", help="upstream chooses tokens from logits on the host")
    parser.add_argument("--json", type=Path, default=ROOT / "build" / "bench" / "spec.json")
    a = parser.parse_args()
    wanted, sides = a.only.split(","), a.sides.split(",")
    if unknown := [*(set(wanted) - set(PARTS)), *(set(sides) - set(SIDES))]:
        parser.error(
            f"expected parts of {', '.join(PARTS)} and sides of {', '.join(SIDES)}, found {', '.join(unknown)}"
        )
    if a.on_host and "upstream" not in sides:
        parser.error("--on-host is upstream's: expected upstream in --sides")
    if {"prefill", "forced"} & set(wanted):
        write_model(a.model, a.layers)
    record: Record = {"device": a.device, "model": a.model.name, "date": time.strftime("%Y-%m-%d")}
    ok = True
    a.json.parent.mkdir(parents=True, exist_ok=True)
    if "ours" in sides:
        record["ours"] = {}
        ok = ours(a, record["ours"], wanted)
        a.json.write_text(json.dumps(record, indent=1) + "\n")
    if "upstream" in sides:
        record["upstream"] = upstream(a, wanted)
        ok = ok and record["upstream"]["ended"]
        a.json.write_text(json.dumps(record, indent=1) + "\n")
    print(report(record))
    return 0 if ok else 1


def ours(a: argparse.Namespace, record: Record, wanted: Sequence[str]) -> bool:
    """Our parts; False when a text with drafts was another one."""
    load_libraries(parse_device(a.device)[0])
    seed = Seed(row=CPU_ROW, beside=CPU_BESIDE) if a.device == "cpu" else Seed()
    same = tiny(a, record, seed) if "tiny" in wanted else True
    if "prefill" in wanted or "forced" in wanted:
        real_widths(a, record, wanted, seed)
    return same


if __name__ == "__main__":
    sys.exit(main())
