#!/usr/bin/env python3
"""What a park gives back: the driver's figures of a GPU and this process's resident memory, before loading, loaded, parked, loaded again.

    python -m bench.park_memory --device cuda:0 [--model FILE] [--json FILE]     # without a model: luce-tiny

Each round generates an answer, which must have the same logits every time. On a GPU it also parks beside a second engine of the same
process, whose context must then be kept, and computes graphs of upstream's kernels (their limits of shared memory are set once a
process) after a reset. Nothing else may use the GPU meanwhile. Exit code 1 when a park left more than 5 % above the state before
loading, or an answer differs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

import psutil

from pyluce import Luce
from pyluce.luce import Completion
from pyluce.native import load_libraries
from pyluce.native.devices import parse_device
from pyluce.options import DEFAULT_MODEL

ALLOWED: Final = 1.05
ROUNDS: Final = 2
PROMPT_TOKENS: Final = 300
ANSWER_TOKENS: Final = 32
FAULTS: Final = ("batch_variant", "cut_variant")
"""These compute matrix products with upstream's kernels."""


def used_mib(device: str) -> int | None:
    """MiB in use on a GPU as NVIDIA's driver says, those of other processes included; None where it cannot be asked."""
    backend, index = parse_device(device)
    if backend != "cuda":
        return None
    command = ["nvidia-smi", f"--id={index}", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def sample(device: str) -> dict[str, int | None]:
    """The figures now: MiB."""
    return {"device_mib": used_mib(device), "resident_mib": psutil.Process().memory_info().rss >> 20}


def answer(luce: Luce) -> tuple[tuple[int, ...], tuple[bytes, ...]]:
    """A greedy answer to a fixed prompt: tokens and hashes of their logits."""
    prompt = tuple(3 + i * i % 200 for i in range(PROMPT_TOKENS))
    request = luce.request(tokens=prompt, max_tokens=ANSWER_TOKENS, hash_logits=True, temperature=0.0, ignore_end=True)
    done = Completion.collect(request, luce.run(request))
    return done.tokens, done.step_sha256


def rounds(model: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Load, answer, park, load again, with the figures of each state."""
    device = options["device"]
    found: dict[str, Any] = {"before": sample(device), "states": [], "answers_equal": True}
    with tempfile.TemporaryDirectory() as folder, Luce.load(model, cache_dir=Path(folder), **options) as luce:
        expected = answer(luce)
        for _ in range(ROUNDS):
            found["states"].append({"state": "loaded", **sample(device)})
            luce.park()
            found["states"].append({"state": "parked", **sample(device), **luce.memory_report()})
            luce.unpark()
            found["answers_equal"] &= answer(luce) == expected
    found["states"].append({"state": "closed", **sample(device)})
    return found


def beside_another(model: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Park one of two engines of this process: the other goes on, and the context is kept."""
    with Luce.load(model, **options) as other, Luce.load(model, **options) as luce:
        expected = answer(other)
        luce.park(discard=True)
        report = luce.memory_report()
        equal = answer(other) == expected
        luce.unpark()
        return {"report": report, "answers_equal": equal and answer(luce) == expected}


def upstream_kernels(model: Path, device: str) -> dict[str, bool]:
    """For each fault whether its graphs give the same logits after a reset."""
    from pyluce.graph import RunnerOptions, TrunkRunner
    from pyluce.native.reset import reset_device

    def logits(fault: str) -> bytes:
        with TrunkRunner(model, RunnerOptions(n_ctx=512, n_slots=1, device=device, debug_fault=fault)) as runner:
            state = runner.new_sequence()
            first = runner.prefill(state, [3 + i * i % 200 for i in range(PROMPT_TOKENS)])
            second = runner.decode([(state, 5)])
            state.free()
            assert first is not None
            return first.tobytes() + second.tobytes()

    equal = {}
    for fault in FAULTS:
        before = logits(fault)
        reset_device(device)
        equal[fault] = logits(fault) == before
    return equal


def judge(result: dict[str, Any]) -> list[str]:
    """What is wrong, a line each."""
    wrong = [] if result["rounds"]["answers_equal"] else ["an answer after a park differs"]
    before = result["rounds"]["before"]["device_mib"]
    for state in result["rounds"]["states"]:
        if before is not None and state["state"] == "parked" and state["device_mib"] > ALLOWED * before:
            wrong.append(f"parked: expected at most {ALLOWED:.2f} times {before} MiB, found {state['device_mib']}")
    beside = result.get("beside_another")
    if beside is not None:
        if not beside["answers_equal"]:
            wrong.append("beside another engine: an answer differs")
        if beside["report"]["parked_devices"][0]["context"] != "kept":
            wrong.append("beside another engine: the context that it uses was destroyed")
    wrong += [
        f"{fault}: other logits after a reset" for fault, equal in result.get("upstream", {}).items() if not equal
    ]
    return wrong


def main(argv: list[str] | None = None) -> int:
    """Run everything and print it as JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL)
    parser.add_argument("--json", type=Path, help="write the result here too")
    a = parser.parse_args(argv)
    backend = parse_device(a.device)[0]
    options: dict[str, Any] = {"device": a.device, "max_ctx": 2048, "max_concurrency": 2, "prefix_cache_mib": 256}
    if backend == "cpu":
        options["threads"] = 1
    result: dict[str, Any] = {"device": a.device, "model": a.model.name}
    if backend == "cpu":
        load_libraries()
        result["rounds"] = rounds(a.model, options)
    else:
        result["rounds"] = rounds(a.model, options | {"park_reset": True})
        result["beside_another"] = beside_another(a.model, options | {"park_reset": True})
        result["upstream"] = upstream_kernels(a.model, a.device)
    result["wrong"] = judge(result)
    text = json.dumps(result, indent=1)
    if a.json is not None:
        a.json.write_text(text + "\n", encoding="utf-8")
    print(text)
    return 1 if result["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
