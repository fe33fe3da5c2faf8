"""What a loaded model holds: the runner, which can be given up and loaded again, and the folder of `--cache-dir`."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyluce.engine import ParkError, Runner
from pyluce.engine.protocols import PrefixStore
from pyluce.graph import RunnerOptions, TrunkRunner
from pyluce.identity import state_identity
from pyluce.native.errors import NativeError
from pyluce.native.heap import trim_heap
from pyluce.native.library import GPU_BACKENDS
from pyluce.native.reset import reset_device
from pyluce.options import DEFAULT_CACHE_DIR_MIB, LoadOptions, OptionError
from pyluce.state import SequenceState
from pyluce.state.disk_cache import DiskCache
from pyluce.state.disk_folder import LIVE_SUFFIX, CacheDirError, FolderLock
from pyluce.state.store import SpillError
from pyluce.weights import ModelError
from pyluce.weights.model_file import Progress

Load = Callable[[RunnerOptions, Progress], TrunkRunner]

log = logging.getLogger(__name__)


def lock_cache_dir(options: LoadOptions, stack: ExitStack) -> FolderLock | None:
    """Lock the folder before anything is loaded; `stack` lets go of it. None without one. Raises OptionError when it cannot be used."""
    if options.cache_dir is None:
        return None
    try:
        lock = FolderLock(options.cache_dir)
    except CacheDirError as error:
        raise OptionError(f"cache_dir: {error}") from error
    stack.callback(lock.close)
    return lock


def keep_model(runner: TrunkRunner, lock: FolderLock | None, options: LoadOptions, load: Load) -> ModelKeeper:
    """A keeper that owns the runner, with what is in the locked folder. Raises OptionError, and closes the runner then."""

    def identify(runner: TrunkRunner) -> dict[str, str]:
        return state_identity(runner.model, runner.options, options.chat_template, runner.tuned.tuning)

    try:
        disk = None
        if lock is not None:
            disk = DiskCache(lock, (options.cache_dir_mib or DEFAULT_CACHE_DIR_MIB) << 20, identify(runner))
        return ModelKeeper(runner, disk, load, identify, gpus=_gpus(options), reset=options.park_reset)
    except BaseException as error:
        runner.close()
        if isinstance(error, CacheDirError):
            raise OptionError(f"cache_dir: {error}") from error
        raise


def _gpus(options: LoadOptions) -> list[str]:
    """The GPUs of this machine among the devices."""
    names = dict.fromkeys(filter(None, (options.device, options.expert_device)))
    return [name for name in names if name.partition(":")[0] in GPU_BACKENDS]


@dataclass(slots=True)
class Sleeper:
    """Stands in for a running sequence while the model is parked. `path` None: it has no tokens yet."""

    length: int
    path: Path | None

    def free(self) -> None:
        """Nobody goes on with it."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)


class ModelKeeper:
    """Owns the runner of a loaded model, gives it up and gets it back, and keeps the cache folder through all of that."""

    def __init__(
        self,
        runner: TrunkRunner,
        disk: DiskCache | None,
        load: Load,
        identify: Callable[[TrunkRunner], dict[str, str]],
        *,
        gpus: Sequence[str] = (),
        reset: bool = False,
    ) -> None:
        """Take over runner and folder. `load` makes a runner whose context and chunks are those of the given options.

        `gpus`: the devices that it uses besides the CPU; `reset`: a park resets them (`LoadOptions.park_reset`).
        """
        self._identify = identify
        self._identity = identify(runner)
        self._runner: TrunkRunner | None = runner
        self._options = runner.options
        self._disk = disk
        self._load = load
        self._gpus = gpus
        self._reset = reset
        self._left: list[dict[str, str | None]] = []
        self.warnings = disk.warnings if disk is not None else []
        if disk is not None:
            runner.store.attach(disk)

    def memory_report(self) -> dict[str, object]:
        """Bytes by place, from the buffers that exist."""
        return self._runner.memory_report() if self._runner is not None else self.left()

    def left(self) -> dict[str, object]:
        """While parked: for each GPU whether the driver's context was `released` or `kept`, and why; empty on the CPU."""
        return {"parked_devices": self._left} if self._left else {}

    def park(self, live: Mapping[int, SequenceState], discard: bool) -> Mapping[int, Any]:
        """See `ParkableModel.park`."""
        runner = self._runner
        if runner is None:
            raise ParkError("the model is parked already")
        self._check_loss(runner, len(live), discard)
        sleepers: dict[int, Sleeper] = {}
        try:
            for number, state in live.items():
                sleepers[number] = self._write(runner, number, state)
            try:
                runner.store.spill()
            except SpillError:
                if not discard:
                    raise
        except (OSError, ValueError, SpillError) as error:
            for sleeper in sleepers.values():
                sleeper.free()
            raise ParkError(f"not parked, as not everything could be written: {error}") from error
        self._release()
        return sleepers

    def unpark(self, progress: Progress) -> tuple[Runner[Any], PrefixStore[Any]]:
        """See `ParkableModel.unpark`."""
        try:
            self._runner = self._load(self._options, progress)
            found = self._identify(self._runner)
            differing = [name for name, value in self._identity.items() if found[name] != value]
            if differing:
                raise ModelError(
                    f"{self._runner.model.path}: expected what was parked, found another {', '.join(differing)}; "
                    "start the server again"
                )
            if self._disk is not None:
                self._runner.store.attach(self._disk)
        except BaseException:
            self._release()
            self.trim()
            raise
        return self._runner, self._runner.store

    def trim(self) -> None:
        """Free what Python, the C library and the GPU's driver hold on to, now that nobody knows the runner any more."""
        gc.collect()
        trim_heap()
        self._left = [self._give_back(name) for name in self._gpus]

    def resume(self, stand_in: Any) -> SequenceState:
        """See `ParkableModel.resume`."""
        assert self._runner is not None
        state = self._runner.new_sequence()
        if stand_in.path is not None and self._disk is not None:
            try:
                self._runner.store.read_live(state, stand_in.path, self._disk.identity)
            except BaseException:
                state.free()
                raise
            stand_in.free()
        return state

    def close(self) -> None:
        """Write what the folder lacks, and free everything. Idempotent."""
        if self._runner is not None:
            try:
                self._runner.store.spill()
            except SpillError as error:  # the model is closed anyway
                log.warning("%s", error)
        if self._disk is not None:
            self._disk.close()
        if self._runner is not None:
            self._runner.close()
            self._runner = None

    def _check_loss(self, runner: TrunkRunner, n_live: int, discard: bool) -> None:
        if self._disk is not None:
            return
        if n_live:
            raise ParkError(
                f"not parked: {n_live} requests are running, and there is no folder to keep them in; "
                "wait for them, or start with --cache-dir"
            )
        entries = runner.store.stats().entries
        if entries and not discard:
            raise ParkError(
                f"not parked: {entries} entries of the prefix cache would be lost, as there is no folder to keep them in; "
                "start with --cache-dir, or park with `discard` (luce park --discard)"
            )

    def _write(self, runner: TrunkRunner, number: int, state: SequenceState) -> Sleeper:
        if not state.length:
            return Sleeper(0, None)
        assert self._disk is not None
        path = self._disk.folder / f"{number}{LIVE_SUFFIX}"
        runner.store.write_live(state, path, self._disk.identity)
        return Sleeper(state.length, path)

    def _give_back(self, device: str) -> dict[str, str | None]:
        """Reset a GPU, if that was asked for; what became of its context."""
        if not self._reset:
            return {"name": device, "context": "kept", "why": "park_reset is off"}
        try:
            reset_device(device)
        except NativeError as error:
            log.warning("parked, but the driver keeps memory of this process: %s", error)
            return {"name": device, "context": "kept", "why": str(error)}
        return {"name": device, "context": "released", "why": None}

    def _release(self) -> None:
        runner, self._runner = self._runner, None
        if runner is not None:
            runner.store.clear()
            runner.close()
