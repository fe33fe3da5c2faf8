"""Kept prompts at every length and in every way that they come back: ids and logit hashes of a cold run, and nothing computed twice."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyluce import Luce
from pyluce.engine import GenerationRequest
from pyluce.luce import Completion
from tests.support.disk import quick_disk  # noqa: F401
from tests.support.runs import open_runner, prompt_tokens

VOCAB = 288
OPTIONS: dict[str, Any] = {"max_ctx": 3200, "threads": 1, "chunk": 128}
PROMPT = tuple(prompt_tokens(100, 7, VOCAB, 0, (50, 97)))
LENGTHS = range(1, 100)
BOUNDARIES = (37, 130, 131, 512, 700, 1001, 1024, 1400, 2047, 2500, 2992)
CONVERSATION = tuple(prompt_tokens(3000, 8, VOCAB, 0, (1000, 2046)))


def request(tokens: Sequence[int], cuts: Sequence[int], n: int = 3) -> GenerationRequest:
    return GenerationRequest(tuple(tokens), max_tokens=n, hash_logits=True, ignore_end=True, cuts=tuple(cuts))


def branch(length: int, seed: int) -> GenerationRequest:
    """A prompt that shares `length` tokens with PROMPT, and 9 of its own."""
    return request(PROMPT[:length] + tuple(prompt_tokens(9, 1000 * seed + length, VOCAB)), (length,))


def turn(boundary: int) -> GenerationRequest:
    """A prompt that shares a stretch of the conversation, and its boundaries."""
    cuts = tuple(cut for cut in BOUNDARIES if cut <= boundary)
    return request(CONVERSATION[:boundary] + tuple(prompt_tokens(20, 200 + boundary, VOCAB)), cuts)


def run(luce: Luce, wanted: GenerationRequest) -> Completion:
    return Completion.collect(wanted, luce.run(wanted))


class Cold:
    """Each request by a model that keeps nothing, once."""

    def __init__(self, luce: Luce) -> None:
        self._luce = luce
        self._known: dict[tuple[int, ...], Completion] = {}

    def __call__(self, wanted: GenerationRequest) -> Completion:
        if wanted.prompt not in self._known:
            self._known[wanted.prompt] = run(self._luce, wanted)
        return self._known[wanted.prompt]


@pytest.fixture(scope="module")
def cold(serving_model: Path) -> Iterator[Cold]:
    with Luce.load(serving_model, max_concurrency=1, prefix_cache_mib=0, **OPTIONS) as luce:
        yield Cold(luce)


def check(luce: Luce, cold: Cold, wanted: GenerationRequest, shared: int) -> None:
    answer, expected = run(luce, wanted), cold(wanted)
    assert answer.timings.cached_tokens == shared
    assert answer.timings.prompt_tokens - answer.timings.cached_tokens == len(wanted.prompt) - shared
    assert (answer.tokens, answer.step_sha256) == (expected.tokens, expected.step_sha256), f"after {shared} tokens"


def test_every_shared_length_in_every_way(serving_model: Path, cold: Cold, tmp_path: Path) -> None:
    options = {**OPTIONS, "cache_dir": tmp_path, "max_concurrency": 5}
    with Luce.load(serving_model, prefix_cache_mib=512, **options) as luce:
        for length in LENGTHS:
            run(luce, request(PROMPT, (length,), n=1))
        for length in LENGTHS:
            before = luce.stats().prompt_tokens_total
            check(luce, cold, branch(length, 1), length)
            assert luce.stats().prompt_tokens_total - before == 9, "exactly what lies behind the last shared boundary"
        with busy(luce, 4):
            for length in LENGTHS[::2]:
                check(luce, cold, branch(length, 2), length)
        luce.park()
        luce.unpark()
        for length in LENGTHS:
            check(luce, cold, branch(length, 3), length)
        assert luce.stats().invariant_violations == 0
    with Luce.load(serving_model, prefix_cache_mib=2, **options) as luce:  # room for few of them at once
        for length in LENGTHS:
            check(luce, cold, branch(length, 4), length)
        report: Any = luce.memory_report()["prefix_cache"]
        assert report["evictions"] > 50 and report["n_bytes"] <= report["budget_bytes"]
        assert report["disk"]["hits"] >= len(LENGTHS) - 5


def test_boundaries_of_a_long_conversation(serving_model: Path, cold: Cold, tmp_path: Path) -> None:
    options = {**OPTIONS, "cache_dir": tmp_path, "max_concurrency": 2}
    ways: list[Callable[[Luce], object]] = [lambda luce: None, lambda luce: (luce.park(), luce.unpark())]
    with Luce.load(serving_model, prefix_cache_mib=256, **options) as luce:
        run(luce, request(CONVERSATION, BOUNDARIES, n=1))
        for way, boundaries in zip(ways, (BOUNDARIES[::2], BOUNDARIES[1::2]), strict=True):
            way(luce)
            for boundary in boundaries:
                check(luce, cold, turn(boundary), boundary)
    with Luce.load(serving_model, prefix_cache_mib=256, **options) as luce:
        for boundary in BOUNDARIES:
            wanted = turn(boundary)
            again = request((*wanted.prompt[:-3], 5, 6, 7), wanted.cuts)
            check(luce, cold, again, boundary)
        whole = run(luce, request(CONVERSATION, BOUNDARIES, n=1))
        assert whole.timings.cached_tokens == 3000


class busy:  # noqa: N801  (used like a function)
    """Requests that decode in so many slots for as long as the block lasts."""

    def __init__(self, luce: Luce, n: int) -> None:
        self._luce, self._n = luce, n
        self._tickets: list[Any] = []

    def __enter__(self) -> None:
        started = threading.Semaphore(0)
        for index in range(self._n):
            ticket = self._luce.submit(request(prompt_tokens(20 + index, 900 + index, VOCAB), (), n=3000))
            ticket.on_event(lambda message: started.release())
            self._tickets.append(ticket)
        for _ in range(8 * self._n):
            assert started.acquire(timeout=30)

    def __exit__(self, *_: object) -> None:
        for ticket in self._tickets:
            assert not ticket.answered, "it ended too early to be in anybody's way"
            ticket.cancel()


@pytest.mark.parametrize("kv_type", ["f16", "f32"])
def test_control_each_part_in_turn(serving_model: Path, kv_type: str) -> None:
    """A snapshot without one of its parts is noticed, whichever it is."""
    with open_runner(serving_model, n_ctx=256, n_slots=2, kv_type=kv_type, max_rollback=0) as runner:
        pool: Any = runner._pool
        tokens = list(PROMPT[:98])
        more = prompt_tokens(40, 1, VOCAB)

        def after(change: Callable[[Any], None]) -> list[bytes]:
            state = runner.new_sequence()
            runner.prefill(state, tokens)
            snapshot = state.snapshot()
            state.free()
            change(snapshot)
            state = runner.new_sequence()
            state.restore(snapshot)
            rows = [runner.prefill(state, more[:20])]
            rows += [runner.decode([(state, token)])[0] for token in more[20:]]
            state.free()
            snapshot.close()
            return [row.tobytes() for row in rows if row is not None]

        expected = after(lambda snapshot: None)
        assert after(lambda snapshot: None) == expected
        kinds = {name.split(".")[0] for name, _ in (*pool.page_parts(), *pool.recurrent_parts(98))}
        assert kinds >= {"k", "v", "raw", "pooled", "gdn", "conv", "ple"}
        for kind in sorted(kinds):

            def omit(snapshot: Any, kind: str = kind) -> None:
                snapshot.recurrent = snapshot.recurrent.copy()
                erase(snapshot.recurrent, pool.recurrent_parts(98), kind)
                for page in snapshot.pages:
                    data = np.empty(pool.page_bytes, np.uint8)
                    pool.read_page(page, data)
                    erase(data, pool.page_parts(), kind)
                    pool.write_page(page, data)

            assert after(omit) != expected, f"nobody noticed that {kind} is missing"

        def forget_tokens(snapshot: Any) -> None:
            snapshot.tokens = (*snapshot.tokens[:-2], 1, 1)

        assert after(forget_tokens) != expected, "the n-grams reach back into the tokens"


def test_control_each_part_of_the_draft_head(drafting_model: Path) -> None:
    """What only the head reads changes no answer; without it the head drafts something else."""
    with open_runner(drafting_model, n_ctx=256, n_slots=1, max_rollback=4, mtp=True) as runner:
        pool: Any = runner._pool
        last = runner.hparams.n_layer
        own = {f"k.{last}", f"v.{last}", "hidden"}
        assert own <= {name for name, _ in (*pool.page_parts(), *pool.recurrent_parts(98))}

        def drafts(erased: str) -> tuple[list[list[int]], bytes]:
            state = runner.new_sequence()
            runner.prefill(state, PROMPT[:98])
            snapshot = state.snapshot()
            state.free()
            snapshot.recurrent = snapshot.recurrent.copy()
            erase(snapshot.recurrent, pool.recurrent_parts(98), erased)
            for page in snapshot.pages:
                data = np.empty(pool.page_bytes, np.uint8)
                pool.read_page(page, data)
                erase(data, pool.page_parts(), erased)
                pool.write_page(page, data)
            state = runner.new_sequence()
            state.restore(snapshot)
            found = [runner.draft([(state, token, 4)])[0] for token in range(3, 23)]
            logits = runner.decode([(state, 5)])[0].tobytes()
            state.free()
            snapshot.close()
            return found, logits

        expected = drafts("nothing")
        assert drafts("nothing") == expected
        for part in sorted(own):
            found, logits = drafts(part)
            assert logits == expected[1]
            assert found != expected[0], f"nobody noticed that {part} is missing"


def erase(data: Any, parts: Sequence[tuple[str, int]], kind: str) -> None:
    at = 0
    for name, size in parts:
        if kind in (name, name.split(".")[0]):
            data[at : at + size] = 0
        at += size
