"""Runs of a TrunkRunner that tests compare with each other: teacher-forced, greedy, and `solo`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tests.support.compare import row_hashes
from tests.support.device import DEVICE

if TYPE_CHECKING:
    from pyluce.graph import TrunkRunner
    from pyluce.state import SequenceState

RunnerFactory = Callable[..., "AbstractContextManager[TrunkRunner]"]


@contextmanager
def open_runner(model: Path, **options: object) -> Iterator[TrunkRunner]:
    """A runner on `model` with one thread unless told otherwise; RunnerOptions by keyword; closed at the end."""
    from pyluce.graph import RunnerOptions, TrunkRunner

    settings: dict[str, object] = {
        "n_ctx": 1024,
        "n_slots": 1,
        "n_threads": 1,
        "kv_type": "f16",
        "max_rollback": 8,
        "device": DEVICE,
    }
    runner = TrunkRunner(model, RunnerOptions(**{**settings, **options}))
    try:
        yield runner
    finally:
        runner.close()


def prompt_tokens(length: int, seed: int, vocab: int, eos: int = 0, eos_at: Sequence[int] = ()) -> list[int]:
    """`length` random ids below `vocab` without `eos`, except at the positions `eos_at` (negative: from the end)."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(1, vocab, length)
    ids = np.where(ids == eos, (eos + 1) % vocab, ids)
    for position in eos_at:
        if -length <= position < length:
            ids[position] = eos
    return [int(i) for i in ids]


def decode_one_by_one(runner: TrunkRunner, state: SequenceState, tokens: Sequence[int]) -> np.ndarray:
    """Logits [len(tokens), n_vocab] of single-row steps."""
    rows = [np.array(runner.decode([(state, token)]))[0] for token in tokens]
    return np.stack(rows) if rows else np.empty((0, runner.vocab_size), np.float32)


def forced(
    runner: TrunkRunner,
    state: SequenceState,
    prompt: Sequence[int],
    continuation: Sequence[int],
    cuts: Sequence[int] | None = None,
) -> np.ndarray:
    """Prefill `prompt`, then decode `continuation` row by row: logits [1 + len(continuation), n_vocab]."""
    last = np.array(runner.prefill(state, list(prompt), want="last", cuts=cuts))
    return np.concatenate([last[None], decode_one_by_one(runner, state, continuation)])


@dataclass(frozen=True, slots=True)
class Solo:
    """What a request gives alone: greedy token ids, and the logits that each was chosen from [n, n_vocab]."""

    tokens: list[int]
    logits: np.ndarray

    @property
    def hashes(self) -> list[str]:
        return row_hashes(self.logits)


def solo(runner_factory: RunnerFactory, prompt: Sequence[int], n: int) -> Solo:
    """`n` greedy tokens after `prompt` in a fresh runner with one slot: what every other schedule must equal."""
    with runner_factory(n_slots=1) as runner:
        state = runner.new_sequence()
        logits = [np.array(runner.prefill(state, list(prompt), want="last"))]
        tokens = [int(logits[0].argmax())]
        while len(tokens) < n:
            logits.append(np.array(runner.decode([(state, tokens[-1])]))[0])
            tokens.append(int(logits[-1].argmax()))
    return Solo(tokens, np.stack(logits))


def solo_forced(runner_factory: RunnerFactory, prompt: Sequence[int], continuation: Sequence[int]) -> np.ndarray:
    """As `solo`, teacher-forced: logits [1 + len(continuation), n_vocab]."""
    with runner_factory(n_slots=1) as runner:
        return forced(runner, runner.new_sequence(), prompt, continuation)
