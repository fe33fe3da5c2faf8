"""How much memory is left, and whether the sequences' state fits into it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import psutil

from pyluce.state.layout import StateOptions, state_bytes

if TYPE_CHECKING:
    from pyluce.weights import HParams

HEADROOM: Final = 0.1
CGROUP_ROOT: Final = Path("/sys/fs/cgroup")


class StateMemoryError(ValueError):
    """The state of all slots does not fit into the memory that is available; nothing was allocated."""


def check_state_fits(hparams: HParams, options: StateOptions, available: int | None = None) -> int:
    """The bytes of the state. Raises StateMemoryError with them when they do not fit into `available` bytes less a tenth."""
    available = available_bytes() if available is None else available
    needed, budget = state_bytes(hparams, options), int(available * (1.0 - HEADROOM))
    if needed <= budget:
        return needed
    fits = largest_fit(hparams, options, budget)
    most = f"at most {fits} would fit" if fits else "not even one would fit"
    raise StateMemoryError(
        f"max_concurrency: the state of {options.n_slots} sequences of {options.n_ctx} tokens takes {_gib(needed)}, "
        f"found {_gib(available)} available, of which a tenth is kept free; {most}: lower max_concurrency or max_ctx"
    )


def largest_fit(hparams: HParams, options: StateOptions, budget: int) -> int:
    """The largest number of slots, up to `options.n_slots`, whose state takes at most `budget` bytes; 0 when one does not fit."""
    counts = range(options.n_slots, 0, -1)
    return next((n for n in counts if state_bytes(hparams, replace(options, n_slots=n)) <= budget), 0)


def available_bytes(cgroup_root: Path = CGROUP_ROOT) -> int:
    """Memory that this process may still use: the system's, or its control group's if that is less."""
    system = int(psutil.virtual_memory().available)
    group = _cgroup_available(cgroup_root)
    return system if group is None else min(system, group)


def _cgroup_available(root: Path) -> int | None:
    """What the control group's limit leaves, page cache counted as free; None without a limit. Version 2 first, then version 1."""
    for limit, usage, cache in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            most, used = (root / limit).read_text().strip(), int((root / usage).read_text())
            reclaimable = _statistic((root / limit).with_name("memory.stat"), cache)
            return None if most == "max" else max(0, int(most) - used + reclaimable)
        except (OSError, ValueError):
            continue
    return None


def _statistic(path: Path, name: str) -> int:
    """The value of one line `name value`, 0 when it is not there."""
    try:
        lines = [line.split() for line in path.read_text().splitlines()]
        return next((int(words[1]) for words in lines if len(words) == 2 and words[0] == name), 0)
    except (OSError, ValueError):
        return 0


def _gib(n_bytes: int) -> str:
    return f"{n_bytes / 2**30:.2f} GiB"
