"""Prompts that will be wanted later, computed while nobody waits: the reply just given, as the next turn will send it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from pyluce.engine.generate import Resources, chunk_bounds
from pyluce.engine.protocols import PrefixStore, SequenceLike

S = TypeVar("S", bound=SequenceLike)

MAX_WAITING: Final = 16


@dataclass(frozen=True, slots=True)
class IdlePrompt:
    """Tokens to prefill, cut where the request that is expected will cut them."""

    tokens: tuple[int, ...]
    cuts: tuple[int, ...] = ()


class IdlePrefill(Generic[S]):
    """Prefills one prompt at a time, a chunk a step, and offers what it computed to the store.

    `pause` gives the slot back at once; the prompt is begun again later, from what the store kept meanwhile. The newest prompts
    come first; beyond `MAX_WAITING` the oldest are forgotten.
    """

    def __init__(self, resources: Resources[S], store: PrefixStore[S]) -> None:
        self._resources = resources
        self._store = store
        self._waiting: deque[IdlePrompt] = deque(maxlen=MAX_WAITING)
        self._current: tuple[IdlePrompt, S, list[tuple[int, int]]] | None = None
        self.tokens = 0
        self.failures = 0

    @property
    def busy(self) -> bool:
        """There is something to compute."""
        return self._current is not None or bool(self._waiting)

    @property
    def holds_slot(self) -> bool:
        """A sequence is in the works."""
        return self._current is not None

    def add(self, prompt: IdlePrompt) -> None:
        """Compute this when there is time. A prompt that cannot be is left out."""
        if 0 < len(prompt.tokens) <= self._resources.n_ctx:
            self._waiting.append(prompt)

    def step(self) -> None:
        """Compute one chunk."""
        if self._current is None and not self._begin():
            return
        assert self._current is not None
        prompt, state, chunks = self._current
        begin, end = chunks.pop(0)
        try:
            self._resources.runner.prefill(state, prompt.tokens[begin:end], want="none")
            self.tokens += end - begin
            if end in prompt.cuts or end == len(prompt.tokens):
                self._store.offer(state)
        except Exception:
            self.failures += 1
            self._release()
            return
        if not chunks:
            self._release()

    def pause(self) -> None:
        """Give the slot back."""
        if self._current is not None:
            self._waiting.append(self._current[0])
            self._release()

    def move(self, resources: Resources[S], store: PrefixStore[S]) -> None:
        """Go on with another runner and store; to be called while paused."""
        self._resources = resources
        self._store = store

    def close(self) -> None:
        """Forget everything."""
        self._release()
        self._waiting.clear()

    def _begin(self) -> bool:
        while self._waiting:
            prompt = self._waiting.pop()
            state = self._resources.runner.new_sequence()
            chunks = chunk_bounds(len(prompt.tokens), self._resources.chunk_tokens, prompt.cuts)
            try:
                done = self._store.start(state, prompt.tokens, {end for _, end in chunks}).length
            except Exception:
                self.failures += 1
                state.free()
                continue
            self._current = (prompt, state, [chunk for chunk in chunks if chunk[0] >= done])
            if self._current[2]:
                return True
            self._release()
        return False

    def _release(self) -> None:
        if self._current is not None:
            _, state, _ = self._current
            self._current = None
            self._store.end(state)
            state.free()
