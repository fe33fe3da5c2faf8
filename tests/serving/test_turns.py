"""Many turns of many conversations on few slots, with room for five kept entries: every answer is the one that its prompt gets alone."""

from __future__ import annotations

import gc
import random
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from pyluce import Luce
from pyluce.engine import GenerationRequest, SamplingParams
from pyluce.luce import Completion
from tests.support.disk import quick_disk  # noqa: F401
from tests.support.runs import prompt_tokens

VOCAB = 288
N_SLOTS = 3
ROOM = 5
FLAT_BYTES = 16 << 20
OPTIONS: dict[str, Any] = {"max_ctx": 800, "threads": 1, "chunk": 128}


@dataclass
class Conversation:
    """What was said so far, and where messages end. It begins with tokens that no other one has."""

    number: int
    tokens: tuple[int, ...] = ()
    cuts: tuple[int, ...] = ()
    turns: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self) -> None:
        self.tokens = tuple(prompt_tokens(30 + self.number % 50, 5000 + self.number, VOCAB))
        self.cuts = (len(self.tokens),)

    def ask(self, rng: random.Random) -> GenerationRequest:
        if not self.tokens or len(self.tokens) > 600:
            self.begin()
        self.turns += 1
        said = prompt_tokens(rng.randrange(10, 60), 7919 * self.number + self.turns, VOCAB)
        self.tokens += tuple(said)
        sampling = (
            SamplingParams(temperature=1.0, top_k=40, seed=self.turns) if self.turns % 3 == 0 else SamplingParams()
        )
        return GenerationRequest(
            self.tokens, max_tokens=6, hash_logits=True, ignore_end=True, cuts=self.cuts, sampling=sampling
        )

    def hear(self, answer: Completion) -> None:
        self.cuts = (*self.cuts, len(self.tokens))
        self.tokens += answer.tokens


def play(luce: Luce, n_turns: int, n_conversations: int, seed: int) -> tuple[list[Any], list[Any], list[int]]:
    conversations = [Conversation(number) for number in range(n_conversations)]
    found: list[tuple[GenerationRequest, Completion]] = []
    reports: list[Any] = []
    memory: list[int] = []
    todo = list(range(n_turns))
    lock = threading.Lock()
    failures: list[BaseException] = []

    def client(number: int) -> None:
        rng = random.Random(100 * seed + number)
        while True:
            with lock:
                if not todo or failures:
                    return
                index = todo.pop()
            recent = rng.random() < 0.5
            chosen = conversations[number + 3 * rng.randrange(2)] if recent else rng.choice(conversations)
            with chosen.lock:
                wanted = chosen.ask(rng)
                answer = Completion.collect(wanted, luce.run(wanted))
                chosen.hear(answer)
            with lock:
                found.append((wanted, answer))
                reports.append(luce.memory_report()["prefix_cache"])
                if index % max(1, n_turns // 10) == 0:
                    gc.collect()
                    memory.append(psutil.Process().memory_info().rss)

    def guarded(number: int) -> None:
        try:
            client(number)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(number,)) for number in range(N_SLOTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600)
        assert not thread.is_alive(), "a request was never answered"
    assert not failures, failures
    return found, reports, memory


def check_turns(model: Path, folder: Path, n_turns: int, n_conversations: int) -> None:
    with Luce.load(model, max_concurrency=1, prefix_cache_mib=0, **OPTIONS) as cold:
        with Luce.load(model, max_concurrency=1, prefix_cache_mib=64, **OPTIONS) as probe:
            one = GenerationRequest((5, 6, 7), max_tokens=1, ignore_end=True)
            Completion.collect(one, probe.run(one))
            report: Any = probe.memory_report()["prefix_cache"]
            own = report["n_bytes"] - probe._engine._core.resources.runner._pool.page_bytes  # type: ignore[attr-defined]
        budget_mib = 2 * ROOM * own // (1 << 20) + 1  # half of it is for pages
        options = {**OPTIONS, "max_concurrency": N_SLOTS, "prefix_cache_mib": budget_mib}
        with Luce.load(model, cache_dir=folder, cache_dir_mib=8, **options) as luce:
            found, reports, memory = play(luce, n_turns, n_conversations, seed=1)
            stats = luce.stats()
        assert len(found) == n_turns and stats.invariant_violations == 0 and stats.busy_slots == 0
        assert max(report["entries"] for report in reports) in (ROOM, ROOM + 1), "room for as many as was meant"
        assert all(report["n_bytes"] <= report["budget_bytes"] == budget_mib << 20 for report in reports)
        assert all(report["disk"]["size_on_disk"] <= 8 << 20 for report in reports)
        assert reports[-1]["evictions"] > n_turns // 2
        assert sum(answer.timings.cached_tokens > 0 for _, answer in found) > n_turns // 10, (
            "little came from what is kept"
        )
        for wanted, answer in found:
            alone = Completion.collect(wanted, cold.run(wanted))
            assert (answer.tokens, answer.step_sha256) == (alone.tokens, alone.step_sha256)
        assert memory[-1] - memory[len(memory) // 3] < FLAT_BYTES, [size >> 20 for size in memory]


def test_turns(serving_model: Path, tmp_path: Path) -> None:
    check_turns(serving_model, tmp_path, 60, 12)


@pytest.mark.slow
def test_five_hundred_turns(serving_model: Path, tmp_path: Path) -> None:
    check_turns(serving_model, tmp_path, 500, 40)
