"""What a model is loaded with: one frozen value, checked before any work, the same for the library and the command line."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pyluce.placement.options import PlacementOptions
from pyluce.spec.options import check_sources, check_width

DEFAULT_MAX_CTX: Final = 8192
DEFAULT_CACHE_DIR_MIB: Final = 8192
KV_TYPES: Final = ("f16", "f32")
DEVICE_NAME: Final = re.compile(r"cpu|(cuda|hip):[0-9]{1,3}")
MAX_CTX_LIMIT: Final = (1 << 24) - 1
MAX_THREADS: Final = 512
CHUNK_UNIT: Final = 16
MAX_CHUNK: Final = 32768
MAX_CONCURRENCY: Final = 64
MAX_QUEUE: Final = 4096
MAX_STREAMS: Final = 4
DEFAULT_MODEL: Final = Path(__file__).resolve().parent / "data" / "luce-tiny.gguf"


class OptionError(ValueError):
    """An option cannot be used; the message names it."""


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How to load and run a model.

    * max_ctx: tokens that a sequence may hold; None is 8192, or what the model was trained for if that is less.
    * tune: choices between a GPU's kernels: "auto" (what `luce tune` measured for this device, these libraries and this model, if it
      did), "off", or a file that it wrote. Rows computed with different tables may differ in their last bits.
    * device: where the model runs: "cpu", "cuda:N" (NVIDIA) or "hip:N" (AMD), N counting from 0.
    * threads: CPU threads; None is what this process may use (`available_cpus`). None with a GPU.
    * kv_type: "f16" or "f32", the type of attention keys and values.
    * chunk: prompt tokens computed at once, a multiple of 16; 0: as many as memory allows (docs/memory.md).
    * repack: keep matrices a second time in the layout that this CPU multiplies fastest (on a GPU nothing is repacked).
    * spec: where drafts come from, "mtp" (the model's draft head) and "lookup" (the text itself); None: mtp, if the model has a head
      (on a CPU only where its drafts can be expected to pay).
    * verify_width: rows verified at once, the next token and its drafts: 0 adaptive, 1 no drafts at all, 2 to 8 fixed.
    * draft: a file with the draft head, instead of the model's own or of one found beside it.
    * expert_device, expert_placement, expert_budget_mib, expert_swap_mib_s: see `PlacementOptions`.
    * prompt_streams: chunks of a prompt that are computed at the same time on two devices, 1 to 4, each with graph memory of its own;
      0: two on two GPUs, if there is room for them beside kept prompts, else one (docs/memory.md).
    * collect_routing: a file where picks of experts are counted while the model runs.
    * chat_template: a template to use instead of the file's.
    * max_concurrency: requests computed at once, 1 to 64; their state is allocated at the start.
    * max_queue: requests that may wait for a slot; the next one is refused.
    * prefill_share: how much of the time prompts may take while other requests decode, 0 to 1. With 0 they wait until nobody decodes.
    * prefix_cache_mib: memory for the states of prompts, so that prompts that begin alike are computed once, half of it the
      device's; None: room for three full contexts, at most a quarter of the memory that is free; 0 keeps nothing.
    * idle_prefill: while nobody waits, compute what the next turn of a conversation will begin with (needs the prefix cache).
    * cache_dir: a folder where the prefix cache's entries are kept too, so that they survive a restart and a park; one process at a time.
    * cache_dir_mib: size of the files in it at most; None is 8192.
    * park_after: release the model's memory when nothing was to do for so many seconds; None: never by itself.
    * unpark_on_request: a request loads a parked model again, instead of being refused.
    * park_reset: parking destroys this process's context on the GPU too, which otherwise keeps some of its memory. Only where no
      other library of the process uses that GPU: what that has there would be lost.

    Raises OptionError naming the option.
    """

    max_ctx: int | None = None
    threads: int | None = None
    kv_type: str = "f16"
    chunk: int = 512
    repack: bool = True
    chat_template: str | None = None
    max_concurrency: int = 4
    max_queue: int = 256
    prefill_share: float = 0.75  # docs/measurements.md
    prefix_cache_mib: int | None = None
    idle_prefill: bool = True
    cache_dir: Path | None = None
    cache_dir_mib: int | None = None
    park_after: float | None = None
    unpark_on_request: bool = False
    park_reset: bool = False
    device: str = "cpu"
    spec: tuple[str, ...] | None = None
    verify_width: int = 0
    draft: Path | None = None
    tune: str = "auto"
    expert_device: str | None = None
    expert_placement: str | None = None
    expert_budget_mib: int | None = None
    expert_swap_mib_s: float | None = None
    prompt_streams: int = 0
    collect_routing: Path | None = None

    def __post_init__(self) -> None:
        if DEVICE_NAME.fullmatch(self.device) is None:
            raise OptionError(f"device: expected cpu, cuda:N or hip:N, found {self.device!r}")
        if not self.tune:
            raise OptionError("tune: expected auto, off or a file, found an empty text")
        if self.device == "cpu" and self.tune not in ("auto", "off"):
            raise OptionError(f"tune: expected none with the CPU, which has nothing to choose, found {self.tune}")
        if self.device != "cpu" and self.threads is not None:
            raise OptionError(f"threads: expected none with the device {self.device}, found {self.threads}")
        self._check_speculation()
        try:
            _ = self.placement
        except ValueError as error:
            raise OptionError(str(error)) from None
        if self.max_ctx is not None:
            _check_integer("max_ctx", self.max_ctx, 1, MAX_CTX_LIMIT)
        if self.threads is not None:
            _check_integer("threads", self.threads, 1, MAX_THREADS)
        _check_integer("chunk", self.chunk, 0, MAX_CHUNK)
        if self.chunk % CHUNK_UNIT:
            raise OptionError(f"chunk: expected a multiple of {CHUNK_UNIT}, found {self.chunk}")
        if self.kv_type not in KV_TYPES:
            raise OptionError(f"kv_type: expected {' or '.join(KV_TYPES)}, found {self.kv_type!r}")
        _check_integer("max_concurrency", self.max_concurrency, 1, MAX_CONCURRENCY)
        if self.prefix_cache_mib is not None:
            _check_integer("prefix_cache_mib", self.prefix_cache_mib, 0, 1 << 30)
        if self.cache_dir_mib is not None:
            _check_integer("cache_dir_mib", self.cache_dir_mib, 1, 1 << 30)
            if self.cache_dir is None:
                raise OptionError("cache_dir_mib: expected with cache_dir only, found no cache_dir")
        if self.cache_dir is not None and self.prefix_cache_mib == 0:
            raise OptionError("cache_dir: expected a prefix cache, whose entries it keeps, found prefix_cache_mib 0")
        if self.park_after is not None:
            if isinstance(self.park_after, bool) or not 0.0 < self.park_after < float("inf"):
                raise OptionError(f"park_after: expected a positive number of seconds, found {self.park_after}")
            if self.cache_dir is None and self.prefix_cache_mib != 0:
                raise OptionError(
                    "park_after: expected a cache_dir, where the prefix cache is kept meanwhile (or prefix_cache_mib 0), found none"
                )
        if self.park_reset and self.device == "cpu" and self.expert_device is None:
            raise OptionError("park_reset: expected a GPU as device, found cpu")
        _check_integer("max_queue", self.max_queue, 0, MAX_QUEUE)
        _check_integer("prompt_streams", self.prompt_streams, 0, MAX_STREAMS)
        if self.prompt_streams > 1 and self.expert_device is None:
            raise OptionError(f"prompt_streams: expected 1 without an expert_device, found {self.prompt_streams}")
        if isinstance(self.prefill_share, bool) or not isinstance(self.prefill_share, (int, float)):
            raise OptionError(f"prefill_share: expected a number, found {type(self.prefill_share).__name__}")
        if not 0.0 <= self.prefill_share <= 1.0:
            raise OptionError(f"prefill_share: expected a number from 0 to 1, found {self.prefill_share}")

    @property
    def placement(self) -> PlacementOptions:
        """Where the routed experts live."""
        return PlacementOptions(
            self.device, self.expert_device, self.expert_placement, self.expert_budget_mib, self.expert_swap_mib_s
        )

    def _check_speculation(self) -> None:
        try:
            check_width(self.verify_width)
            check_sources(self.spec or ())
        except ValueError as error:
            raise OptionError(str(error)) from None
        if self.draft is None:
            return
        if self.verify_width == 1 or (self.spec is not None and "mtp" not in self.spec):
            raise OptionError("draft: expected with mtp among spec, and a verify_width other than 1")
        if not self.draft.is_file():
            raise OptionError(f"draft: expected a GGUF file with a draft head, found none at {self.draft}")


def available_cpus() -> int:
    """The CPUs that this process may really use: its affinity, cut down by a container's quota, at least one.

    More spinning threads than that make every step wait for a thread that does not run.
    """
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _cgroup_quota(Path("/sys/fs/cgroup"))
    return max(1, cpus if quota is None else min(cpus, int(quota)))


def _cgroup_quota(root: Path) -> float | None:
    """CPUs that the control group grants, or None without a limit. Version 2 first, then version 1."""
    try:
        quota, period = (root / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        pass
    try:
        micros = int((root / "cpu" / "cpu.cfs_quota_us").read_text())
        return micros / int((root / "cpu" / "cpu.cfs_period_us").read_text()) if micros > 0 else None
    except (OSError, ValueError, ZeroDivisionError):
        return None


def _check_integer(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise OptionError(f"{name}: expected an integer, found {type(value).__name__}")
    if not low <= value <= high:
        raise OptionError(f"{name}: expected an integer from {low} to {high}, found {value}")
