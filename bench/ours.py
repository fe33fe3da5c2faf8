"""One timed run of pyluce's own graphs, in a process of its own: what `llama-bench -r 1` does, done by `TrunkRunner`.

    python -m bench.ours MODEL [--prefill 512,2048] [--decode 64] [--depth 0,512] [--threads 1]

Prints one JSON object: test name -> tokens a second. As in llama-bench: random tokens, a warm-up before each test, logits of
a prompt's last token and of every decoded token, no sampling, filling the context to the depth is not timed.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np

from pyluce.graph import RunnerOptions, TrunkRunner

WARM_UP_DECODE = 2


def prefill_rate(runner: TrunkRunner, tokens: list[int]) -> float:
    """Tokens a second of one prompt in an empty sequence."""
    state = runner.new_sequence()
    try:
        started = time.perf_counter()
        runner.prefill(state, tokens, want="last")
        return len(tokens) / (time.perf_counter() - started)
    finally:
        state.free()


def decode_rate(runner: TrunkRunner, tokens: list[int], depth: int, n_decode: int) -> float:
    """Tokens a second of `n_decode` steps of one row, after `depth` prompt tokens."""
    state = runner.new_sequence()
    try:
        if depth:
            runner.prefill(state, tokens[:depth], want="none")
        for token in tokens[:WARM_UP_DECODE]:
            runner.decode([(state, token)])
        state.rollback(WARM_UP_DECODE)
        started = time.perf_counter()
        for token in tokens[:n_decode]:
            runner.decode([(state, token)])
        return n_decode / (time.perf_counter() - started)
    finally:
        state.free()


def main() -> None:
    """Run the tests that the command line names and print their rates."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--prefill", default="512,2048")
    parser.add_argument("--decode", type=int, default=64)
    parser.add_argument("--depth", default="0,512")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    lengths = [int(text) for text in arguments.prefill.split(",")]
    depths = [int(text) for text in arguments.depth.split(",")]
    n_ctx = max(*lengths, *(depth + arguments.decode for depth in depths)) + 64
    options = RunnerOptions(n_ctx=n_ctx, n_threads=arguments.threads, kv_type="f16")
    rates: dict[str, float] = {}
    with TrunkRunner(arguments.model, options) as runner:
        tokens = np.random.default_rng(1).integers(0, runner.vocab_size, size=n_ctx).tolist()
        for length in lengths:
            prefill_rate(runner, tokens[:length])
            rates[f"prefill {length}"] = prefill_rate(runner, tokens[:length])
        for depth in depths:
            rates[f"decode at {depth}"] = decode_rate(runner, tokens, depth, arguments.decode)
    print(json.dumps(rates))


if __name__ == "__main__":
    main()
