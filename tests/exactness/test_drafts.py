"""Drafts are a function of the text alone as well, whatever was drafted, verified, taken back, copied or restored before.

No draft can change an answer, so a part of the head's state that is left behind shows here only, and in how often drafts are right.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.exactness.case import EOS
from tests.support.models import SEED, TEST_SHAPE, ModelCache
from tests.support.runs import open_runner, prompt_tokens

if TYPE_CHECKING:
    from pyluce.graph import TrunkRunner
    from pyluce.state import SequenceState

N_DRAFTS = 3
PROMPT = prompt_tokens(61, 11, TEST_SHAPE.n_vocab, EOS, (20,))
ANSWER = prompt_tokens(30, 12, TEST_SHAPE.n_vocab, EOS, (4,))


class DraftsDiffer(AssertionError):  # noqa: N818  (an assertion, not an error of the code)
    """Not the drafts of a sequence that only ever read its text."""


@pytest.fixture(scope="module")
def model(model_cache: ModelCache) -> Path:
    shape = replace(TEST_SHAPE.with_type("Q8_0"), n_layer=3, mtp=True)
    return model_cache.write("drafting-Q8_0.gguf", shape, SEED)


@contextmanager
def drafting(model: Path, **options: object) -> Iterator[TrunkRunner]:
    with open_runner(model, mtp=True, **{"n_ctx": 256, "max_rollback": 7, **options}) as runner:
        yield runner


def draft(runner: TrunkRunner, state: SequenceState, done: int) -> list[int]:
    """The drafts after `done` tokens of the answer, the next one being chosen."""
    return runner.draft([(state, ANSWER[done], N_DRAFTS)])[0]


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]]:
    """Of a sequence that was read row by row: a copy of it drafts, so that nothing was drafted before in any of them."""
    found = []
    with drafting(model, n_slots=2) as runner:
        state = runner.new_sequence()
        runner.prefill(state, PROMPT, want="none")
        for done, token in enumerate(ANSWER):
            copy = state.copy()
            found.append(draft(runner, copy, done))
            copy.free()
            runner.decode([(state, token)])
    assert len({tuple(drafts) for drafts in found}) > len(found) // 2, "drafts that never change show nothing"
    return found


def assert_drafts(found: list[int], expected: list[int], what: str) -> None:
    if found != expected:
        raise DraftsDiffer(f"{what}: expected {expected}, found {found}")


def speculate(runner: TrunkRunner, state: SequenceState, expected: list[list[int]], pattern: tuple[int, ...]) -> None:
    """Verify steps of 4 rows, of which as many drafts as the pattern says are the answer's and the rest are not."""
    done, step = 0, 0
    while done < len(ANSWER) - N_DRAFTS - 1:
        assert_drafts(draft(runner, state, done), expected[done], f"after {done} tokens, step {step}")
        right = pattern[step % len(pattern)]
        wrong = [(token + 1) % TEST_SHAPE.n_vocab for token in ANSWER[done + 1 + right : done + 1 + N_DRAFTS]]
        runner.decode([(state, token) for token in (*ANSWER[done : done + 1 + right], *wrong)])
        state.rollback(N_DRAFTS - right)
        done, step = done + 1 + right, step + 1


def check_speculation(model: Path, expected: list[list[int]], **options: object) -> None:
    with drafting(model, **options) as runner:
        for pattern in ((0,), (2, 0), (0, 1, 2, 3)):
            state = runner.new_sequence()
            runner.prefill(state, PROMPT, want="none", cuts=[5, 60])
            speculate(runner, state, expected, pattern)
            state.free()


def test_after_verified_and_rejected_drafts(model: Path, expected: list[list[int]]) -> None:
    check_speculation(model, expected)


@pytest.mark.parametrize("fault", ["stale_hidden", "stale_mtp", "stale_conv", "stale_ring", "stale_ngram", "stale_ple"])
def test_control_a_part_that_is_left_behind(model: Path, expected: list[list[int]], fault: str) -> None:
    with pytest.raises(DraftsDiffer):
        check_speculation(model, expected, debug_fault=fault)


def test_copied_restored_and_in_company(model: Path, expected: list[list[int]]) -> None:
    with drafting(model, n_slots=4) as runner:
        first = runner.new_sequence()
        runner.prefill(first, PROMPT, want="none", cuts=[17])
        snapshot = first.snapshot()
        restored = runner.new_sequence()
        restored.restore(snapshot)
        copied = first.copy()
        stranger = runner.new_sequence()
        runner.prefill(stranger, PROMPT[3:40], want="none")
        for done in range(6):
            wanted = [(state, ANSWER[done], N_DRAFTS) for state in (restored, stranger, copied, first)]
            drafts = runner.draft(wanted)
            for i in (0, 2, 3):
                assert_drafts(drafts[i], expected[done], f"sequence {i} of four after {done} tokens")
            runner.decode([(state, ANSWER[done]) for state in (first, stranger, copied, restored)])
        first.free()
        again = runner.new_sequence()
        runner.poison_free_state()
        again.restore(snapshot)
        assert_drafts(draft(runner, again, 0), expected[0], "restored after others went on from the same pages")
        snapshot.close()


def test_what_a_draft_refuses(model: Path) -> None:
    with drafting(model) as runner:
        state = runner.new_sequence()
        with pytest.raises(ValueError, match="a sequence with tokens to draft for, found an empty one"):
            runner.draft([(state, 3, 1)])
        runner.prefill(state, PROMPT, want="none")
        for requests, message in (
            ([(state, 3, 8)], "1 to 7 drafts a sequence, found 8"),
            ([(state, TEST_SHAPE.n_vocab, 1)], "a token id below"),
            ([(state, 3, 1), (state, 3, 1)], "every sequence once"),
        ):
            with pytest.raises(ValueError, match=message):
                runner.draft(requests)
        runner.prefill(state, prompt_tokens(256 - 61 - 3, 1, TEST_SHAPE.n_vocab), want="none")
        assert len(runner.draft([(state, 3, 2)])[0]) == 2
        with pytest.raises(ValueError, match="room for 4 tokens, found 3"):
            runner.draft([(state, 3, 3)])
    with open_runner(model, n_ctx=256) as runner:
        state = runner.new_sequence()
        runner.prefill(state, PROMPT, want="none")
        with pytest.raises(ValueError, match="a runner with a draft head"):
            runner.draft([(state, 3, 1)])
