"""One sequence's state, whole: nothing else moves a part of it.

What is addressed by position (K/V, indexer keys, GDN states, convolution inputs) follows `length`; what is not (pages, the token
list that the n-gram hash reads, parts that others attach: sampler, grammar, draft state) is moved here in the same
call. So clearing, rolling back and copying are complete by construction.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from pyluce.state.pages import PageTable
from pyluce.state.pool import StatePool
from pyluce.state.snapshot import Snapshot


class RollbackError(ValueError):
    """A rollback beyond what the state keeps."""


class SequencePart(Protocol):
    """Something attached to a sequence that must move with it, a sampler for example."""

    def clear(self) -> None:
        """Back to the state before the first token."""

    def rollback(self, length: int) -> None:
        """Back to the state at `length` tokens."""

    def copy(self) -> SequencePart:
        """An independent copy."""

    def close(self) -> None:
        """Free what it owns."""


class SequenceState:
    """The state of one sequence in one slot. Made by `TrunkRunner.new_sequence`; free() gives slot and pages back."""

    def __init__(self, pool: StatePool, slot: int) -> None:
        self._pool = pool
        self._table = PageTable()
        self._slot: int | None = slot
        self._oldest = 0  # the shortest length whose recurrent state is still in the ring
        self.tokens: list[int] = []
        self.chunk_ends: list[int] = []  # where the chunks that filled it ended; decoded rows add none
        self.parts: dict[str, SequencePart] = {}

    @property
    def slot(self) -> int:
        """The slot number. Raises RuntimeError after free()."""
        if self._slot is None:
            raise RuntimeError("this sequence was freed")
        return self._slot

    @property
    def length(self) -> int:
        """Tokens whose effect is in the state; the next token's position."""
        return len(self.tokens)

    @property
    def room(self) -> int:
        """Tokens that still fit into the context."""
        return self._pool.options.n_ctx - self.length

    @property
    def oldest_length(self) -> int:
        """The shortest length that `rollback` can still reach."""
        return self._oldest

    @property
    def pages(self) -> list[int]:
        """Pages of the attention pool, in order of positions."""
        return self._table.pages

    def begin_write(self, count: int, *, keeps_rows: bool) -> None:
        """Get ready for a step that adds `count` tokens: pages exist and are ours, older ring entries are given up.

        `keeps_rows`: the step leaves a state after each row (row graph), not only after the last (chunk graph).
        Raises OutOfPagesError, ValueError (context full) or RuntimeError (an earlier step failed) before anything changes.
        """
        length = len(self.tokens)
        end = length + count
        if end > self._pool.options.n_ctx:
            raise ValueError(
                f"the context holds {self._pool.options.n_ctx} tokens: {length} are in the sequence, "
                f"{count} more do not fit"
            )
        if self._oldest > length:
            raise RuntimeError("a step of this sequence failed and its state is lost; clear it and prefill it again")
        self._prepare(length, end)
        self._oldest = max(self._oldest, end - self._pool.options.reach) if keeps_rows else end

    def prepare_draft(self, count: int) -> None:
        """Get ready for drafting `count` tokens after the next one: as `begin_write` for all of them, but no entry is given up.

        Raises ValueError (context full) or OutOfPagesError before anything changes.
        """
        if count + 1 > self.room:
            raise ValueError(f"expected room for {count + 1} tokens, found {self.room}")
        self._prepare(self.length, self.length + count + 1)

    def _prepare(self, length: int, end: int) -> None:
        """Pages up to position `end` - 1 exist, and those that the next step writes are ours.

        With a draft head the step also writes the head's keys of the last position: they wait for the token that follows it.
        """
        first = max(0, length - 1) if self._pool.options.mtp else length
        if self._pool.allocator.is_writable(self._table, first, end - 1):
            return
        n_pages = len(self._table.pages)
        copies = self._pool.allocator.prepare_write(self._table, first, end - 1)
        for source, target in copies:
            self._pool.copy_page(source, target)
        if copies or len(self._table.pages) != n_pages:
            self._pool.publish_pages(self.slot, self._table.pages)

    def commit(self, tokens: list[int], *, by_chunk: bool) -> None:
        """The step that `begin_write` announced has run."""
        self.tokens.extend(tokens)
        if by_chunk:
            self.chunk_ends.append(self.length)

    def take_back(self, n_tokens: int, n_chunks: int) -> None:
        """Chunks that were committed before their step failed: the sequence is as after any failed step, to be cleared."""
        if n_tokens:
            del self.tokens[-n_tokens:]
            del self.chunk_ends[-n_chunks:]

    def clear(self) -> None:
        """Back to the empty sequence: pages are returned, every part cleared."""
        self._pool.allocator.truncate(self._table, 0)
        self.tokens.clear()
        self.chunk_ends.clear()
        self._oldest = 0
        for part in self.parts.values():
            part.clear()

    def rollback(self, count: int) -> None:
        """Forget the last `count` tokens in every part. Raises RollbackError when the ring no longer holds that state."""
        target = self.length - count
        if count < 0 or target < 0:
            raise RollbackError(f"expected 0 to {self.length} tokens to roll back, found {count}")
        if target < self._oldest and target != 0:
            raise RollbackError(
                f"the state of {self.length} tokens reaches back to {self._oldest} tokens, found {target}; "
                "clear the sequence and prefill it again, or start with a larger max_rollback"
            )
        if count == 0:
            return
        del self.tokens[target:]
        self.chunk_ends = [end for end in self.chunk_ends if end <= target]
        self._pool.allocator.truncate(self._table, target)
        if target == 0:
            self._oldest = 0
        for part in self.parts.values():
            part.rollback(target)

    def snapshot(self, logits: npt.NDArray[np.float32] | None = None) -> Snapshot:
        """Everything a sequence needs to go on from here: pages shared, recurrent state copied. Attached parts stay out.

        `logits` [n_vocab]: the row that follows the last token, so that a prompt that ends here needs no step at all.
        Raises ValueError after decoded rows: a cold run would have those tokens from a chunk, which is other arithmetic.
        """
        if self.chunk_ends[-1:] != [self.length]:
            raise ValueError(
                f"expected a chunk to end at {self.length} tokens, found the last end in {self.chunk_ends[-1:]}"
            )
        pool = self._pool
        for page in self._table.pages:
            pool.allocator.share(page)
        recurrent = pool.capture(self.slot, self.length)
        cuts = tuple(self.chunk_ends[:-1])
        return Snapshot(pool.allocator, tuple(self.tokens), cuts, list(self._table.pages), recurrent, logits)

    def restore(self, snapshot: Snapshot) -> None:
        """Become what the snapshot holds, bit for bit what a cold run has there; the sequence must be empty."""
        if self.length:
            raise ValueError(f"expected an empty sequence to restore into, found {self.length} tokens")
        if len(snapshot.tokens) > self._pool.options.n_ctx:
            raise ValueError(
                f"the context holds {self._pool.options.n_ctx} tokens, the snapshot has {len(snapshot.tokens)}"
            )
        self._pool.install(self.slot, len(snapshot.tokens), snapshot.recurrent)
        for page in snapshot.pages:
            self._pool.allocator.share(page)
        self._table.pages = list(snapshot.pages)
        self._pool.publish_pages(self.slot, self._table.pages)
        self.tokens = list(snapshot.tokens)
        self.chunk_ends = [*snapshot.cuts, self.length]
        self._oldest = self.length

    def copy(self) -> SequenceState:
        """A new sequence in another slot with the same state; pages are shared until one of the two writes into them."""
        pool = self._pool
        other = SequenceState(pool, pool.take_slot())
        pool.copy_slot(self.slot, other.slot)
        for page in self._table.pages:
            pool.allocator.share(page)
        other._table.pages = list(self._table.pages)
        pool.publish_pages(other.slot, other._table.pages)
        other._oldest = self._oldest
        other.tokens = list(self.tokens)
        other.chunk_ends = list(self.chunk_ends)
        other.parts = {name: part.copy() for name, part in self.parts.items()}
        return other

    def free(self) -> None:
        """Return slot and pages, close the attached parts. Idempotent."""
        if self._slot is None:
            return
        self._pool.allocator.truncate(self._table, 0)
        self._pool.give_slot(self._slot)
        self._slot = None
        self.tokens.clear()
        self.chunk_ends.clear()
        for part in self.parts.values():
            part.close()
        self.parts.clear()
