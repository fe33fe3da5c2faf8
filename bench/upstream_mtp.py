"""Upstream's own speculation with a draft head: libllama's MTP context, driven as upstream's programs drive it, for one sequence.

libllama has the graphs and the memory; the driver is in its programs (common/speculative.cpp, tools/server/server-context.cpp). The
same calls in the same order are made here. A step of n drafts:

1. n decodes of one row in the head's context: the last token beside the trunk's hidden row, then each draft beside the head's own. The
   ten best tokens are found on the device, as the programs have it by default, and the best of them is the draft;
2. `llama_memory_seq_rm` there: what drafting left goes again;
3. one decode of n + 1 rows in the trunk's context with an output for each, which then is waited for;
4. one decode of the same rows in the head's context, each beside the trunk's hidden row before it, without outputs;
5. `llama_memory_seq_rm` in both for the drafts that were not accepted. The trunk's context keeps a snapshot of its recurrent states for
   each draft (`n_rs_seq`), so that nothing is computed twice.

Hidden rows go through the host, as they do there. The trunk's tokens are chosen on the device: the programs do so if they are asked to
(`--backend-sampling`), and otherwise fetch the logits and run their samplers over them; so does `Setting.on_host`, with an argmax.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.drafts import Accept
from pyluce.native import llama, log
from pyluce.native.errors import NativeError
from pyluce.native.library import load_libraries
from pyluce.native.llama_structs import FlashAttnType, LazyMode, llama_batch

MTP_CONTEXT = 1
NO_SPLIT = 0
ALL_LAYERS = 999
N_CANDIDATES = 10

_pointer, _integer, _count, _boolean = ctypes.c_void_p, ctypes.c_int32, ctypes.c_uint32, ctypes.c_bool
_SIGNATURES: dict[str, tuple[str, Any, list[Any]]] = {
    "decode": ("llama_decode", _integer, [_pointer, llama_batch]),
    "synchronize": ("llama_synchronize", None, [_pointer]),
    "remove": ("llama_memory_seq_rm", _boolean, [_pointer, _integer, _integer, _integer]),
    "logits": ("llama_get_logits_ith", _pointer, [_pointer, _integer]),
    "set_sampler": ("llama_set_sampler", _boolean, [_pointer, _integer, _pointer]),
    "chosen": ("llama_get_sampled_token_ith", _integer, [_pointer, _integer]),
    "candidates": ("llama_get_sampled_candidates_ith", _pointer, [_pointer, _integer]),
    "candidate_logits": ("llama_get_sampled_logits_ith", _pointer, [_pointer, _integer]),
    "n_candidates": ("llama_get_sampled_logits_count_ith", _count, [_pointer, _integer]),
    "keep_hidden": ("_Z26llama_set_embeddings_nextnP13llama_contextbb", None, [_pointer, _boolean, _boolean]),
    "hidden": ("_Z26llama_get_embeddings_nextnP13llama_context", _pointer, [_pointer]),
    "hidden_width": ("llama_model_n_embd_out", _integer, [_pointer]),
    "n_snapshots": ("llama_n_rs_seq", _count, [_pointer]),
}
"""Two are of src/llama-ext.h, so their names are C++'s."""


class Calls:
    """The functions of `_SIGNATURES`. `seconds` were spent in them; the rest of a step's time is this driver's own."""

    def __init__(self) -> None:
        self.seconds = 0.0
        library = load_libraries().handles["llama"]
        for name, (symbol, result, arguments) in _SIGNATURES.items():
            function = getattr(library, symbol)
            function.restype, function.argtypes = result, arguments
            setattr(self, name, self._timed(function))

    def _timed(self, function: Any) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            begun = time.perf_counter()
            found = function(*arguments)
            self.seconds += time.perf_counter() - begun
            return found

        return call


def checked(pointer: int | None, what: str) -> int:
    """The pointer; NativeError with the log if it is NULL."""
    if not pointer:
        raise NativeError(f"{what} returned NULL", log.take())
    return pointer


class Model:
    """A model wholly on one device: a GPU, or the CPU (`gpu` None). `head`: the file is one that `bench.head_file` wrote."""

    def __init__(self, path: Path, gpu: int | None, *, head: bool = False) -> None:
        self.call = Calls()
        params = llama.llama_model_default_params()
        params.load_mtp = head
        params.lazy_mode = LazyMode.AUTO
        params.n_gpu_layers = 0 if gpu is None else ALL_LAYERS
        params.split_mode = NO_SPLIT
        params.main_gpu = gpu or 0
        self.ptr = checked(llama.llama_model_load_from_file(str(path).encode(), params), f"loading {path}")
        self.n_vocab = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self.ptr))
        self.hidden_width = int(self.call.hidden_width(self.ptr))

    def close(self) -> None:
        """Free it; its contexts first."""
        llama.llama_model_free(self.ptr)


@dataclass(frozen=True)
class Setting:
    """n_ctx: tokens of the sequence; chunk: rows of a full prefill graph (n_batch and n_ubatch); on_host: choose the trunk's tokens there."""

    n_ctx: int
    chunk: int
    on_host: bool = False


class Context:
    """The trunk's context for `width` rows a step, or (`head`) the draft head's. Rows lie in arrays that every decode fills anew."""

    def __init__(self, model: Model, setting: Setting, width: int, *, head: bool = False) -> None:
        self.call, self._n_vocab = model.call, model.n_vocab
        params = llama.llama_context_default_params()
        params.n_ctx = setting.n_ctx
        params.n_batch = params.n_ubatch = n = min(setting.chunk, setting.n_ctx)
        params.n_seq_max = 1
        params.n_outputs_max = params.n_outputs_max_per_seq = 1 if head else width
        params.n_rs_seq = 0 if head else width - 1
        params.n_threads = params.n_threads_batch = 1
        params.flash_attn_type = FlashAttnType.ENABLED
        params.no_perf = True
        if head:
            params.ctx_type = MTP_CONTEXT
        self.ptr = checked(llama.llama_init_from_model(model.ptr, params), "llama_init_from_model")
        found = self.call.n_snapshots(self.ptr)
        if found != params.n_rs_seq:
            raise ValueError(f"expected {params.n_rs_seq} snapshots for rollback, found {found}")
        self._memory = checked(llama.llama_get_memory(self.ptr), "llama_get_memory")
        self._chain = self._add_sampler(head) if head or not setting.on_host else 0
        self.rows = np.zeros((n, model.hidden_width), np.float32) if head else None
        self._batch = self._new_batch(n)

    def _new_batch(self, n: int) -> llama_batch:
        self._tokens, self._positions = np.zeros((2, n), np.int32)
        self._outputs = np.zeros(n, np.int8)
        self._sequence = ctypes.c_int32(0)
        self._one_sequence = np.ones(n, np.int32), np.full(n, ctypes.addressof(self._sequence), np.uint64)
        arrays = {"token": self._tokens, "pos": self._positions, "logits": self._outputs}
        arrays |= dict(zip(("n_seq_id", "seq_id"), self._one_sequence, strict=True))
        if self.rows is not None:
            arrays["embd"] = self.rows
        batch, types = llama_batch(), dict(llama_batch._fields_)
        for name, array in arrays.items():
            setattr(batch, name, ctypes.cast(array.ctypes.data, types[name]))
        return batch

    def _add_sampler(self, head: bool) -> int:
        """Choose tokens on the device; 0 where libllama cannot, and then it is done on the host, as upstream's programs do."""
        chain = llama.llama_sampler_chain_init(llama.llama_sampler_chain_default_params())
        step = llama.llama_sampler_init_top_k(N_CANDIDATES) if head else llama.llama_sampler_init_greedy()
        chain = checked(chain, "llama_sampler_chain_init")
        llama.llama_sampler_chain_add(chain, checked(step, "the sampler"))
        if self.call.set_sampler(self.ptr, 0, chain):
            return chain
        llama.llama_sampler_free(chain)
        return 0

    @property
    def on_device(self) -> bool:
        """Whether tokens are chosen there."""
        return bool(self._chain)

    def decode(self, tokens: Sequence[int], position: int, n_outputs: int) -> None:
        """Queue rows from `position` on, the last `n_outputs` of them with an output; `rows` holds the head's hidden rows."""
        n = len(tokens)
        self._tokens[:n] = tokens
        self._positions[:n] = range(position, position + n)
        self._outputs[: n - n_outputs] = 0
        self._outputs[n - n_outputs : n] = 1
        self._batch.n_tokens = n
        status = self.call.decode(self.ptr, self._batch)
        if status:
            raise NativeError(f"llama_decode of {n} rows at {position} failed ({status})", log.take())

    def best(self, first: int, n: int) -> list[int]:
        """The best tokens of `n` rows of the last decode from row `first` on, all of which have an output; waits for them."""
        rows = range(first, first + n)
        if not self.on_device:
            return [int(self._logits(row).argmax()) for row in rows]
        if self.rows is not None:
            return [self._best_candidate(row) for row in rows]
        return [self.call.chosen(self.ptr, row) for row in rows]

    def _logits(self, row: int) -> Any:
        address = checked(self.call.logits(self.ptr, row), "llama_get_logits_ith")
        return np.frombuffer((ctypes.c_float * self._n_vocab).from_address(address), np.float32)

    def _best_candidate(self, row: int) -> int:
        n = self.call.n_candidates(self.ptr, row)
        ids = checked(self.call.candidates(self.ptr, row), "llama_get_sampled_candidates_ith")
        logits = checked(self.call.candidate_logits(self.ptr, row), "llama_get_sampled_logits_ith")
        values = (ctypes.c_float * n).from_address(logits)[:]
        return int((ctypes.c_int32 * n).from_address(ids)[values.index(max(values))])

    def hidden(self) -> int:
        """Address of the last decode's hidden rows; waits for them."""
        return checked(self.call.hidden(self.ptr), "llama_get_embeddings_nextn")

    def remove_from(self, position: int) -> None:
        """Forget that position and all after it."""
        if not self.call.remove(self._memory, 0, position, -1):
            raise NativeError(f"llama_memory_seq_rm from {position} on was refused", log.take())

    def save(self) -> Any:
        """The sequence's state."""
        state = ctypes.create_string_buffer(llama.llama_state_seq_get_size(self.ptr, 0))
        if llama.llama_state_seq_get_data(self.ptr, state, len(state), 0) != len(state):
            raise NativeError("llama_state_seq_get_data failed", log.take())
        return state

    def clear(self) -> None:
        """Forget the sequence."""
        llama.llama_memory_clear(self._memory, False)

    def restore(self, state: Any) -> None:
        """Put the sequence back to where it was saved."""
        self.clear()
        if llama.llama_state_seq_set_data(self.ptr, state, len(state), 0) != len(state):
            raise NativeError("llama_state_seq_set_data refused its state", log.take())

    def close(self) -> None:
        """Free it."""
        if self._chain:
            self.call.set_sampler(self.ptr, 0, None)
            llama.llama_sampler_free(self._chain)
        llama.llama_free(self.ptr)


class Speculation:
    """One sequence that decodes `width` rows a step: the last token and `width` - 1 drafts of `head`. Width 1 takes no head."""

    def __init__(self, trunk: Model, head: Model | None, setting: Setting, width: int) -> None:
        if (width > 1) != (head is not None):
            raise ValueError(f"expected a head where there are drafts, and none at width 1; found width {width}")
        self.width, self._chunk = width, min(setting.chunk, setting.n_ctx)
        self.length = self.tokens = self.steps = 0
        self._trunk = Context(trunk, setting, width)
        self._head: Context | None = None
        if head is not None:
            self._head = Context(head, setting, width, head=True)
            trunk.call.keep_hidden(self._trunk.ptr, True, False)
            head.call.keep_hidden(self._head.ptr, True, True)
        n_rows = max(width, self._chunk) if head is not None else 0
        self._verified = np.zeros((n_rows, trunk.hidden_width), np.float32)
        self._pending = np.zeros(trunk.hidden_width, np.float32)

    @property
    def libllama_seconds(self) -> float:
        """Spent in libllama so far, waiting for the device included."""
        return sum(context.call.seconds for context in self._contexts())

    @property
    def on_device(self) -> list[bool]:
        """Whether the trunk's tokens, and the drafts, are chosen on the device."""
        return [context.on_device for context in self._contexts()]

    def prefill(self, tokens: Sequence[int]) -> int:
        """Append a prompt to the empty sequence; the token after it."""
        if self.length:
            raise ValueError(f"expected an empty sequence, found {self.length} tokens")
        part: Sequence[int] = ()
        for first in range(0, len(tokens), self._chunk):
            part = tokens[first : first + self._chunk]
            self._trunk.decode(part, first, int(first + len(part) == len(tokens)))
            self._catch_up(part)
            self.length += len(part)
        return self._trunk.best(len(part) - 1, 1)[0]

    def step(self, token: int, accept: Accept) -> int:
        """Decode `token` and drafts after it; the token that follows those that `accept` finds right."""
        rows = [token, *self._draft(token)]
        self._trunk.decode(rows, self.length, len(rows))
        self._trunk.call.synchronize(self._trunk.ptr)
        self._catch_up(rows)
        right, following = accept(rows[1:], self._trunk.best(0, len(rows)))
        self._accept(right)
        self.length += right + 1
        for context in self._contexts():
            context.remove_from(self.length)
        self.steps += 1
        self.tokens += right + 1
        return following

    def _accept(self, right: int) -> None:
        """The next draft starts beside the hidden row of the last token that was right."""
        if self._head is not None:
            self._pending[:] = self._verified[right]

    def _draft(self, token: int) -> list[int]:
        drafts: list[int] = []
        if self._head is None or self._head.rows is None:
            return drafts
        source = self._pending.ctypes.data
        for depth in range(self.width - 1):
            ctypes.memmove(self._head.rows.ctypes.data, source, self._pending.nbytes)
            self._head.decode([token], self.length + depth, 1)
            token = self._head.best(0, 1)[0]
            source = self._head.hidden()
            drafts.append(token)
        self._head.remove_from(self.length)
        return drafts

    def _catch_up(self, tokens: Sequence[int]) -> None:
        """The head reads what the trunk has read, each token beside the hidden row before it."""
        if self._head is None or self._head.rows is None:
            return
        hidden, rows, size = self._trunk.hidden(), self._head.rows.ctypes.data, self._pending.nbytes
        ctypes.memmove(rows, self._pending.ctypes.data, size)
        ctypes.memmove(rows + size, hidden, (len(tokens) - 1) * size)
        self._head.decode(tokens, self.length, 0)
        ctypes.memmove(self._verified.ctypes.data, hidden, len(tokens) * size)
        self._pending[:] = self._verified[len(tokens) - 1]

    def _contexts(self) -> Iterator[Context]:
        yield self._trunk
        if self._head is not None:
            yield self._head

    def save(self) -> tuple[int, Any, list[Any]]:
        """The sequence as it is, for `restore`."""
        return self.length, self._pending.copy(), [context.save() for context in self._contexts()]

    def restore(self, saved: tuple[int, Any, list[Any]]) -> None:
        """Put the sequence back to where it was saved."""
        self.length, self._pending[:], states = saved
        for context, state in zip(self._contexts(), states, strict=True):
            context.restore(state)

    def clear(self) -> None:
        """Forget the sequence."""
        self.length = 0
        self._pending[:] = 0
        for context in self._contexts():
            context.clear()

    def wait(self) -> None:
        """Until the device is done."""
        for context in self._contexts():
            context.call.synchronize(context.ptr)

    def close(self) -> None:
        """Free the contexts."""
        for context in self._contexts():
            context.close()
