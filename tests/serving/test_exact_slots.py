"""Whatever else runs, a request's token ids and logits are those of its solo run, bit for bit, on the real trunk."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyluce.engine import GenerationRequest
from pyluce.engine import Outcome as End
from pyluce.luce import Luce
from tests.serving.exact import Alone, Outcome, Run, make_request, request_pool
from tests.support.desk import Answer
from tests.support.device import LOAD_OPTIONS, ON_GPU

SLOTS = (1, 2, 3, 4, 8, 16)
SHORT = (20, 33, 61, 64, 70, 128, 129)
FAULTY_SLOTS = (4, 8) if ON_GPU else (2, 3, 4, 8)
"""Where upstream's kernels show that they depend on the number of rows: on a GPU one of theirs treats 1 to 3 rows of F32 alike."""


class AnswerDiffers(AssertionError):  # noqa: N818  (an assertion, not an error of the code)
    """A request got something else than alone."""


def assert_as_alone(
    requests: Sequence[GenerationRequest], answers: Sequence[Answer], alone: Any, fault: Any = None
) -> None:
    for wanted, answer in zip(requests, answers, strict=True):
        expected = alone(wanted, fault)
        assert answer.finish is not None
        assert expected.finish is not None
        assert len(answer.tokens) == wanted.max_tokens
        same_logits = answer.finish.logits_sha256 == expected.finish.logits_sha256
        if not same_logits or answer.tokens != expected.tokens:
            raise AnswerDiffers(
                f"a prompt of {len(wanted.prompt)} tokens: logits {'equal' if same_logits else 'differ'}; "
                f"tokens alone {expected.tokens}, found {answer.tokens}"
            )


def assert_really_batched(outcome: Outcome, n_slots: int, n_requests: int) -> None:
    """The run was what it is meant to be: full row graphs, and sequences that begin when others are in the middle of a block."""
    if n_slots == 1:
        assert outcome.widest_step == 1
        return
    assert outcome.widest_step >= min(n_slots, n_requests // 2)
    assert outcome.mid_block_starts > 0


@pytest.mark.parametrize("n_slots", SLOTS)
def test_every_finished_answer_is_its_solo_run(serving_model: Path, alone: Alone, n_slots: int) -> None:
    requests = request_pool()
    leavers = [make_request(length, seed=9, n=30) for length in (40, 90, 400, 700)]
    share = 1.0 if n_slots > 8 else None  # so that many decode while others still read their prompts
    outcome = Run(serving_model, n_slots, seed=n_slots, share=share).play(requests, leavers)
    assert_as_alone(requests, outcome.answers, alone)
    assert_really_batched(outcome, n_slots, len(requests))
    assert outcome.stats.requests[End.LENGTH] >= len(requests)
    assert outcome.stats.requests[End.FAILED] == 0


@pytest.mark.parametrize("seed", range(4))
def test_other_arrivals_other_neighbours(serving_model: Path, alone: Alone, seed: int) -> None:
    requests = request_pool(SHORT)
    leavers = [make_request(length, seed=seed, n=20) for length in (30, 50, 140, 200, 260)]
    outcome = Run(serving_model, 3 + seed, seed=100 + seed).play(requests, leavers)
    assert_as_alone(requests, outcome.answers, alone)
    assert outcome.stats.requests[End.CANCELLED] > 0


@pytest.mark.parametrize("n_slots", [2, 3, 4, 8, 16])
@pytest.mark.parametrize("length", [20, 200])
def test_identical_prompts_give_one_distinct_answer(
    serving_model: Path, alone: Alone, n_slots: int, length: int
) -> None:
    wanted = make_request(length, seed=3, n=24)
    outcome = Run(serving_model, n_slots, seed=n_slots).play([wanted] * n_slots)
    assert len({str(answer.result()) for answer in outcome.answers}) == 1
    assert_as_alone([wanted] * n_slots, outcome.answers, alone)


def test_a_slot_shows_nothing_of_who_was_there_before(serving_model: Path, alone: Alone) -> None:
    """Thirty unrelated prompts over two slots; the state of each that leaves is filled with NaN."""
    wanted = make_request(70, seed=3)
    others = [make_request(21 + 7 * number, seed=50 + number, n=6) for number in range(29)]
    outcome = Run(serving_model, 2, seed=5).play([*others, wanted])
    assert_as_alone([wanted], outcome.answers[-1:], alone)
    assert all(answer.complete for answer in outcome.answers)


@pytest.mark.parametrize("n_slots", FAULTY_SLOTS)
def test_control_rows_that_depend_on_the_batch_are_seen(serving_model: Path, alone: Alone, n_slots: int) -> None:
    """With kernels that add in another order for another number of rows, the comparison fails, even with the same faulty engine alone."""
    requests = request_pool(SHORT)
    outcome = Run(serving_model, n_slots, seed=n_slots, fault="batch_variant").play(requests)
    with pytest.raises(AnswerDiffers):
        assert_as_alone(requests, outcome.answers, alone, "batch_variant")


def test_control_a_fault_alone_changes_nothing_alone(serving_model: Path, alone: Alone) -> None:
    """The faulty engine with one slot repeats itself: what the other control sees is the batch."""
    requests = request_pool(SHORT)
    outcome = Run(serving_model, 1, seed=1, fault="batch_variant").play(requests)
    assert_as_alone(requests, outcome.answers, alone, "batch_variant")


def test_control_state_of_the_one_before_is_seen(serving_model: Path, alone: Alone) -> None:
    """With a kernel that lets masked NaN through, the poison of a sequence that left reaches the next one."""
    requests = request_pool(SHORT)
    outcome = Run(serving_model, 2, seed=2, fault="nan_leak").play(requests)
    with pytest.raises(AssertionError):
        assert_as_alone(requests, outcome.answers, alone)


def test_threads_and_real_time_through_the_library(serving_model: Path) -> None:
    """The whole stack: eight slots, sixteen callers who come when they like, against one slot and one caller."""
    options: dict[str, Any] = {**LOAD_OPTIONS, "max_ctx": 512, "chunk": 64}
    asked = [{"tokens": make_request(20 + 17 * number).prompt, "max_tokens": 12} for number in range(16)]

    def result(luce: Luce, number: int) -> tuple[object, ...]:
        done = luce.generate(**asked[number], hash_logits=True, ignore_end=True)
        return done.tokens, done.logits_sha256

    with Luce.load(serving_model, **options, max_concurrency=1) as luce:
        expected = [result(luce, number) for number in range(16)]
    found: dict[int, tuple[object, ...]] = {}
    rng = np.random.default_rng(4)
    waits = rng.random(16) * 0.2
    with Luce.load(serving_model, **options, max_concurrency=8) as luce:

        def ask(number: int) -> None:
            threading.Event().wait(waits[number])
            found[number] = result(luce, number)

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        stats = luce.stats()
    assert [found[number] for number in range(16)] == expected
    assert stats.decode_rows > stats.decode_steps
    assert stats.invariant_violations == 0
