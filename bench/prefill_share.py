"""What the prompts' share of time costs and buys: streams' speed against time to first token, for several values of it.

    python -m bench.prefill_share [--model FILE] [--slots 4] [--clients 4,8] [--requests 60] [--shares 0.1,0.25,0.5,0.75,1]

Clients in a closed loop: each sends its next request when the last one is answered (prompts of 30 to 2,000 tokens, most of them short;
answers of 32 to 200 tokens; the same requests for every share). All runs on one thread, and its clock is that thread's processor
time: what is measured does not depend on what else the machine does, and is the time that a quiet machine would show.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from bench.floor import ROOT
from pyluce.engine import BatchCore, GenerationRequest, Resources, Ticket, TokenEvent
from pyluce.engine.ticket import Message
from pyluce.graph import RunnerOptions, TrunkRunner
from pyluce.native.sampler import SamplerChain

PROMPTS = (30, 60, 120, 250, 500, 1000, 2000)
PROMPT_WEIGHTS = (6, 6, 5, 4, 3, 2, 2)
ANSWERS = (32, 200)
N_CTX = 2304


class NoText:
    """Answers are token ids only."""

    def token_bytes(self, token: int) -> bytes:
        return b"."

    def is_end(self, token: int) -> bool:
        return False


@dataclass
class Measured:
    """When a request was sent and when its tokens came, in seconds of the engine thread."""

    sent: float
    tokens: list[float] = field(default_factory=list)

    @property
    def first_s(self) -> float:
        return self.tokens[0] - self.sent

    @property
    def gaps(self) -> list[float]:
        return [b - a for a, b in zip(self.tokens, self.tokens[1:], strict=False)]

    @property
    def rate(self) -> float:
        return (len(self.tokens) - 1) / (self.tokens[-1] - self.tokens[0])


class Here:
    """Stands in for the engine: everything is on this thread."""

    forked = False

    def check_process(self) -> None:
        pass


def make_requests(count: int, n_vocab: int) -> list[GenerationRequest]:
    """The same for every run."""
    rng = np.random.default_rng(11)
    weights = np.array(PROMPT_WEIGHTS) / sum(PROMPT_WEIGHTS)
    made = []
    for _ in range(count):
        length = int(rng.choice(PROMPTS, p=weights) * rng.uniform(0.8, 1.2))
        prompt = tuple(rng.integers(0, n_vocab, min(length, N_CTX - ANSWERS[1])).tolist())
        made.append(GenerationRequest(prompt, max_tokens=int(rng.integers(*ANSWERS))))
    return made


def serve(runner: TrunkRunner, requests: Sequence[GenerationRequest], clients: int, share: float) -> list[Measured]:
    """Every request's times, `clients` at once."""
    clock = time.thread_time
    chain = functools.partial(SamplerChain, runner.vocab_size)
    resources = Resources(runner, NoText(), chain, N_CTX, runner.options.chunk_tokens)
    core = BatchCore(
        resources,
        lambda: None,
        n_slots=runner.options.n_slots,
        max_queue=clients,
        prefill_share=share,
        clock=clock,
    )
    measured: list[Measured] = []
    running: list[Ticket] = []
    todo = list(requests)[::-1]
    while todo or running:
        running = [ticket for ticket in running if not ticket.answered]
        while todo and len(running) < clients:
            now = clock()
            ticket = Ticket(todo[-1], Here(), len(measured) + 1, submitted_at=now, on_answer=core.reserve(todo.pop()))
            one = Measured(now)

            def note(message: Message, one: Measured = one) -> None:
                if isinstance(message, TokenEvent):
                    one.tokens.append(clock())

            ticket.on_event(note)
            core.admit(ticket)
            measured.append(one)
            running.append(ticket)
        core.step()
    return measured


def row(name: str, measured: Sequence[Measured]) -> str:
    """One line of the table."""
    begun, ended = min(m.sent for m in measured), max(m.tokens[-1] for m in measured)
    first = [1000 * m.first_s for m in measured]
    gaps = [1000 * gap for m in measured for gap in m.gaps]
    rates = [m.rate for m in measured]
    total = sum(len(m.tokens) for m in measured) / (ended - begun)
    cells = (
        f"{total:.0f}",
        f"{statistics.median(first):.0f} / {np.percentile(first, 90):.0f}",
        f"{statistics.median(rates):.0f} / {np.percentile(rates, 10):.0f}",
        f"{np.percentile(gaps, 50):.1f} / {np.percentile(gaps, 99):.0f} / {max(gaps):.0f}",
    )
    return f"| {name} | " + " | ".join(cells) + " |"


def main() -> None:
    """Measure and print a markdown table for each number of clients."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", type=Path, default=ROOT / "pyluce" / "data" / "luce-tiny.gguf")
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--clients", default="4,8")
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--shares", default="0.1,0.25,0.5,0.75,1")
    parser.add_argument("--chunk", type=int, default=512)
    arguments = parser.parse_args()
    options = RunnerOptions(
        n_ctx=N_CTX, n_slots=arguments.slots, n_threads=1, max_rollback=0, chunk_tokens=arguments.chunk
    )
    with TrunkRunner(arguments.model, options) as runner:
        requests = make_requests(arguments.requests, runner.vocab_size)
        n_prompt = sum(len(request.prompt) for request in requests)
        print(f"{arguments.model.name}, {len(requests)} requests, {n_prompt} prompt tokens, {arguments.slots} slots\n")
        serve(runner, requests[:8], 4, 1.0)  # graphs are built
        for clients in (int(text) for text in arguments.clients.split(",")):
            print(f"{clients} clients\n")
            print(
                "| share | tokens/s, all | first token, ms: median / p90 | stream, tokens/s: median / p10 "
                "| gap, ms: median / p99 / longest |"
            )
            print("|---|---|---|---|---|")
            for share in (float(text) for text in arguments.shares.split(",")):
                print(row(f"{share:g}", serve(runner, requests, clients, share)), flush=True)
            print()


if __name__ == "__main__":
    main()
