"""Requests that only need the largest logit get no more of a row; what they answer is what logits would have given."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pyluce.engine import SamplingParams
from pyluce.engine.constraint import ConstraintCompiler
from pyluce.engine.errors import LogitsError
from pyluce.text import Tokenizer
from tests.support.desk import VOCABULARY, Desk, alone, request
from tests.support.fake_runner import FakeRunner

PROMPT = [7, 8, 9]
STEPS = 6
WANT_LOGITS: dict[str, dict[str, Any]] = {
    "hashes": {"hash_logits": True},
    "logprobs": {"n_logprobs": 2},
    "temperature": {"sampling": SamplingParams(temperature=0.7, seed=3)},
    "bias": {"sampling": SamplingParams(logit_bias={3: 1.0})},
    "penalty": {"sampling": SamplingParams(presence_penalty=0.5)},
    "grammar": {"constraint": None, "ignore_end": False},
}


def greedy(prompt: list[int] = PROMPT, **options: Any) -> Any:
    return request(prompt, STEPS, **{"hash_logits": False, **options})


def answers(desk: Desk, *requests: Any) -> list[tuple[object, ...]]:
    tickets = [desk.submit(one) for one in requests]
    desk.run()
    return [desk.answer(ticket).result() for ticket in tickets]


def test_a_plain_greedy_request_reads_no_logits() -> None:
    desk = Desk(1)
    assert answers(desk, greedy()) == [alone(greedy()).result()]
    assert desk.runner.logits_read == 0
    assert desk.runner.calls.count(("decode", 1)) == STEPS - 1


@pytest.mark.parametrize("why", WANT_LOGITS)
def test_who_needs_logits_gets_them_beside_those_who_do_not(why: str) -> None:
    options = dict(WANT_LOGITS[why])
    if why == "grammar":
        options["constraint"] = ConstraintCompiler(Tokenizer(VOCABULARY)).json_object()
    desk = Desk(2)
    wanted, plain = greedy([1, 2, 3], **options), greedy()
    assert answers(desk, wanted, plain) == [alone(wanted).result(), alone(plain).result()]
    assert 0 < desk.runner.logits_read <= STEPS - 1, "of the one, and not of the other"


def test_control_the_highest_of_equal_logits_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    def tie(tokens: list[int], row: Any) -> None:
        row[[5, 17]] = 50.0

    right = alone(greedy(), damage=tie).result()
    assert answers(Desk(1, damage=tie), greedy()) == [right]

    def highest(self: Any, rows: Any, wants_logits: Any) -> Any:
        return [len(row) - 1 - int(row[::-1].argmax()) for row in self.decode(rows)]

    monkeypatch.setattr(FakeRunner, "decode_rows", highest)
    assert answers(Desk(1, damage=tie), greedy()) != [right]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_row_without_a_choice_fails_with_the_same_words(bad: float) -> None:
    def spoil(tokens: list[int], row: Any) -> None:
        if len(tokens) == len(PROMPT) + 2:
            row[:] = bad

    messages = []
    for hash_logits in (False, True):
        desk = Desk(1, damage=spoil)
        ticket = desk.submit(greedy(hash_logits=hash_logits))
        desk.run()
        error = desk.answer(ticket).error
        assert isinstance(error, LogitsError)
        messages.append(str(error))
    assert messages[0] == messages[1] and "step 2" in messages[0]
