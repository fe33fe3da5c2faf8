"""An agent's conversation on `luce run` and on upstream's llama-server: what each turn computes, and how long its first token takes.

    python -m bench.agent_conversation [--notes 60] [--rounds 3] [--threads 1] [--json FILE]

The conversation of `bench.agent_turns`, with a long system message: luce-tiny's context is 8,192 tokens. Each server hears its own
answers, so the later prompts may differ by a few tokens. A server is warm when it has answered the turns before. It is cold when it was
just started and has answered nothing but two short texts, which share nothing with the conversation; it gets the same request. Between
turns the client waits until the server is quiet, at most `--pause` seconds: an agent's client runs its tool meanwhile.

llama-server runs with its defaults but for slots, context and threads; `--upstream` adds to them. The servers alternate from round to round, and
ratios are taken within a round. Whether the warm answers are the cold ones is noted for both.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from bench.agent_turns import N_CHILDREN, AgentConversation
from bench.cpu_vs_upstream import processor_name
from bench.floor import ROOT
from bench.load_client import Server, cpu_seconds
from bench.server_vs_upstream import SIDES, TINY, build_upstream, running

TURNS = (1, 2, 3, 4)
REQUEST_S = 600.0
QUIET_S = 0.5
QUIET_SHARE = 0.1
START_WAIT_S = 5.0


@dataclass
class Turn:
    """One answer. `name`: "1" to "4", or "child 1" to "child 6". `first_s`: seconds to the first token; `text`: all that was said."""

    name: str
    prompt_tokens: int
    computed_tokens: int
    first_s: float
    text: str


def stream(server: Server, request: dict[str, Any], name: str) -> tuple[Turn, dict[str, Any]]:
    """Send a request and read the answer as it comes; the message too. SystemExit when it is not whole."""
    body = {**request, "stream": True, "stream_options": {"include_usage": True}}
    message: dict[str, Any] = {"content": "", "reasoning_content": ""}
    calls: dict[int, dict[str, Any]] = {}
    first, usage, done = 0.0, None, False
    begin = time.perf_counter()
    with httpx.stream(
        "POST", f"http://127.0.0.1:{server.port}/v1/chat/completions", json=body, timeout=REQUEST_S
    ) as reply:
        if reply.status_code != 200:
            raise SystemExit(f"{server.name}, {name}: {reply.status_code} {reply.read().decode()[:500]}")
        for line in reply.iter_lines():
            if line == "data: [DONE]":
                done = True
            if not line.startswith("data: {"):
                continue
            part = json.loads(line[6:])
            usage = part.get("usage") or usage
            for choice in part.get("choices", []):
                delta = choice["delta"]
                if not first and any(delta.get(key) for key in ("content", "reasoning_content", "tool_calls")):
                    first = time.perf_counter() - begin
                for key in ("content", "reasoning_content"):
                    message[key] += delta.get(key) or ""
                for call in delta.get("tool_calls") or ():
                    add_call(calls, call)
    if not done or usage is None or not first:
        raise SystemExit(f"{server.name}, {name}: expected tokens, usage and [DONE], found {message}, {usage}")
    if calls:
        message["tool_calls"] = list(calls.values())
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    functions = [call["function"] for call in calls.values()]
    text = json.dumps([message["reasoning_content"], message["content"], functions])
    return Turn(name, usage["prompt_tokens"], usage["prompt_tokens"] - cached, first, text), message


def add_call(calls: dict[int, dict[str, Any]], piece: dict[str, Any]) -> None:
    """Put a piece of a tool call to the others."""
    call = calls.setdefault(piece["index"], {"id": "", "function": {"name": "", "arguments": ""}})
    call["id"] = piece.get("id") or call["id"]
    function = piece.get("function") or {}
    call["function"]["name"] += function.get("name") or ""
    call["function"]["arguments"] += function.get("arguments") or ""


def wait_quiet(server: Server, at_most: float) -> float:
    """Wait until the server takes next to no processor time; the seconds that took."""
    begin = time.perf_counter()
    while time.perf_counter() - begin < at_most:
        before = cpu_seconds(server.process)
        time.sleep(QUIET_S)
        if cpu_seconds(server.process) - before < QUIET_SHARE * QUIET_S:
            break
    return time.perf_counter() - begin


def warm_up(server: Server) -> None:
    """Two short texts, which share nothing with the conversation, so that no first request pays for what is made once."""
    body = {"prompt": "zxq 9 9 9", "max_tokens": 8, "temperature": 0}
    for _ in range(2):
        httpx.post(f"http://127.0.0.1:{server.port}/v1/completions", json=body, timeout=REQUEST_S).raise_for_status()
    wait_quiet(server, START_WAIT_S)


def warm_turns(server: Server, options: argparse.Namespace) -> tuple[list[Turn], list[dict[str, Any]], list[float]]:
    """The conversation: each answer, each request, and how long the server was busy after each turn."""
    talk = AgentConversation(options.notes, keep_reasoning=options.keep_reasoning)
    turns, requests, pauses = [], [], []
    findings = ["nothing"] * N_CHILDREN
    for number in TURNS:
        requests.append(talk.ask(number, findings))
        turn, message = stream(server, requests[-1], str(number))
        turns.append(turn)
        talk.hear(message)
        pauses.append(wait_quiet(server, options.pause))
        if number == 3:
            with ThreadPoolExecutor(N_CHILDREN) as pool:
                jobs = [
                    pool.submit(stream, server, request, f"child {index + 1}")
                    for index, (request, _) in enumerate(talk.children())
                ]
                answers = [job.result() for job in jobs]
            turns += [turn for turn, _ in answers]
            requests += [request for request, _ in talk.children()]
            findings = [message["content"] for _, message in answers]
            pauses.append(wait_quiet(server, options.pause))
    return turns, requests, pauses


def play(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Warm and cold on one server: a fresh one for each cold answer."""
    more = options.upstream if name == "upstream" else []

    def fresh() -> Any:
        return running(name, options.model, N_CHILDREN, options.threads, context=options.context, more=more)

    with fresh() as server:
        warm_up(server)
        turns, requests, pauses = warm_turns(server, options)
    cold = []
    for turn, request in zip(turns, requests, strict=True):
        if turn.name.startswith("child") and not options.cold_children:
            continue
        with fresh() as server:
            warm_up(server)
            cold.append(stream(server, request, turn.name)[0])
    return {"warm": [asdict(turn) for turn in turns], "cold": [asdict(turn) for turn in cold], "quiet_after_s": pauses}


def find(turns: list[dict[str, Any]], name: str) -> dict[str, Any] | None:
    """The turn of that name."""
    return next((turn for turn in turns if turn["name"] == name), None)


def table(rounds: list[dict[str, Any]]) -> str:
    """Tokens of the last round, times as medians over the rounds; ratios are taken within a round."""
    lines = [
        "| turn | server | prompt tokens | computed, warm | computed, cold | first token warm / cold (min to max) | answers equal |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in SIDES:
        for turn in rounds[-1][name]["warm"]:
            found = [(find(one[name]["warm"], turn["name"]), find(one[name]["cold"], turn["name"])) for one in rounds]
            pairs = [(warm, cold) for warm, cold in found if warm is not None and cold is not None]
            cold_cells = "not asked | | |"
            if pairs:
                ratios = [warm["first_s"] / cold["first_s"] for warm, cold in pairs]
                same = sum(warm["text"] == cold["text"] for warm, cold in pairs)
                spread = f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
                cold_cells = f"{pairs[-1][1]['computed_tokens']:,} | {spread} | {same} of {len(pairs)} |"
            lines.append(
                f"| {turn['name']} | {name} | {turn['prompt_tokens']:,} | {turn['computed_tokens']:,} | {cold_cells}"
            )
    return "\n".join(lines)


def main() -> int:
    """Measure, print the table, write the record; 1 when turn 4 of pyluce misses a tenth, or an answer is not the cold one."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", type=Path, default=TINY)
    parser.add_argument("--notes", type=int, default=60, help="paragraphs in the system message, about 75 tokens each")
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pause", type=float, default=60.0, metavar="SECONDS", help="at most so long between turns")
    parser.add_argument("--keep-reasoning", action="store_true", help="send reasoning back; the template strips it")
    parser.add_argument("--cold-children", action="store_true", help="ask the children of cold servers, too")
    parser.add_argument(
        "--upstream", nargs="*", default=[], metavar="ARGUMENT", help="more for llama-server, without the dashes"
    )
    parser.add_argument(
        "--json", type=Path, default=ROOT / "build" / "bench" / "agent_conversation.json", metavar="FILE"
    )
    options = parser.parse_args()
    options.upstream = [text if text.lstrip("-").isdigit() else f"--{text}" for text in options.upstream]
    build_upstream()
    head = {
        "date": time.strftime("%Y-%m-%d"),
        "processor": processor_name(),
        "model": options.model.name,
        "threads": options.threads,
        "context": options.context,
        "slots": N_CHILDREN,
        "keep_reasoning": options.keep_reasoning,
        "upstream_arguments": options.upstream,
        "load_before": psutil.getloadavg()[0],
    }
    print(", ".join(f"{key} {value}" for key, value in head.items()), flush=True)
    rounds = []
    for number in range(options.rounds):
        rounds.append({name: play(name, options) for name in (SIDES if number % 2 == 0 else SIDES[::-1])})
        print(f"round {number + 1} done", flush=True)
    print("\n" + table(rounds) + "\n")
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps({**head, "rounds": rounds}, indent=1) + "\n")
    return report_misses(rounds)


def report_misses(rounds: list[dict[str, Any]]) -> int:
    """Print what pyluce was to show and did not; 1 when there is something."""
    missed = []
    for number, one in enumerate(rounds):
        warm = {turn["name"]: turn for turn in one["pyluce"]["warm"]}
        for turn in one["pyluce"]["cold"]:
            if warm[turn["name"]]["text"] != turn["text"]:
                missed.append(f"round {number + 1}, turn {turn['name']}: the warm answer is not the cold one")
        last = one["pyluce"]["cold"][-1]
        ratio = warm["4"]["first_s"] / last["first_s"]
        if ratio >= 0.1:
            missed.append(
                f"round {number + 1}, turn 4: expected a first token below a tenth of cold, found {ratio:.3f}"
            )
    print("\n".join(missed))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
