"""Whole-model inference through libllama: an oracle for tests and measurements. pyluce computes its own graphs."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from pyluce.native import callbacks, llama, log
from pyluce.native.errors import NativeError
from pyluce.native.library import load_libraries
from pyluce.native.llama_structs import PROGRESS_CALLBACK, FlashAttnType, LazyMode, llama_batch
from pyluce.native.owner import Owner
from pyluce.native.structs import ABORT_CALLBACK, GGMLType
from pyluce.native.thread import owned_by_thread

_DECODE_STATUS = {1: "no room in the context", 2: "aborted", -1: "invalid batch"}


class LlamaModel(Owner):
    """A model with its weights, on the CPU or the last ``n_gpu_layers`` layers (the output counts) on a GPU.

    ``progress(fraction)`` is called while it loads; False stops the load.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        repack: bool = True,
        n_gpu_layers: int = 0,
        progress: Callable[[float], bool] | None = None,
    ) -> None:
        super().__init__()
        load_libraries()
        self.path = os.fspath(path)
        if not os.path.isfile(self.path):
            raise FileNotFoundError(f"expected a model file, found nothing at {self.path}")
        params = llama.llama_model_default_params()
        params.n_gpu_layers = n_gpu_layers
        params.use_extra_bufts = repack
        params.lazy_mode = LazyMode.AUTO
        callback: Any = None
        if progress is not None:
            ask = progress
            callback = callbacks.guarded(
                PROGRESS_CALLBACK, lambda fraction, _data: bool(ask(fraction)), default=False, what="progress"
            )
            params.progress_callback = ctypes.cast(callback, ctypes.c_void_p)
        pointer = llama.llama_model_load_from_file(os.fsencode(self.path), params)
        failure = f"libllama cannot load the model {self.path}"
        address = self._own("llama_model_load_from_file", pointer, llama.llama_model_free, failure=failure)
        self.n_vocab = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(address))


class LlamaContext(Owner):
    """libllama computing a model: logits of token runs, one or more sequences.

    ``model`` is a path (the model is then closed with the context) or an open LlamaModel. ``n_ctx`` is the number of
    positions; ``n_ubatch`` how many tokens a graph takes; ``kv_type`` the K/V cache's type.
    """

    def __init__(
        self,
        model: LlamaModel | str | os.PathLike[str],
        *,
        n_ctx: int = 512,
        n_batch: int = 512,
        n_ubatch: int = 512,
        n_seq_max: int = 1,
        n_threads: int = 1,
        kv_type: GGMLType = GGMLType.F16,
        flash_attention: bool = False,
        kv_unified: bool = False,
        repack: bool = True,
    ) -> None:
        super().__init__()
        owns_model = not isinstance(model, LlamaModel)
        self.model = model if isinstance(model, LlamaModel) else LlamaModel(model, repack=repack)
        self._owns_model = owns_model
        try:
            params = llama.llama_context_default_params()
            params.n_ctx = n_ctx
            params.n_batch = n_batch
            params.n_ubatch = min(n_ubatch, n_batch)
            params.n_seq_max = n_seq_max
            params.n_threads = params.n_threads_batch = n_threads
            params.type_k = params.type_v = kv_type
            params.flash_attn_type = FlashAttnType.ENABLED if flash_attention else FlashAttnType.DISABLED
            params.kv_unified = kv_unified
            params.no_perf = True
            pointer = llama.llama_init_from_model(self.model.ptr, params)
            self._own("llama_init_from_model", pointer, llama.llama_free, parent=self.model)
            self.n_vocab = self.model.n_vocab
            self.n_batch = llama.llama_n_batch(self.ptr)
            self.n_ctx = llama.llama_n_ctx(self.ptr)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Free the context, and the model when this object loaded it."""
        super().close()
        if self._owns_model:
            self.model.close()

    @owned_by_thread
    def decode(
        self, tokens: Sequence[int], *, sequence: int = 0, want: Literal["last", "all", "none"] = "last"
    ) -> NDArray[np.float32] | None:
        """Append tokens to a sequence; return logits float32 [n_vocab] ("last"), [T, n_vocab] ("all") or None.

        The arrays are copies. Raises NativeError with the status when libllama refuses; the sequence is then undefined
        and must be cleared.
        """
        if not tokens:
            raise ValueError("expected at least one token, found none")
        for token in tokens:
            if not 0 <= token < self.n_vocab:
                raise ValueError(f"expected token ids from 0 to {self.n_vocab - 1}, found {token}")
        rows: list[NDArray[np.float32]] = []
        for start in range(0, len(tokens), self.n_batch):
            part = tokens[start : start + self.n_batch]
            is_last = start + len(part) == len(tokens)
            marks = [want == "all" or (want == "last" and is_last and i == len(part) - 1) for i in range(len(part))]
            self._decode_batch(part, sequence, marks)
            rows += [self._logits(i) for i, marked in enumerate(marks) if marked]
        if want == "none":
            return None
        return rows[0] if want == "last" else np.stack(rows)

    def length(self, sequence: int = 0) -> int:
        """How many positions a sequence has."""
        return llama.llama_memory_seq_pos_max(self._memory(), sequence) + 1

    def clear(self) -> None:
        """Forget every sequence, data included."""
        llama.llama_memory_clear(self._memory(), True)

    def remove(self, sequence: int, start: int, end: int = -1) -> None:
        """Forget positions ``start`` to ``end`` (exclusive; -1 is the end). Raises NativeError when the model's memory
        cannot do that (recurrent state cannot be cut anywhere); nothing has changed then."""
        if not llama.llama_memory_seq_rm(self._memory(), sequence, start, end):
            raise NativeError(
                f"the memory cannot remove positions {start} to {end} of sequence {sequence}; "
                "clear it and decode again",
                log.take(),
            )

    def get_state(self) -> bytes:
        """Everything that the context holds, as bytes for ``set_state``."""
        size = llama.llama_state_get_size(self.ptr)
        buffer = ctypes.create_string_buffer(size)
        written = llama.llama_state_get_data(self.ptr, buffer, size)
        if not written:
            raise NativeError("llama_state_get_data failed", log.take())
        return buffer.raw[:written]

    def set_state(self, state: bytes) -> None:
        """Restore what ``get_state`` returned. Raises NativeError when it is refused."""
        if llama.llama_state_set_data(self.ptr, state, len(state)) != len(state):
            raise NativeError(f"llama_state_set_data refused a state of {len(state)} bytes", log.take())

    def set_abort(self, should_abort: Callable[[], bool] | None) -> None:
        """Ask ``should_abort()`` between ops; when it returns True, or raises, ``decode`` raises NativeError."""
        pointer = self.ptr
        callback: Any = None
        if should_abort is not None:
            callback = callbacks.guarded(ABORT_CALLBACK, lambda _data: bool(should_abort()), default=True, what="abort")
        llama.llama_set_abort_callback(pointer, callback, None)
        self._keep_alive(callback)

    def _memory(self) -> int:
        memory = llama.llama_get_memory(self.ptr)
        if not memory:
            raise NativeError("the context has no memory", log.take())
        return memory

    def _decode_batch(self, tokens: Sequence[int], sequence: int, marks: list[bool]) -> None:
        n = len(tokens)
        start = self.length(sequence)
        sequence_id = ctypes.c_int32(sequence)
        batch = llama_batch(
            n,
            (ctypes.c_int32 * n)(*tokens),
            None,
            (ctypes.c_int32 * n)(*range(start, start + n)),
            (ctypes.c_int32 * n)(*([1] * n)),
            (ctypes.POINTER(ctypes.c_int32) * n)(*([ctypes.pointer(sequence_id)] * n)),
            (ctypes.c_int8 * n)(*marks),
        )
        status = llama.llama_decode(self.ptr, batch)
        callbacks.raise_pending()
        if status:
            reason = _DECODE_STATUS.get(status, "failed")
            raise NativeError(f"llama_decode of {n} tokens at position {start}: {reason} ({status})", log.take())

    def _logits(self, index: int) -> NDArray[np.float32]:
        address = llama.llama_get_logits_ith(self.ptr, index)
        if not address:
            raise NativeError(f"llama_get_logits_ith({index}) returned NULL", log.take())
        row = (ctypes.c_float * self.n_vocab).from_address(address)
        return np.array(row, dtype=np.float32)
