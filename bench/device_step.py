"""Where the time of a decode step goes on a GPU: the device's part, and what the host adds before and after it.

    python -m bench.device_step --model MODEL.gguf --device cuda:0 --rows 1,4 --record FILE

* device: the step's graph replayed without waiting, each time behind the upload of its inputs, so that nothing of the host shows.
* launch: the host's time for starting one replay.
* step: `TrunkRunner.decode_rows`, with the token of each row alone, then with all logits; its parts are the host's time for writing the
  inputs, sending them, starting, and waiting with the results read.
* engine: the same through `BatchCore`, with text, events and statistics.

Times are medians in microseconds.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from pyluce.engine import BatchCore, GenerationRequest, Resources, Ticket
from pyluce.graph import RunnerOptions, TrunkRunner
from pyluce.graph.results import ResultReader
from pyluce.graph.staging import Staging
from pyluce.native import load_libraries
from pyluce.native.backend import Backend
from pyluce.native.devices import parse_device
from pyluce.native.sampler import SamplerChain

WARM_UP = 12
REPLAYS = 40


class NoText:
    """A token table without text: random models have no vocabulary worth reading."""

    def token_bytes(self, token: int) -> bytes:
        return b"."

    def is_end(self, token: int) -> bool:
        return False


class Home:
    """What a ticket asks of its engine."""

    forked = False

    def check_process(self) -> None:
        pass


@contextmanager
def watched(parts: dict[str, list[float]]) -> Iterator[None]:
    """Time the steps of a step: each call's microseconds by part."""
    places: list[tuple[type[Any], str, str]] = [
        (Staging, "send", "send"),
        (Backend, "start", "start"),
        (ResultReader, "rows", "wait and read"),
    ]
    plain = [getattr(owner, name) for owner, name, _ in places]

    def timed(function: Callable[..., Any], part: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            begun = time.perf_counter()
            result = function(*arguments)
            parts.setdefault(part, []).append(1e6 * (time.perf_counter() - begun))
            return result

        return call

    for (owner, name, part), function in zip(places, plain, strict=True):
        setattr(owner, name, timed(function, part))
    try:
        yield
    finally:
        for (owner, name, _), function in zip(places, plain, strict=True):
            setattr(owner, name, function)


def step_times(runner: TrunkRunner, states: list[Any], steps: int, wants_logits: bool) -> list[float]:
    """Microseconds of each step, every sequence one token further."""
    rng = np.random.default_rng(1)
    tokens = rng.integers(1, runner.vocab_size, (WARM_UP + steps, len(states))).tolist()
    wants = [wants_logits] * len(states)
    found = []
    for row in tokens:
        begun = time.perf_counter()
        runner.decode_rows(list(zip(states, row, strict=True)), wants)
        found.append(1e6 * (time.perf_counter() - begun))
    return found[WARM_UP:]


def device_times(runner: TrunkRunner) -> dict[str, float]:
    """Of the graph of the last step: replays without waiting, which write the same rows again.

    The inputs go along: a step uses their memory for other things when it has read them.
    """
    graph, backend, inputs = runner._graphs.recent, runner._backend, runner._inputs
    assert graph is not None
    runner._abandon()
    arrays = inputs._arrays(graph)
    backend.wait()
    whole, launches = [], []
    for _ in range(5):
        begun = time.perf_counter()
        for _ in range(REPLAYS):
            arrays.send()
            one = time.perf_counter()
            graph.start(backend)
            launches.append(1e6 * (time.perf_counter() - one))
        backend.wait()
        whole.append(1e6 * (time.perf_counter() - begun) / REPLAYS)
    single = []
    for _ in range(20):
        arrays.send()
        backend.wait()
        begun = time.perf_counter()
        graph.start(backend)
        backend.wait()
        single.append(1e6 * (time.perf_counter() - begun))
    return {"device": median(whole), "launch, under way": median(launches), "start and wait, alone": median(single)}


def engine_times(runner: TrunkRunner, count: int, steps: int) -> float:
    """Microseconds of a step of `BatchCore` with so many greedy requests."""
    n_slots = runner.n_free_slots
    n_ctx = runner.options.n_ctx
    resources = Resources(
        runner, NoText(), partial(SamplerChain, runner.vocab_size), n_ctx, runner.options.chunk_tokens
    )
    core = BatchCore(resources, lambda: None, n_slots=n_slots, max_queue=n_slots, prefill_share=1.0)
    for number in range(count):
        request = GenerationRequest((5, 6, 7 + number), max_tokens=WARM_UP + steps + 8, ignore_end=True)
        ticket = Ticket(request, Home(), number + 1, submitted_at=time.perf_counter(), on_answer=core.reserve(request))
        core.admit(ticket)
    for _ in range(count + WARM_UP):
        core.step()
    found = []
    for _ in range(steps):
        begun = time.perf_counter()
        core.step()
        found.append(1e6 * (time.perf_counter() - begun))
    core.drop_all(RuntimeError("measured"))
    return median(found)


def median(values: list[float]) -> float:
    """To a tenth."""
    return round(float(np.median(values)), 1)


def measure_rows(runner: TrunkRunner, count: int, steps: int) -> dict[str, Any]:
    """A record for one number of rows."""
    states = [runner.new_sequence() for _ in range(count)]
    for state in states:
        runner.prefill(state, [5, 6, 7])
    record: dict[str, Any] = {"rows": count}
    record["step, tokens"] = median(step_times(runner, states, steps, False))
    parts: dict[str, list[float]] = {}
    with watched(parts):
        step_times(runner, states, steps, False)
    record["parts"] = {part: median(values[WARM_UP:]) for part, values in parts.items()}
    record["step, logits"] = median(step_times(runner, states, steps, True))
    step_times(runner, states, 2, False)
    record.update(device_times(runner))
    for state in states:
        state.free()
    record["engine"] = engine_times(runner, count, steps)
    return record


def measure(model: Path, device: str, counts: list[int], steps: int) -> list[dict[str, Any]]:
    """A record for each number of rows, of one loaded model."""
    records = []
    n_ctx = 4 * (WARM_UP + steps) + 64
    options = RunnerOptions(n_ctx=n_ctx, n_slots=max(counts), max_rollback=0, device=device)
    with TrunkRunner(model, options) as runner:
        for count in counts:
            records.append(measure_rows(runner, count, steps))
            print(json.dumps(records[-1]), flush=True)
    return records


def main() -> None:
    """Measure, print, record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--rows", default="1,4", help="numbers of rows, by commas")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--record", type=Path, required=True)
    a = parser.parse_args()
    if parse_device(a.device)[0] == "cpu":
        parser.error("--device: expected a GPU: on the CPU the host's part is the step itself")
    load_libraries(parse_device(a.device)[0])
    records = measure(a.model, a.device, [int(n) for n in a.rows.split(",")], a.steps)
    a.record.write_text(json.dumps({"model": a.model.name, "device": a.device, "records": records}))


if __name__ == "__main__":
    main()
