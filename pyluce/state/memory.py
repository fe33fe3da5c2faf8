"""How much memory this process may still use."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import psutil

CGROUP_ROOT: Final = Path("/sys/fs/cgroup")


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
