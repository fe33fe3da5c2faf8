"""The seams of the engine: what it needs of the trunk, of a sampler and of a vocabulary. No native type appears here."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Literal, Protocol, TypeAlias, TypeVar, runtime_checkable

import numpy as np
import numpy.typing as npt

Logits = npt.NDArray[np.float32]
Row: TypeAlias = Logits | int
"""What a decoded row says: its logits [n_vocab], or only the token with the largest one, of equal ones the lowest id."""


class SequenceLike(Protocol):
    """All state of one sequence (`pyluce.state.SequenceState`)."""

    @property
    def length(self) -> int:
        """Tokens that the state holds."""

    def rollback(self, count: int) -> None:
        """Forget the last `count` tokens, which were decoded."""

    def free(self) -> None:
        """Give the slot back; the state must not be used afterwards."""


S = TypeVar("S", bound=SequenceLike)
S_in = TypeVar("S_in", bound=SequenceLike, contravariant=True)


class Runner(Protocol[S]):
    """Computes logits (`pyluce.graph.TrunkRunner`). Every call comes from the thread that made the runner."""

    @property
    def vocab_size(self) -> int:
        """Length of a row of logits."""

    @property
    def n_free_slots(self) -> int:
        """Sequences that can still be made."""

    def new_sequence(self) -> S:
        """A cleared sequence in a free slot."""

    def prefill(
        self,
        state: S,
        tokens: Sequence[int],
        want: Literal["last", "all", "none"] = "last",
        cuts: Sequence[int] | None = None,
    ) -> Logits | None:
        """Append `tokens`; return float32 [n_vocab] for "last", [T, n_vocab] for "all". `cuts` are further chunk
        boundaries, as absolute positions."""

    def decode(self, rows: Sequence[tuple[S, int]]) -> Logits:
        """Append one token to each row's sequence; return float32 [n_rows, n_vocab]. Rows of one sequence stand together."""

    def decode_rows(self, rows: Sequence[tuple[S, int]], wants_logits: Sequence[bool]) -> list[Row]:
        """As `decode`, but only the rows that want them have their logits. So has one from which no token can be chosen."""

    def draft(self, requests: Sequence[tuple[S, int, int]]) -> list[list[int]]:
        """For each (sequence, its next token, how many): tokens that may follow that one. The sequences do not change."""

    @property
    def graphs_built(self) -> int:
        """Rises when a call has to build a graph, so that its time is no measure of the next one's."""

    def memory_report(self) -> dict[str, object]:
        """Bytes by place, from the buffers that exist."""

    def close(self) -> None:
        """Free everything."""


@runtime_checkable
class Launching(Protocol):
    """A runner that says when its device computes."""

    on_launch: Callable[[], object] | None
    """Called once in each step: as soon as a device computes that does so by itself, right before one that is this thread's own."""


@runtime_checkable
class Expecting(Protocol):
    """A runner that can prepare a chunk while it computes the one before."""

    def expect(self, prompt: Sequence[int], begin: int, end: int) -> None:
        """The chunk after the next `prefill` will probably be `prompt[begin:end]`; no result depends on it."""


class Sampler(Protocol):
    """Chooses tokens for one sequence and remembers what it chose."""

    def sample(self, logits: Logits) -> int:
        """Choose a token from a row [n_vocab], which is not changed, and count it as part of the answer."""

    def accept(self, token: int) -> None:
        """Count a token that was not chosen here as part of the answer."""

    def close(self) -> None:
        """Free it."""


class Chain(Protocol):
    """libllama's sampler chain, built step by step (see `pyluce.engine.sampling` for the steps)."""

    def add(self, name: str, *arguments: object) -> None:
        """Append the step `name`."""

    def accept(self, token: int) -> None:
        """Tell every step that `token` is now part of the text."""

    def sample(self, logits: Logits) -> int:
        """Choose a token from a row and accept it."""

    def close(self) -> None:
        """Free it."""


class TokenTable(Protocol):
    """What the engine asks about tokens (`pyluce.text.Tokenizer`)."""

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token adds to the text."""

    def is_end(self, token: int) -> bool:
        """The token ends an answer."""


class Start(Protocol):
    """Where a sequence starts (`pyluce.state.store.Start`)."""

    @property
    def length(self) -> int:
        """Tokens of the prompt that are in its state."""

    @property
    def logits(self) -> Logits | None:
        """The row [n_vocab] that follows, when that is the whole prompt."""


class PrefixStore(Protocol[S_in]):
    """Keeps what prompts have in common (`pyluce.state.SnapshotStore`)."""

    def start(self, state: S_in, prompt: Sequence[int], boundaries: Collection[int]) -> Start:
        """Put the longest kept prefix of `prompt` that ends at one of `boundaries` into an empty sequence."""

    def offer(self, state: S_in, logits: Logits | None = None) -> None:
        """Keep the state of a sequence right after a chunk, if that is new and fits."""

    def end(self, state: S_in) -> None:
        """The sequence is about to be freed."""
