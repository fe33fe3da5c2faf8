"""One part of the device suite in a process of its own, for one side: `python -m bench.device_worker PART SIDE ...`.

Every figure is a list of repetitions, in tokens a second; the record is written after each, so that a part that runs out of time
leaves what it has measured.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from pyluce.native import load_libraries
from pyluce.native.devices import parse_device

WARM_UP_STEPS = 8
STEPS = 32


@dataclass(frozen=True)
class Sizes:
    """Tokens. `divided` is for trying the suite where the real sizes take too long."""

    prompt: int = 16_384
    depths: tuple[int, ...] = (0, 16_384, 65_536)
    short_prompt: int = 1_024
    short_counts: tuple[int, ...] = (1, 2, 4, 8, 16)
    long_sequences: int = 4

    def divided(self, by: int) -> Sizes:
        """Every length divided."""
        depths = tuple(depth // by for depth in self.depths)
        return replace(self, prompt=self.prompt // by, depths=depths, short_prompt=max(16, self.short_prompt // by))


Make = Callable[[int, int, int], Any]
"""(tokens a sequence may hold, sequences, rows of a full prefill graph) -> an engine"""


class Recorder:
    """Figures by name, written to a file as they come."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._values: dict[str, Any] = {}

    def put(self, name: str, value: Any) -> None:
        """Record and print one figure."""
        self._values[name] = value
        self._path.write_text(json.dumps(self._values))
        shown = (
            f"median {np.median(value):,.1f} ({min(value):,.1f} to {max(value):,.1f})"
            if isinstance(value, list)
            else value
        )
        print(f"  {name}: {shown}", flush=True)


def random_tokens(n_vocab: int, count: int, seed: int) -> list[int]:
    """Reproducible tokens."""
    return [int(token) for token in np.random.default_rng(seed).integers(1, n_vocab, count)]


def rates(work: Callable[[], int], repetitions: int) -> list[float]:
    """Tokens a second of each repetition; `work` returns how many tokens it took."""
    found = []
    for _ in range(repetitions):
        started = time.perf_counter()
        tokens = work()
        found.append(tokens / (time.perf_counter() - started))
    return found


def step_rates(engine: Any, sequences: Sequence[int], repetitions: int, record: Recorder, name: str) -> None:
    """Aggregate tokens a second of decode steps over all the sequences, after a warm-up: with all logits on the host as upstream's
    programs have them, then (ours) with the best token of each row only.
    """
    for title, step in ((name, engine.step), (f"greedy {name}", getattr(engine, "step_greedy", None))):
        if step is None:
            continue
        tokens = iter(random_tokens(engine.n_vocab, len(sequences) * (WARM_UP_STEPS + repetitions * STEPS), 2))

        def steps(count: int, step: Any = step, tokens: Any = tokens) -> int:
            for _ in range(count):
                step([(sequence, next(tokens)) for sequence in sequences])
            return count * len(sequences)

        steps(WARM_UP_STEPS)
        record.put(title, rates(lambda: steps(STEPS), repetitions))  # noqa: B023


def decode(make: Make, record: Recorder, chunk: int, repetitions: int, sizes: Sizes) -> None:
    """One sequence at each depth."""
    depths = sizes.depths
    engine = make(depths[-1] + 2 * len(depths) * (WARM_UP_STEPS + repetitions * STEPS), 1, chunk)
    try:
        tokens = random_tokens(engine.n_vocab, depths[-1], 1)
        engine.fill(0, tokens[:1])
        step_rates(engine, [0], repetitions, record, "decode at 0")
        engine.clear()
        filled = 0
        for depth in depths[1:]:
            engine.fill(0, tokens[filled:depth])
            filled = depth
            step_rates(engine, [0], repetitions, record, f"decode at {depth}")
    finally:
        engine.close()


def prefill(make: Make, record: Recorder, chunk: int, repetitions: int, sizes: Sizes) -> None:
    """A prompt in an empty sequence, and after the deepest depth; one repetition each before those that count."""
    deepest, prompt = sizes.depths[-1], sizes.prompt
    engine = make(deepest + prompt, 1, chunk)
    try:
        tokens = random_tokens(engine.n_vocab, deepest + prompt, 1)
        found = []
        for _ in range(repetitions + 1):
            engine.clear()
            found += rates(lambda: filled(engine, 0, tokens[:prompt]), 1)
        record.put(f"prefill of {prompt} at 0, chunk {chunk}", found[1:])
        engine.clear()
        engine.fill(0, tokens[:deepest])
        engine.save(0)
        found = []
        for _ in range(repetitions + 1):
            engine.restore(0)
            found += rates(lambda: filled(engine, 0, tokens[deepest:]), 1)
        record.put(f"prefill of {prompt} at {deepest}, chunk {chunk}", found[1:])
    finally:
        engine.close()


def filled(engine: Any, sequence: int, tokens: Sequence[int]) -> int:
    """Prefill; how many tokens that were."""
    engine.fill(sequence, tokens)
    return len(tokens)


def batch(make: Make, record: Recorder, chunk: int, repetitions: int, sizes: Sizes) -> None:
    """Decode of several sequences at once: 1 to 16 short ones, then 4 long ones; aggregate tokens a second."""
    spare = 2 * (WARM_UP_STEPS + repetitions * STEPS)
    for length, counts in ((sizes.short_prompt, sizes.short_counts), (sizes.prompt, (sizes.long_sequences,))):
        engine = make(length + spare, max(counts), chunk)
        try:
            tokens = random_tokens(engine.n_vocab, length * max(counts), 3)
            for count in counts:
                engine.clear()
                parts = [tokens[i * length : (i + 1) * length] for i in range(count)]
                record.put(f"prefill of {count} x {length}", rates(lambda: fill_all(engine, parts), 1))  # noqa: B023
                step_rates(engine, range(count), repetitions, record, f"decode of {count} x {length}")
        finally:
            engine.close()


def fill_all(engine: Any, parts: Sequence[Sequence[int]]) -> int:
    """Prefill one sequence after the other; how many tokens that were."""
    return sum(filled(engine, sequence, part) for sequence, part in enumerate(parts))


PARTS = {"decode": decode, "prefill": prefill, "batch": batch}


def main() -> None:
    """Run the part that the command line names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("side", choices=("ours", "upstream"))
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--record", type=Path, required=True)
    parser.add_argument("--chunk", type=int, action="append", required=True)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--divide", type=int, default=1, metavar="N", help="every length by N, for trying this out")
    a = parser.parse_args()
    load_libraries(parse_device(a.device)[0])
    from bench.device_engines import open_engine

    def make(n_ctx: int, n_sequences: int, chunk: int) -> Any:
        started = time.perf_counter()
        engine = open_engine(a.side, a.model, a.device, n_ctx, n_sequences, chunk)
        print(f"  {a.side}: loaded in {time.perf_counter() - started:.1f} s", flush=True)
        return engine

    record, sizes = Recorder(a.record), Sizes().divided(a.divide)
    for chunk in a.chunk:
        PARTS[a.part](make, record, chunk, a.repetitions, sizes)


if __name__ == "__main__":
    main()
