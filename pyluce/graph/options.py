"""What a runner is asked for, checked before anything is loaded."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from pyluce.native.devices import parse_device
from pyluce.placement.hot import HotSet
from pyluce.state.layout import KV_TYPES, StateOptions
from pyluce.state.store import cache_pages
from pyluce.weights.draft_vocabulary import DRAFT_VOCAB

if TYPE_CHECKING:
    from pyluce.weights import HParams

MAX_SLOTS: Final = 64
MAX_CTX: Final = 1 << 24
MAX_ROLLBACK: Final = 64
CHUNK_UNIT: Final = 16
MAX_STREAMS: Final = 4

FAULTS: Final = (
    "batch_variant", "cut_variant", "stale_conv", "stale_ple", "stale_ring", "tie_high", "nan_leak", "scan_order",
    "thread_variant", "shared_page", "stale_ngram", "stale_hidden", "stale_mtp", "stream_norm", "hot_slot",
)  # fmt: skip


def default_threads() -> int:
    """Threads when none are asked for: the processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True, slots=True)
class RunnerOptions:
    """Options of a `TrunkRunner`.

    device: "cpu", "cuda:N" or "hip:N"; a GPU takes no `n_threads` beyond 1, and `repack` is the CPU's.
    n_ctx: tokens a sequence may hold. n_slots: sequences at once. kv_type: "f16" or "f32". max_rollback: tokens that
    can be taken back without prefilling again. chunk_tokens: rows of a full prefill chunk, a multiple of 16; chunks are
    cut at its multiples. repack: keep matrices in the CPU's own layout (a copy in memory, faster prefill). debug_fault
    plants a fault that tests must notice; None in every real run.
    mtp: use the model's draft head, or that of the file `draft_path`; its state is part of every sequence's.
    draft_vocab: tokens that it may draft, where the model has at least twice as many; 0: all of them.
    expert_device: where the routed experts of the trunk are, "cpu", "cuda:N", "hip:N" or "rpc:HOST:PORT"; those of `hot_experts`, whose
    picks row graphs compute on `device`, are on both. On devices of one kind no result depends on either.
    prompt_streams: chunks of a prompt that are computed at the same time, so that one device has one's layer while the other has
    another's; each takes graph memory of its own.
    tune: "off", "auto" or a file: see `pyluce.tuning`; a loaded runner's options name the file that is in effect, or "off".
    prefix_cache_bytes: what kept prompts may take, half of it pages that are allocated at once; 0 keeps nothing.
    """

    n_ctx: int = 4096
    n_slots: int = 1
    n_threads: int = 1
    kv_type: str = "f16"
    max_rollback: int = 8
    chunk_tokens: int = 512
    repack: bool = True
    prefix_cache_bytes: int = 0
    debug_fault: str | None = None
    device: str = "cpu"
    mtp: bool = False
    draft_path: str | None = None
    draft_vocab: int = DRAFT_VOCAB
    expert_device: str | None = None
    hot_experts: HotSet | None = None
    prompt_streams: int = 1
    tune: str = "off"

    def __post_init__(self) -> None:
        try:
            backend, _ = parse_device(self.device)
        except ValueError as error:
            raise ValueError(f"device: {error}") from None
        if backend == "rpc":
            raise ValueError(
                f"device: expected cpu, cuda:N or hip:N (only an expert_device may be remote), found {self.device!r}"
            )
        self._check_experts(backend)
        if backend != "cpu" and self.n_threads != 1:
            raise ValueError(f"n_threads: expected 1 with the device {self.device}, found {self.n_threads}")
        self._between("n_ctx", self.n_ctx, 1, MAX_CTX - 1)
        self._between("draft_vocab", self.draft_vocab, 0, MAX_CTX)
        self._between("prompt_streams", self.prompt_streams, 1, MAX_STREAMS)
        if self.prompt_streams > 1 and self.expert_device is None:
            raise ValueError(f"prompt_streams: expected 1 without an expert_device, found {self.prompt_streams}")
        self._between("n_slots", self.n_slots, 1, MAX_SLOTS)
        self._between("n_threads", self.n_threads, 1, 512)
        self._between("prefix_cache_bytes", self.prefix_cache_bytes, 0, 1 << 50)
        self._between("max_rollback", self.max_rollback, 0, MAX_ROLLBACK)
        self._between("chunk_tokens", self.chunk_tokens, CHUNK_UNIT, 32768)
        if self.chunk_tokens % CHUNK_UNIT:
            raise ValueError(f"chunk_tokens: expected a multiple of {CHUNK_UNIT}, found {self.chunk_tokens}")
        if self.draft_path is not None and not self.mtp:
            raise ValueError(f"draft_path: expected with mtp only, found {self.draft_path!r}")
        if self.kv_type not in KV_TYPES:
            raise ValueError(f"kv_type: expected one of {', '.join(KV_TYPES)}, found {self.kv_type!r}")
        if self.debug_fault is not None and self.debug_fault not in FAULTS:
            raise ValueError(f"debug_fault: expected one of {', '.join(FAULTS)}, found {self.debug_fault!r}")

    def _check_experts(self, backend: str) -> None:
        """What is asked of the expert device, as far as it shows without asking it."""
        if self.expert_device is None:
            if self.hot_experts is not None:
                raise ValueError("hot_experts: expected with an expert_device only, found none")
            return
        try:
            parse_device(self.expert_device)
        except ValueError as error:
            raise ValueError(f"expert_device: {error}") from None
        if self.expert_device == self.device:
            raise ValueError(f"expert_device: expected another device than {self.device}, found the same")
        if backend == "cpu" and self.repack:
            raise ValueError(
                "repack: expected False with an expert_device: it has experts as they are in the file, and would give other bits"
            )

    def state(self, hparams: HParams) -> StateOptions:
        """What these options ask of the state pool of a model."""
        kept, fault = self.max_rollback + 1, self.debug_fault
        options = StateOptions(
            n_slots=self.n_slots,
            n_ctx=self.n_ctx,
            kv_type=self.kv_type,
            reach=self.max_rollback,
            ring=1 if fault == "stale_ring" else kept,
            conv_margin=1 if fault == "stale_conv" else kept,
            ple_margin=1 if fault == "stale_ple" else kept,
            mtp=self.mtp,
            hidden_ring=1 if fault == "stale_hidden" else kept,
        )
        return replace(options, cache_pages=cache_pages(hparams, options, self.prefix_cache_bytes))

    @staticmethod
    def _between(name: str, value: int, low: int, high: int) -> None:
        if not low <= value <= high:
            raise ValueError(f"{name}: expected {low} to {high}, found {value}")
