"""The draft head against numpy in float64, and against libllama, which normalises the hidden rows otherwise."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from gguf import GGUFReader

from pyluce.native.tensors import tensor_get, tensor_shape
from tests.oracles.llama_mtp import mtp_logits
from tests.oracles.mtp_reference import MtpReference
from tests.support.compare import ValuesDiffer, assert_close
from tests.support.models import ModelCache
from tests.support.runs import open_runner, prompt_tokens

if TYPE_CHECKING:
    from pyluce.graph import TrunkRunner
    from pyluce.state import SequenceState

N_DRAFTS = 3
EOS = 4087


@contextmanager
def drafting_runner(model_cache: ModelCache, **options: object) -> Iterator[TrunkRunner]:
    settings: dict[str, object] = {"n_ctx": 256, "kv_type": "f32", "mtp": True}
    with open_runner(model_cache.luce_tiny_f32(), **{**settings, **options}) as runner:
        assert runner._drafter is not None
        runner._drafter._keep_logits = True
        yield runner


def hidden_rows(runner: TrunkRunner, state: SequenceState, tokens: list[int]) -> np.ndarray:
    """The trunk's residual after each token, by rows; read from the ring that drafting reads."""
    pool = runner._pool
    assert pool.hidden is not None
    ne = tensor_shape(pool.hidden)
    rows = []
    for token in tokens:
        runner.decode([(state, token)])
        ring = np.array(tensor_get(pool.hidden, np.float32, (ne[2] * ne[1], ne[0])))
        rows.append(ring[pool.hidden_entry(state.slot, state.length - 1)].astype(np.float64))
    return np.stack(rows)


def ours(runner: TrunkRunner, state: SequenceState, token: int) -> tuple[list[int], np.ndarray]:
    """Drafts after `token`, and the logits of each step [N_DRAFTS, n_vocab]."""
    drafts = runner.draft([(state, token, N_DRAFTS)])[0]
    assert runner._drafter is not None
    return drafts, np.stack([logits[0] for logits in runner._drafter.last_logits])


def theirs(
    reference: MtpReference, hidden: np.ndarray, token: int, ids: np.ndarray | None = None
) -> tuple[list[int], np.ndarray]:
    """`ids`: the tokens that may be drafted, None: all."""
    reference = reference.copy()
    drafts, rows = [], []
    for _ in range(N_DRAFTS):
        hidden, logits = reference.feed(hidden, token)
        if ids is not None:
            logits = logits[ids]
        token = int(logits.argmax()) if ids is None else int(ids[logits.argmax()])
        drafts.append(token)
        rows.append(logits)
    return drafts, np.stack(rows).astype(np.float32)


def check_head(model_cache: ModelCache, reference: MtpReference, **options: object) -> str:
    """Every third position of 150 tokens: by rows, after chunks cut anywhere, across pages and the selection budget."""
    tokens = prompt_tokens(151, 3, 4000, EOS, (40, 41, 90))
    found = []
    with drafting_runner(model_cache, n_slots=2, **options) as runner:
        by_rows, by_chunks = runner.new_sequence(), runner.new_sequence()
        hidden = hidden_rows(runner, by_rows, tokens[:1])
        for at in range(1, 150):
            if at % 3 == 0 or 60 < at < 70:
                drafts, logits = ours(runner, by_rows, tokens[at])
                expected, rows = theirs(reference, hidden[-1], tokens[at])
                found.append(assert_close(logits, rows, f"drafts after {at} rows", limit=2e-3))
                assert drafts == expected
            reference.feed(hidden[-1], tokens[at])
            hidden = hidden_rows(runner, by_rows, [tokens[at]])
        runner.prefill(by_chunks, tokens[:150], want="none", cuts=[1, 17, 63, 64, 65, 130])
        drafts, logits = ours(runner, by_chunks, tokens[150])
        expected, rows = theirs(reference, hidden[-1], tokens[150])
        found.append(assert_close(logits, rows, "drafts after chunks", limit=2e-3))
        assert drafts == expected
    worst = max(found, key=lambda one: one.max_abs)
    return f"{len(found)} places of {N_DRAFTS} chained drafts, worst: {worst}"


def test_the_head_is_what_the_description_says(model_cache: ModelCache) -> None:
    print(check_head(model_cache, MtpReference.load(model_cache.luce_tiny_f32())))


def check_few_tokens(model_cache: ModelCache, off_by: int) -> None:
    """Drafts of a head that may draft 700 tokens of 4,096."""
    tokens = prompt_tokens(40, 5, 4000, EOS, (20,))
    reference = MtpReference.load(model_cache.luce_tiny_f32())
    with drafting_runner(model_cache, draft_vocab=700) as runner:
        ids = runner.model.draft_ids
        assert ids is not None
        assert len(ids) == 700
        state = runner.new_sequence()
        hidden = hidden_rows(runner, state, tokens[:1])
        for at in range(1, 40):
            if at % 5 == 0:
                drafts, logits = ours(runner, state, tokens[at])
                expected, rows = theirs(reference, hidden[-1], tokens[at], ids + off_by)
                assert_close(logits, rows, f"drafts after {at} rows", limit=2e-3)
                assert drafts == expected
            reference.feed(hidden[-1], tokens[at])
            hidden = hidden_rows(runner, state, [tokens[at]])
        assert runner.memory_report()["draft"]["vocabulary"] == 700  # type: ignore[index]


def test_a_head_that_may_draft_few_tokens(model_cache: ModelCache) -> None:
    check_few_tokens(model_cache, 0)


def test_control_rows_of_other_tokens(model_cache: ModelCache) -> None:
    with pytest.raises(ValuesDiffer):
        check_few_tokens(model_cache, -1)


def test_control_a_norm_for_each_stream_is_another_head(model_cache: ModelCache) -> None:
    with pytest.raises(ValuesDiffer):
        check_head(model_cache, MtpReference.load(model_cache.luce_tiny_f32(), norm_by_stream=True))


def test_a_norm_for_each_stream_as_a_planted_fault(model_cache: ModelCache) -> None:
    """The fault is upstream's arithmetic, so that what it costs can be measured."""
    reference = MtpReference.load(model_cache.luce_tiny_f32(), norm_by_stream=True)
    print(check_head(model_cache, reference, debug_fault="stream_norm"))


def with_selecting_head(path: Path) -> Path:
    """A copy whose head has the trunk's compress ratio: libllama cannot run it densely when the trunk selects."""
    copy = path.with_name(path.stem + "-selecting.gguf")
    if not copy.exists():
        shutil.copyfile(path, copy)
        field = GGUFReader(str(copy), "r+").fields["qwen4exp.attention.compress_ratios"]
        values = [field.parts[index] for index in field.data]
        assert values[-1][0] == 0
        values[-1][0] = max(value[0] for value in values)
    return copy


def test_libllama_has_the_same_head_but_for_that_norm(model_cache: ModelCache) -> None:
    """Everything else of the head, against libllama's graph fed with our hidden rows; its norm is the planted fault here.

    64 tokens: what libllama's head selects is everything.
    """
    tokens = prompt_tokens(65, 3, 4000, EOS, (40, 41))
    with drafting_runner(model_cache, debug_fault="stream_norm") as runner:
        state = runner.new_sequence()
        rows, hidden = [], [hidden_rows(runner, state, tokens[:1])[0]]
        for at in range(1, 65):
            rows.append(ours(runner, state, tokens[at])[1][0])
            hidden.append(hidden_rows(runner, state, [tokens[at]])[0])
    expected = mtp_logits(with_selecting_head(model_cache.luce_tiny_f32()), np.stack(hidden[:64]), tokens[1:65])
    print(assert_close(np.stack(rows), expected, "64 drafts", limit=1e-3))
