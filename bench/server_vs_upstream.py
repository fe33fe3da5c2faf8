"""`luce run` beside upstream's llama-server under load: the same model, slots, threads and requests; throughput and time to first token.

    make bench-server       # or: python -m bench.server_vs_upstream [--slots 4] [--threads 1] [--clients 1 4 16 64] [--rounds 3]

Clients are closed loops: each sends its next request when the last one is answered. A request is a random text of 10 to 120 words (--words), no two
alike, and asks for 64 tokens, greedily, with control tokens forbidden, so that both servers do the same work. llama-server comes from the
same tree and runs with its defaults but for the context. Rounds alternate which server goes first. Every run is bounded in time, and every
request must be answered with all its tokens; pyluce's own counters must agree. `/health` is asked ten times a second meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import psutil
from gguf import GGUFReader

from bench.cpu_vs_upstream import processor_name
from bench.floor import ROOT
from bench.load_client import ANSWER_TOKENS, Job, Load, Server, measure

PROGRAM = ROOT / "build" / "llama-server" / "llama-server"
TINY = ROOT / "pyluce" / "data" / "luce-tiny.gguf"
SIDES = ("upstream", "pyluce")
CONTEXT = 1024
CONTROL_TYPES = (3, 4)  # control and user-defined tokens
START_S = 120.0
HEALTH_LIMIT_MS = 50.0
LONG_RUN_CLIENTS = 64


def build_upstream() -> None:
    """Compile what belongs to llama-server alone; the libraries must have been built with --bench."""
    if not (ROOT / "build" / "cpu" / "bin" / "libllama-common.so").is_file():
        raise SystemExit("expected build/cpu/bin/libllama-common.so, found none: python build.py --bench")
    cmake, ninja = (str(Path(sys.executable).parent / name) for name in ("cmake", "ninja"))
    folder = PROGRAM.parent
    configure = [cmake, "-S", str(ROOT / "bench" / "llama_server"), "-B", str(folder), "-G", "Ninja"]
    configure += [f"-DCMAKE_MAKE_PROGRAM={ninja}", "-DCMAKE_BUILD_TYPE=Release"]
    for command in (configure, [ninja, "-C", str(folder)]):
        if subprocess.run(command, stdout=sys.stderr, check=False).returncode != 0:
            raise SystemExit(f"failed: {' '.join(command)}")


@contextmanager
def running(
    name: str, model: Path, slots: int, threads: int, context: int = CONTEXT, more: Sequence[str] = ()
) -> Iterator[Server]:
    """Start one of the two servers, wait until it is ready, end it afterwards. `context`: tokens a slot; `more`: further arguments."""
    port = free_port()
    if name == "pyluce":
        command = [
            sys.executable,
            "-m",
            "cli.main",
            "run",
            str(model),
            "--port",
            str(port),
            "--max-concurrency",
            str(slots),
        ]
        command += ["--max-ctx", str(context), "--threads", str(threads), "--max-queue", "256"]
    else:
        command = [str(PROGRAM), "-m", str(model), "--port", str(port), "-np", str(slots), "-c", str(context * slots)]
        command += ["-t", str(threads), "--no-ui"]
    command += more
    log = ROOT / "build" / "bench" / f"{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as out:
        process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
        try:
            wait_ready(process, port, log)
            yield Server(name, port, psutil.Process(process.pid))
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def wait_ready(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    """Until /health says 200."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
                if answer.status == 200:
                    return
        except OSError:
            time.sleep(0.1)
    raise SystemExit(f"the server did not start; the end of {log}:\n{log.read_text()[-2000:]}")


def check_counters(port: int, loads: list[Load]) -> None:
    """What pyluce counted must be what the clients got; SystemExit otherwise."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/status/json", timeout=30) as answer:
        status = json.load(answer)
    totals = status["totals"]
    expected = {
        "answered": sum(load.requests for load in loads),
        "generated": sum(load.tokens for load in loads),
        "violations": 0,
        "busy": 0,
    }
    found = {
        "answered": sum(totals["requests"].values()),
        "generated": totals["generated_tokens"],
        "violations": totals["invariant_violations"],
        "busy": status["health"]["busy_slots"],
    }
    if expected != found:
        raise SystemExit(f"pyluce's counters: expected {expected}, found {found}")


def control_token_bans(model: Path) -> dict[str, float]:
    """A logit bias that forbids every control token, so that each answer has all its tokens."""
    types = GGUFReader(str(model)).fields["tokenizer.ggml.token_type"].contents()
    return {str(token): -100.0 for token, kind in enumerate(types) if kind in CONTROL_TYPES}


def run_round(
    model: Path, slots: int, threads: int, seconds: dict[int, float], job: Job, number: int
) -> dict[str, list[Load]]:
    """Both servers, one after the other, with every number of clients."""
    found: dict[str, list[Load]] = {}
    for name in SIDES if number % 2 == 0 else SIDES[::-1]:
        with running(name, model, slots, threads) as server:
            warm = asyncio.run(measure(server, 1, 1.0, -1, job))
            loads = []
            for count in seconds:
                load = asyncio.run(measure(server, count, seconds[count], 1000 * number + count, job))
                loads.append(load)
                print(
                    f"  round {number + 1}, {name}, {count} clients: {load.throughput:.1f} tok/s, {load.requests} requests",
                    flush=True,
                )
            if name == "pyluce":
                check_counters(server.port, [warm, *loads])
        found[name] = loads
    return found


def quantile(values: list[float], q: float) -> float:
    """The smallest value that a share `q` of all are not above."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


def table(rounds: list[dict[str, list[Load]]]) -> str:
    """Medians over the rounds; the ratio is taken within a round."""
    lines = [
        "| clients | server | generated tok/s | ratio (min to max) | a stream's tok/s | first token p50, p95 "
        "| CPU ms a token | /health p50, p99 | requests |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for index, first in enumerate(rounds[0]["pyluce"]):
        ratios = sorted(one["pyluce"][index].throughput / one["upstream"][index].throughput for one in rounds)
        for name in SIDES:
            loads = [one[name][index] for one in rounds]

            def median(value: Callable[[Load], float], loads: list[Load] = loads) -> float:
                return statistics.median(value(load) for load in loads)

            health = [ms for load in loads for ms in load.health_ms]
            ratio = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})" if name == "pyluce" else ""
            lines.append(
                f"| {first.clients} | {name} | {median(lambda load: load.throughput):,.0f} | {ratio} "
                f"| {median(lambda load: statistics.median(load.stream_rates)):.1f} "
                f"| {median(lambda load: quantile(load.first, 0.5)):.2f} s, {median(lambda load: quantile(load.first, 0.95)):.2f} s "
                f"| {median(lambda load: 1000 * load.cpu_s / load.tokens):.2f} "
                f"| {quantile(health, 0.5):.1f} ms, {quantile(health, 0.99):.1f} ms | {sum(load.requests for load in loads):,} |"
            )
    return "\n".join(lines)


def failures(rounds: list[dict[str, list[Load]]]) -> list[str]:
    """What must not happen to pyluce, and what upstream lost too."""
    found = [
        f"{name}, {load.clients} clients: lost {len(load.lost)}: {load.lost[0]}"
        for one in rounds
        for name in SIDES
        for load in one[name]
        if load.lost
    ]
    health = [ms for one in rounds for load in one["pyluce"] for ms in load.health_ms]
    if quantile(health, 0.99) >= HEALTH_LIMIT_MS:
        found.append(f"/health: expected p99 below {HEALTH_LIMIT_MS:.0f} ms, found {quantile(health, 0.99):.1f} ms")
    return found


def main() -> int:
    """Measure, print the table, write the record; 1 when something was lost."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", type=Path, default=TINY)
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument(
        "--words", type=int, nargs=2, default=[10, 120], metavar=("FROM", "TO"), help="a prompt's length"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=15.0, help="a run's length")
    parser.add_argument(
        "--long-seconds", type=float, default=60.0, help=f"the same with {LONG_RUN_CLIENTS} clients or more"
    )
    parser.add_argument(
        "--json", type=Path, default=ROOT / "build" / "bench" / "server_vs_upstream.json", metavar="FILE"
    )
    arguments = parser.parse_args()
    build_upstream()
    seconds = {n: arguments.long_seconds if n >= LONG_RUN_CLIENTS else arguments.seconds for n in arguments.clients}
    job = Job((arguments.words[0], arguments.words[1]), control_token_bans(arguments.model))
    print(
        f"{time.strftime('%Y-%m-%d')}, {processor_name()}, {arguments.model.name}, {arguments.slots} slots of {CONTEXT} tokens, "
        f"{arguments.threads} thread(s), prompts of {arguments.words[0]} to {arguments.words[1]} words, "
        f"{ANSWER_TOKENS} tokens an answer, load {psutil.getloadavg()[0]:.1f} before",
        flush=True,
    )
    rounds = [
        run_round(arguments.model, arguments.slots, arguments.threads, seconds, job, number)
        for number in range(arguments.rounds)
    ]
    print("\n" + table(rounds) + "\n")
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    record = [{name: [asdict(load) for load in loads] for name, loads in one.items()} for one in rounds]
    arguments.json.write_text(json.dumps(record) + "\n")
    problems = failures(rounds)
    for problem in problems:
        print(problem)
    return 1 if any("pyluce" in problem or "/health" in problem for problem in problems) else 0


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    sys.exit(main())
