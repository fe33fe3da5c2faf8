"""Our runner and upstream's libllama behind one interface, so that the same code times both on a GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from pyluce.graph import RunnerOptions, TrunkRunner
from pyluce.native import llama
from pyluce.native.inference import LlamaContext, LlamaModel
from pyluce.native.llama_structs import llama_batch
from pyluce.state import SequenceState

ALL_LAYERS = 999


class Engine(Protocol):
    """Sequences by number. Every call returns when the device is done."""

    n_vocab: int

    def fill(self, sequence: int, tokens: Sequence[int]) -> None:
        """Prefill tokens; the logits of the last are computed."""

    def step(self, rows: Sequence[tuple[int, int]]) -> None:
        """One decode step: a token for each (sequence, token), with logits on the host."""

    def save(self, sequence: int) -> None:
        """Keep the sequence's state."""

    def restore(self, sequence: int) -> None:
        """Put the sequence back to where it was saved."""

    def clear(self) -> None:
        """Forget every sequence and what was saved."""

    def close(self) -> None:
        """Free everything."""


class OurEngine:
    """`TrunkRunner`. A saved sequence shares its pages with its copy, so that saving costs a slot."""

    def __init__(self, model: Path, device: str, n_ctx: int, n_sequences: int, chunk: int) -> None:
        options = RunnerOptions(n_ctx=n_ctx, n_slots=n_sequences + 1, chunk_tokens=chunk, max_rollback=0, device=device)
        self._runner = TrunkRunner(model, options)
        self.n_vocab = self._runner.vocab_size
        self._states: dict[int, SequenceState] = {}
        self._saved: SequenceState | None = None

    def _state(self, sequence: int) -> SequenceState:
        if sequence not in self._states:
            self._states[sequence] = self._runner.new_sequence()
        return self._states[sequence]

    def fill(self, sequence: int, tokens: Sequence[int]) -> None:
        self._runner.prefill(self._state(sequence), list(tokens), want="last")

    def step(self, rows: Sequence[tuple[int, int]]) -> None:
        self._runner.decode([(self._state(sequence), token) for sequence, token in rows])

    def step_greedy(self, rows: Sequence[tuple[int, int]]) -> None:
        """As `step`, with only the best token of each row on the host."""
        self._runner.decode_rows([(self._state(sequence), token) for sequence, token in rows], [False] * len(rows))

    def save(self, sequence: int) -> None:
        if self._saved is not None:
            self._saved.free()
        self._saved = self._state(sequence).copy()

    def restore(self, sequence: int) -> None:
        if self._saved is None:
            raise ValueError("expected a saved sequence, found none")
        self._states.pop(sequence).free()
        self._states[sequence] = self._saved.copy()

    def clear(self) -> None:
        for state in self._states.values():
            state.free()
        self._states.clear()
        if self._saved is not None:
            self._saved.free()
            self._saved = None

    def memory(self) -> dict[str, object]:
        """The runner's report."""
        return self._runner.memory_report()

    def close(self) -> None:
        self.clear()
        self._runner.close()


class UpstreamEngine:
    """libllama with every layer on the GPU and flash attention: what llama-bench and llama-batched-bench time.

    `n_ctx` tokens a sequence; the context's cache is one stream a sequence, as in llama-batched-bench.
    """

    def __init__(self, model: LlamaModel, n_ctx: int, n_sequences: int, ubatch: int) -> None:
        self._context = LlamaContext(
            model,
            n_ctx=n_ctx * n_sequences,
            n_batch=max(ubatch, 2048),
            n_ubatch=ubatch,
            n_seq_max=n_sequences,
            flash_attention=True,
        )
        self.n_vocab = model.n_vocab
        self._lengths: dict[int, int] = {}
        self._saved: bytes | None = None
        self._saved_length = 0

    def fill(self, sequence: int, tokens: Sequence[int]) -> None:
        size = self._context.n_batch
        for first in range(0, len(tokens), size):
            part = tokens[first : first + size]
            last = first + len(part) == len(tokens)
            self._decode([(sequence, token) for token in part], only_last=True, logits=last)

    def step(self, rows: Sequence[tuple[int, int]]) -> None:
        self._decode(rows, only_last=False, logits=True)

    def _decode(self, rows: Sequence[tuple[int, int]], *, only_last: bool, logits: bool) -> None:
        n = len(rows)
        positions = []
        for sequence, _ in rows:
            positions.append(self._lengths.get(sequence, 0))
            self._lengths[sequence] = positions[-1] + 1
        ids = [ctypes.c_int32(sequence) for sequence, _ in rows]
        marks = [logits and (not only_last or i == n - 1) for i in range(n)]
        batch = llama_batch(
            n,
            (ctypes.c_int32 * n)(*(token for _, token in rows)),
            None,
            (ctypes.c_int32 * n)(*positions),
            (ctypes.c_int32 * n)(*([1] * n)),
            (ctypes.POINTER(ctypes.c_int32) * n)(*(ctypes.pointer(i) for i in ids)),
            (ctypes.c_int8 * n)(*marks),
        )
        status = llama.llama_decode(self._context.ptr, batch)
        if status:
            raise RuntimeError(f"llama_decode of {n} tokens at {positions[0]} failed ({status})")
        llama.llama_synchronize(self._context.ptr)

    def save(self, sequence: int) -> None:
        self._saved, self._saved_length = self._context.get_state(), self._lengths[sequence]

    def restore(self, sequence: int) -> None:
        if self._saved is None:
            raise ValueError("expected a saved sequence, found none")
        self._context.set_state(self._saved)
        self._lengths[sequence] = self._saved_length

    def clear(self) -> None:
        self._context.clear()
        self._lengths.clear()
        self._saved = None

    def memory(self) -> dict[str, object]:
        """Nothing: libllama has no report."""
        return {}

    def close(self) -> None:
        self._context.close()


def open_engine(side: str, model: Path, device: str, n_ctx: int, n_sequences: int, chunk: int) -> Any:
    """`side` "ours" or "upstream"; `chunk`: rows of a full prefill graph (upstream's ubatch)."""
    if side == "ours":
        return OurEngine(model, device, n_ctx, n_sequences, chunk)
    return UpstreamEngine(upstream_model(model), n_ctx, n_sequences, chunk)


_models: dict[Path, LlamaModel] = {}


def upstream_model(path: Path) -> LlamaModel:
    """The model for libllama, loaded once a process."""
    if path not in _models:
        _models[path] = LlamaModel(path, n_gpu_layers=ALL_LAYERS)
    return _models[path]
