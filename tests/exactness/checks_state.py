"""Checks that a sequence's state moves whole: rollback, reuse of a poisoned slot, copies."""

from __future__ import annotations

import numpy as np

from tests.exactness.case import Case
from tests.support.compare import assert_same_bytes
from tests.support.runs import decode_one_by_one, forced


def check_rollback(case: Case, n: int, length: int = 60, verify: bool = False, **options: object) -> None:
    """n rows taken back and decoded again; then others in their place, taken back, and the first ones again.

    Length 60 makes the rows cross blocks of 4 tokens and a page of 64. With `verify` the rows that are taken back
    were computed in one step, as drafts are.
    """
    prompt, continuation = case.prompt(length), case.continuation()[:11]
    others = case.continuation(seed=5)[:n]
    clean = {k: v for k, v in options.items() if k != "debug_fault"}
    expected = case.alone(prompt, continuation, **clean)
    kept, taken_back, after = continuation[: 9 - n], continuation[9 - n : 9], continuation[9:]
    expected_others = case.alone(prompt, kept + others, **clean)[-n:]
    with case.open(**options) as runner:
        state = runner.new_sequence()
        first = [np.array(runner.prefill(state, prompt, want="last"))[None]]
        if verify:
            first.append(decode_one_by_one(runner, state, continuation[:1]))
            first.append(np.array(runner.decode([(state, token) for token in continuation[1:9]])))
        else:
            first.append(decode_one_by_one(runner, state, continuation[:9]))
        assert_same_bytes(np.concatenate(first), expected[:10], "before the rollback")
        state.rollback(n)
        assert state.length == length + 9 - n, f"expected length {length + 9 - n}, found {state.length}"
        again = decode_one_by_one(runner, state, taken_back)
        assert_same_bytes(again, expected[10 - n : 10], f"the same {n} tokens after a rollback of {n}")
        state.rollback(n)
        changed = decode_one_by_one(runner, state, others)
        assert_same_bytes(changed, expected_others, f"other tokens after a rollback of {n}")
        state.rollback(n)
        back = decode_one_by_one(runner, state, taken_back + after)
        assert_same_bytes(back, expected[10 - n :], f"back to the first tokens after a rollback of {n}")


def check_partial_accepts(case: Case, **options: object) -> None:
    """Speculative rounds: four rows a step, of which 0, 1, 2 and 3 drafts hold in turn; the rest are rolled back."""
    prompt, continuation = case.prompt(70), case.continuation()
    wrong = case.continuation(seed=9)
    clean = {k: v for k, v in options.items() if k != "debug_fault"}
    expected = case.alone(prompt, continuation, **clean)
    with case.open(**options) as runner:
        state = runner.new_sequence()
        found = [np.array(runner.prefill(state, prompt, want="last"))]
        at, accepted = 0, 0
        while at + 4 <= len(continuation):
            rows = continuation[at : at + 1 + accepted] + wrong[at + 1 + accepted : at + 4]
            logits = np.array(runner.decode([(state, token) for token in rows]))
            found += list(logits[: 1 + accepted])
            if accepted < 3:
                state.rollback(3 - accepted)
            at += 1 + accepted
            accepted = (accepted + 1) % 4
    assert_same_bytes(np.stack(found), expected[: len(found)], "rounds with 0, 1, 2 and 3 accepted drafts")


def check_poisoned_slot(case: Case, **options: object) -> None:
    """A sequence on a slot whose freed state was filled with NaN equals the same sequence on a new slot."""
    clean = {k: v for k, v in options.items() if k != "debug_fault"}
    with case.open(**options) as runner:
        forced(runner, runner_state := runner.new_sequence(), case.prompt(300, seed=3), case.continuation()[:4])
        runner_state.free()
        for length in (20, 70, 5):
            runner.poison_free_state()
            state = runner.new_sequence()
            prompt, continuation = case.prompt(length), case.continuation()[:4]
            actual = forced(runner, state, prompt, continuation)
            assert_same_bytes(actual, case.alone(prompt, continuation, **clean), f"{length} tokens on a poisoned slot")
            state.free()


def check_cleared_slot(case: Case, **options: object) -> None:
    """One slot serves unrelated requests one after the other; each equals the request alone."""
    clean = {k: v for k, v in options.items() if k != "debug_fault"}
    with case.open(**options) as runner:
        state = runner.new_sequence()
        for seed, length in enumerate((70, 20, 33, 2, 64, 5, 1)):
            prompt, continuation = case.prompt(length, seed), case.continuation(seed)[:4]
            actual = forced(runner, state, prompt, continuation)
            expected = case.alone(prompt, continuation, **clean)
            assert_same_bytes(actual, expected, f"request {seed} of {length} tokens on a cleared slot")
            state.clear()


def check_copy(case: Case, length: int, **options: object) -> None:
    """A copy and its original diverge, in one row graph and alone; both equal a sequence that was never copied."""
    prompt, shared = case.prompt(length), case.continuation()[:2]
    ours, theirs = case.continuation(seed=1)[:8], case.continuation(seed=2)[:8]
    clean = {k: v for k, v in options.items() if k != "debug_fault"}
    expected_ours = case.alone(prompt, shared + ours, **clean)[3:]
    expected_theirs = case.alone(prompt, shared + theirs, **clean)[3:]
    with case.open(n_slots=2, **options) as runner:
        original = runner.new_sequence()
        forced(runner, original, prompt, shared)
        copy = original.copy()
        assert copy.length == original.length
        together = [np.array(runner.decode([(original, ours[i]), (copy, theirs[i])])) for i in range(4)]
        assert_same_bytes(np.stack([x[0] for x in together]), expected_ours[:4], "the original beside its copy")
        assert_same_bytes(np.stack([x[1] for x in together]), expected_theirs[:4], "the copy beside its original")
        copy.rollback(2)
        assert_same_bytes(
            decode_one_by_one(runner, copy, theirs[2:6]), expected_theirs[2:6], "the copy after a rollback of 2"
        )
        assert_same_bytes(
            decode_one_by_one(runner, original, ours[4:6]), expected_ours[4:6], "the original after the copy moved on"
        )
        original.free()
        runner.poison_free_state()
        assert_same_bytes(
            decode_one_by_one(runner, copy, theirs[6:]), expected_theirs[6:], "the copy after its original was freed"
        )
