"""Checks that how a request's rows and chunks are grouped does not show: cuts, batches, verify rows, threads."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from tests.exactness.case import N_CONTINUATION, Case
from tests.support.compare import assert_same_bytes
from tests.support.runs import decode_one_by_one, forced

# lengths on, just below and just above blocks of 4 tokens, pages of 64 and budgets of 32 and 64
BATCH_LENGTHS = (70, 33, 61, 20, 64, 5, 128, 47)


def cut_plans(length: int) -> list[list[int]]:
    """Cuts of a prompt: every single one when it is short, else around blocks, pages and both ends; then many at once."""
    if length <= 24:
        singles, strides = range(1, length), (1, 3, 16)
    elif length <= 100:
        singles, strides = (1, 2, 3, 4, 15, 16, 17, 33, 63, 64, 65, 66, length - 2, length - 1), (1, 3, 50)
    else:
        singles, strides = (1, 63, 64, 130, 257, length - 1), (61, 100)
    plans = [[at] for at in singles if at < length]
    plans += [list(range(stride, length, stride)) for stride in strides]
    rng = np.random.default_rng(length)
    plans += [sorted(int(at) for at in rng.choice(np.arange(1, length), size=n, replace=False)) for n in (2, 5)]
    return plans


def check_cuts(case: Case, length: int, plans: Sequence[Sequence[int]] | None = None, **options: object) -> None:
    """A prompt in one chunk equals the prompt cut anywhere: all its logits, and three decoded rows after it."""
    prompt, continuation = case.prompt(length), case.continuation()[:3]
    clean = {k: v for k, v in options.items() if k not in ("debug_fault", "chunk_tokens")}
    expected = case.whole(prompt, continuation, **clean)
    with case.open(**options) as runner:
        state = runner.new_sequence()
        for cuts in cut_plans(length) if plans is None else plans:
            state.clear()
            every = np.array(runner.prefill(state, prompt, want="all", cuts=list(cuts)))
            actual = np.concatenate([every, decode_one_by_one(runner, state, continuation)])
            shown = cuts if len(cuts) < 8 else f"{len(cuts)} places"
            assert_same_bytes(actual, expected, f"prompt of {length} cut at {shown}")


def check_wanted_logits(case: Case, length: int, **options: object) -> None:
    """Asking for the last row's logits, or for none, changes nothing."""
    prompt, continuation = case.prompt(length), case.continuation()[:2]
    clean = {k: v for k, v in options.items() if k != "debug_fault"}
    expected = case.whole(prompt, continuation, **clean)
    with case.open(**options) as runner:
        state = runner.new_sequence()
        actual = forced(runner, state, prompt, continuation)
        assert_same_bytes(actual, expected[length - 1 :], "want='last' against want='all'")
        state.clear()
        assert runner.prefill(state, prompt, want="none") is None
        actual = decode_one_by_one(runner, state, continuation)
        assert_same_bytes(actual, expected[length:], "want='none' against want='all'")


def orders(n: int) -> Iterator[tuple[int, ...]]:
    """Orders of n rows: every one of them up to n = 4, 24 random ones beyond; repeated to N_CONTINUATION."""
    if n <= 4:
        every = list(itertools.permutations(range(n)))
    else:
        rng = np.random.default_rng(n)
        every = [tuple(int(i) for i in rng.permutation(n)) for _ in range(N_CONTINUATION)]
    return itertools.islice(itertools.cycle(every), N_CONTINUATION)


def check_rows_of_many(case: Case, n: int, **options: object) -> None:
    """Rows of n sequences in one row graph, in every order, equal the rows of each sequence alone."""
    prompts = [case.prompt(length, seed=i) for i, length in enumerate(BATCH_LENGTHS[:n])]
    continuations = [case.continuation(i) for i in range(n)]
    clean = {k: v for k, v in options.items() if k != "debug_fault"}
    with case.open(n_slots=n, **options) as runner:
        states = [runner.new_sequence() for _ in range(n)]
        found: list[list[np.ndarray]] = [
            [np.array(runner.prefill(state, prompt, want="last"))]
            for state, prompt in zip(states, prompts, strict=True)
        ]
        for step, order in enumerate(orders(n)):
            logits = np.array(runner.decode([(states[i], continuations[i][step]) for i in order]))
            for row, i in enumerate(order):
                found[i].append(logits[row])
    for i in range(n):
        expected = case.alone(prompts[i], continuations[i], **clean)
        assert_same_bytes(np.stack(found[i]), expected, f"sequence {i} among {n}")


def check_rows_of_one(case: Case, k: int, length: int = 61, **options: object) -> None:
    """k rows of one sequence in one row graph (as in a verify step) equal its rows one by one."""
    prompt, continuation = case.prompt(length), case.continuation()
    clean = {name: v for name, v in options.items() if name != "debug_fault"}
    expected = case.alone(prompt, continuation, **clean)
    with case.open(**options) as runner:
        state = runner.new_sequence()
        found = [np.array(runner.prefill(state, prompt, want="last"))[None]]
        for at in range(0, N_CONTINUATION, k):
            found.append(np.array(runner.decode([(state, token) for token in continuation[at : at + k]])))
    assert_same_bytes(np.concatenate(found), expected, f"{k} rows of one sequence together")


def check_mixed_steps(case: Case, n: int = 4, **options: object) -> None:
    """Steps of any mixture: some sequences absent, some with several rows, new ones starting while others decode."""
    rng = np.random.default_rng(n)
    prompts = [case.prompt(length, seed=i) for i, length in enumerate(BATCH_LENGTHS[:n])]
    continuations = [case.continuation(i) for i in range(n)]
    clean = {k: v for k, v in options.items() if k != "debug_fault"}
    with case.open(n_slots=n, **options) as runner:
        states = [runner.new_sequence() for _ in range(n)]
        found: list[list[np.ndarray]] = [[] for _ in range(n)]
        done = [0] * n
        while any(done[i] < N_CONTINUATION for i in range(n)):
            started = [i for i in range(n) if found[i]]
            if len(started) < n and (not started or rng.random() < 0.4):
                i = len(started)
                middle = int(rng.integers(1, len(prompts[i])))
                runner.prefill(states[i], prompts[i][:middle], want="none")
                step_rows(runner, rng, states, continuations, found, done)
                found[i].append(np.array(runner.prefill(states[i], prompts[i][middle:], want="last")))
            step_rows(runner, rng, states, continuations, found, done)
    for i in range(n):
        expected = case.alone(prompts[i], continuations[i], **clean)
        assert_same_bytes(np.stack(found[i]), expected, f"sequence {i} of {n} in mixed steps")


def step_rows(
    runner: object,
    rng: np.random.Generator,
    states: list[object],
    continuations: list[list[int]],
    found: list[list[np.ndarray]],
    done: list[int],
) -> None:
    """One step with 0 to 3 rows of every sequence that has started and is not finished."""
    rows: list[tuple[int, int]] = []
    for i in rng.permutation(len(states)):
        if found[i]:
            take = min(int(rng.integers(0, 4)), N_CONTINUATION - done[i], 8 - len(rows))
            rows += [(int(i), continuations[i][done[i] + j]) for j in range(take)]
            done[i] += take
    if rows:
        logits = np.array(runner.decode([(states[i], token) for i, token in rows]))  # type: ignore[attr-defined]
        for row, (i, _) in enumerate(rows):
            found[i].append(logits[row])


def check_threads(case: Case, n_threads: int = 2, **options: object) -> None:
    """One thread equals several: a prompt's logits, single rows, and a step of four rows."""
    prompt, continuation = case.prompt(50), case.continuation()[:6]
    expected = case.whole(prompt, continuation)
    with case.open(n_threads=n_threads, **options) as runner:
        state = runner.new_sequence()
        every = np.array(runner.prefill(state, prompt, want="all"))
        rows = decode_one_by_one(runner, state, continuation[:2])
        step = np.array(runner.decode([(state, token) for token in continuation[2:]]))
    assert_same_bytes(np.concatenate([every, rows, step]), expected, f"{n_threads} threads against 1")
