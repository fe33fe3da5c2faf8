"""One weight type's tiny model and what its requests give alone, computed once and compared with everything else."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tests.support.runs import decode_one_by_one, forced, open_runner, prompt_tokens

if TYPE_CHECKING:
    from pyluce.graph import TrunkRunner

EOS = 0
N_CONTINUATION = 24


@dataclass
class Case:
    """Requests on one model. Expected logits come from a fault-free runner of its own with one slot and one thread."""

    model: Path
    vocab: int
    _alone: dict[tuple[object, ...], np.ndarray] = field(default_factory=dict)

    def open(self, **options: object) -> AbstractContextManager[TrunkRunner]:
        """A runner on this case's model; RunnerOptions by keyword."""
        return open_runner(self.model, **options)

    def prompt(self, length: int, seed: int = 0) -> list[int]:
        """A prompt with end-of-text inside, also within the n-gram window of its last token."""
        return prompt_tokens(length, 1000 * seed + length, self.vocab, EOS, (length // 2, -2))

    def continuation(self, seed: int = 0, length: int = N_CONTINUATION) -> list[int]:
        """Tokens to decode after a prompt; an end-of-text among them."""
        return prompt_tokens(length, 77_000 + seed, self.vocab, EOS, (4,))

    def alone(self, prompt: Sequence[int], continuation: Sequence[int], **options: object) -> np.ndarray:
        """Prefill in one chunk, then one row at a time: logits [1 + len(continuation), n_vocab]."""
        key = ("alone", tuple(prompt), tuple(continuation), tuple(sorted(options.items())))
        if key not in self._alone:
            with self.open(**options) as runner:
                self._alone[key] = forced(runner, runner.new_sequence(), prompt, continuation)
        return self._alone[key]

    def whole(self, prompt: Sequence[int], continuation: Sequence[int], **options: object) -> np.ndarray:
        """As `alone`, with the logits of every prompt token: [len(prompt) + len(continuation), n_vocab]."""
        key = ("whole", tuple(prompt), tuple(continuation), tuple(sorted(options.items())))
        if key not in self._alone:
            with self.open(**options) as runner:
                state = runner.new_sequence()
                every = np.array(runner.prefill(state, list(prompt), want="all"))
                self._alone[key] = np.concatenate([every, decode_one_by_one(runner, state, continuation)])
        return self._alone[key]
