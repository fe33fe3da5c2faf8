"""The folder of `--cache-dir` for a loaded model."""

from __future__ import annotations

import logging
from contextlib import ExitStack

from pyluce.graph import TrunkRunner
from pyluce.identity import state_identity
from pyluce.options import DEFAULT_CACHE_DIR_MIB, LoadOptions, OptionError
from pyluce.state.disk_cache import DiskCache
from pyluce.state.disk_folder import CacheDirError, FolderLock

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


def open_cache_dir(lock: FolderLock, runner: TrunkRunner, options: LoadOptions, stack: ExitStack) -> DiskCache:
    """Read what is in the folder and attach it to the runner's store. At the end `stack` writes what the folder lacks.

    To be called when the runner's own end is on `stack` already. Raises OptionError.
    """
    limit = (options.cache_dir_mib or DEFAULT_CACHE_DIR_MIB) << 20
    identity = state_identity(runner.model, runner.options, options.chat_template)
    try:
        disk = DiskCache(lock, limit, identity)
    except CacheDirError as error:
        raise OptionError(f"cache_dir: {error}") from error
    stack.callback(disk.close)
    stack.callback(_spill, runner)
    runner.store.attach(disk)
    return disk


def _spill(runner: TrunkRunner) -> None:
    try:
        runner.store.spill()
    except Exception as error:  # the model is closed anyway
        log.warning("%s", error)
