"""Checks that how much room there is does not show: span buckets, context size, slots, kept states."""

from __future__ import annotations

import numpy as np

from tests.exactness.case import Case
from tests.support.compare import assert_same_bytes
from tests.support.runs import decode_one_by_one, forced

LONG = 1020
"""Graphs are made for 1,024 tokens, then for 2,048: rows after this prompt cross from one to the other."""


def check_long_neighbour(case: Case, **options: object) -> None:
    """A short sequence beside one of more than 1,024 tokens, in one row graph; the long one crosses 1,024 in it."""
    clean = {k: v for k, v in options.items() if k != "debug_fault"}
    short, long = case.prompt(70), case.prompt(LONG, seed=4)
    ours, theirs = case.continuation()[:8], case.continuation(seed=4)[:8]
    expected_short = case.alone(short, ours, **clean)[1:]
    expected_long = case.alone(long, theirs, n_ctx=2048, **clean)[1:]
    with case.open(n_slots=2, n_ctx=2048, **options) as runner:
        a, b = runner.new_sequence(), runner.new_sequence()
        runner.prefill(b, long, want="none")
        runner.prefill(a, short, want="none")
        pairs = [np.array(runner.decode([(a, ours[i]), (b, theirs[i])])) for i in range(8)]
        assert_same_bytes(np.stack([pair[0] for pair in pairs]), expected_short, "70 tokens beside 1,020")
        assert_same_bytes(np.stack([pair[1] for pair in pairs]), expected_long, "1,020 tokens beside 70")
        b.rollback(8)
        together = np.array(runner.decode([(b, token) for token in theirs]))
        assert_same_bytes(together, expected_long, "8 rows across 1,024 tokens in one step")


def check_long_cuts(case: Case, **options: object) -> None:
    """A prompt of 1,100 tokens in one chunk, on the grid of 512, and cut beside 1,024."""
    clean = {k: v for k, v in options.items() if k != "debug_fault"}
    prompt, continuation = case.prompt(1100, seed=4), case.continuation()[:2]
    expected = case.alone(prompt, continuation, n_ctx=2048, chunk_tokens=2048, **clean)
    with case.open(n_ctx=2048, chunk_tokens=512, **options) as runner:
        state = runner.new_sequence()
        for cuts in ([], [1023, 1025]):
            state.clear()
            actual = forced(runner, state, prompt, continuation, cuts)
            assert_same_bytes(actual, expected, f"1,100 tokens on a grid of 512 and cut at {cuts}")


def check_room(case: Case, **options: object) -> None:
    """Another context size, more slots, fewer or more kept states: the same bytes."""
    prompt, continuation = case.prompt(70), case.continuation()[:5]
    expected = case.alone(prompt, continuation)
    with case.open(**options) as runner:
        neighbours = [runner.new_sequence() for _ in range(runner.n_free_slots - 1)]
        state = runner.new_sequence()
        actual = forced(runner, state, prompt, continuation)
        assert_same_bytes(actual, expected, f"with {options}, slot {state.slot} beside {len(neighbours)}")


def check_identical_prompts(case: Case, n: int, **options: object) -> None:
    """n sequences of the same tokens give one answer, bit for bit, and it is the answer of one alone."""
    clean = {k: v for k, v in options.items() if k != "debug_fault"}
    prompt, continuation = case.prompt(47), case.continuation()[:6]
    expected = case.alone(prompt, continuation, **clean)[1:]
    with case.open(n_slots=n, **options) as runner:
        states = [runner.new_sequence() for _ in range(n)]
        for state in states:
            runner.prefill(state, prompt, want="none")
        for i, token in enumerate(continuation):
            logits = np.array(runner.decode([(state, token) for state in states]))
            assert_same_bytes(logits, np.repeat(expected[i : i + 1], n, axis=0), f"{n} equal prompts, step {i}")


def check_turns(case: Case, **options: object) -> None:
    """A second prompt after decoded rows, cut anywhere, equals the same turns with the prompt in one chunk."""
    clean = {k: v for k, v in options.items() if k != "debug_fault"}
    first, reply, second = case.prompt(33), case.continuation()[:6], case.prompt(40, seed=8)
    with case.open(**clean) as runner:
        state = runner.new_sequence()
        forced(runner, state, first, reply)
        expected = np.concatenate(
            [np.array(runner.prefill(state, second, want="all")), decode_one_by_one(runner, state, reply)]
        )
    with case.open(**options) as runner:
        state = runner.new_sequence()
        for cuts in ([40], [39 + 25], [41, 45, 78]):
            state.clear()
            forced(runner, state, first, reply)
            turn = np.array(runner.prefill(state, second, want="all", cuts=cuts))
            actual = np.concatenate([turn, decode_one_by_one(runner, state, reply)])
            assert_same_bytes(actual, expected, f"a second turn cut at {cuts}")
