"""One timed run of pyluce's own graphs, in a process of its own: what `llama-bench -r 1` does, done by `TrunkRunner`.

    python -m bench.ours MODEL --prefill 512 | --decode 128 [--depth 512] [--threads 1] [--processor-time]

Prints tokens a second (of wall time, or of processor time). As in llama-bench: random tokens, a warm-up before the test, logits of
a prompt's last token and of every decoded token, no sampling, filling the context to the depth is not timed.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from pyluce.graph import RunnerOptions, TrunkRunner

WARM_UP_DECODE = 2
Clock = Callable[[], float]


def prefill_rate(runner: TrunkRunner, tokens: list[int], clock: Clock) -> float:
    """Tokens a second of one prompt in an empty sequence."""
    state = runner.new_sequence()
    try:
        started = clock()
        runner.prefill(state, tokens, want="last")
        return len(tokens) / (clock() - started)
    finally:
        state.free()


def decode_rate(runner: TrunkRunner, tokens: list[int], depth: int, n_decode: int, clock: Clock) -> float:
    """Tokens a second of `n_decode` steps of one row, after `depth` prompt tokens."""
    state = runner.new_sequence()
    try:
        if depth:
            runner.prefill(state, tokens[:depth], want="none")
        for token in tokens[:WARM_UP_DECODE]:
            runner.decode([(state, token)])
        state.rollback(WARM_UP_DECODE)
        started = clock()
        for token in tokens[:n_decode]:
            runner.decode([(state, token)])
        return n_decode / (clock() - started)
    finally:
        state.free()


def main() -> None:
    """Run the test that the command line names and print its rate."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model", type=Path)
    test = parser.add_mutually_exclusive_group(required=True)
    test.add_argument("--prefill", type=int, metavar="N", help="a prompt of N tokens")
    test.add_argument("--decode", type=int, metavar="N", help="N steps of one row")
    parser.add_argument("--depth", type=int, default=0, metavar="N", help="prompt tokens before the decoded ones")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--processor-time", action="store_true", help="of this process, instead of wall time")
    arguments = parser.parse_args()
    clock = time.process_time if arguments.processor_time else time.perf_counter
    length = arguments.prefill or arguments.depth + arguments.decode
    options = RunnerOptions(n_ctx=length + 64, n_threads=arguments.threads, kv_type="f16")
    with TrunkRunner(arguments.model, options) as runner:
        tokens = np.random.default_rng(1).integers(0, runner.vocab_size, size=length).tolist()
        if arguments.prefill:
            prefill_rate(runner, tokens, clock)
            print(prefill_rate(runner, tokens, clock))
        else:
            print(decode_rate(runner, tokens, arguments.depth, arguments.decode, clock))


if __name__ == "__main__":
    main()
