"""Finding the table that belongs to a device, its libraries and a model, and setting what it says."""

from __future__ import annotations

import hashlib
import os
import re
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from pyluce.native import load_libraries
from pyluce.native.devices import list_devices, parse_device
from pyluce.native.tune import DeviceChoices, TuneKind
from pyluce.tuning.products import Product
from pyluce.tuning.table import TuneError, TuneTable

AUTO: Final = "auto"
OFF: Final = "off"
CACHE_DIR_VARIABLE: Final = "XDG_CACHE_HOME"


class Choices(Protocol):
    """`pyluce.native.tune.DeviceChoices`."""

    def choose(self, kind: TuneKind, type_id: int, k: int, m: int, n_used: int, rows: int, value: int) -> bool:
        """Set a product's choice; False when it is no candidate."""

    def clear(self) -> None:
        """Forget every choice."""


@dataclass(frozen=True, slots=True)
class Site:
    """Where a table is to be used: the device as its driver names it, what its code was compiled for, the libraries' stamp."""

    device: str
    architecture: str
    libraries: str


@dataclass(frozen=True, slots=True)
class Tuning:
    """What is in effect. `path` and `digest` None: no table, every product has its default."""

    path: str | None = None
    digest: str | None = None
    entries: int = 0


NO_TUNING: Final = Tuning()


def this_site(device: str) -> Site:
    """A GPU of this machine. Raises NativeError when it is not there."""
    stamp = load_libraries(parse_device(device)[0]).stamp
    info = next(info for info in list_devices() if info.device == device)
    return Site(info.description, info.architecture or "", stamp)


def default_path(site: Site, products: Iterable[Product]) -> Path:
    """Where `luce tune` writes and `--tune auto` looks: a name for each device, libraries and set of products, in the user's cache folder."""
    root = os.environ.get(CACHE_DIR_VARIABLE)
    folder = (Path(root) if root else Path.home() / ".cache") / "pyluce" / "tune"
    what = repr((site.architecture, site.libraries, sorted(p.key for p in products)))
    name = re.sub(r"[^A-Za-z0-9]+", "-", site.device).strip("-").lower()
    return folder / f"{name}-{hashlib.sha256(what.encode()).hexdigest()[:12]}.json"


def choose_table(choice: str, site: Site, products: list[Product]) -> tuple[Path, TuneTable] | None:
    """The table for `--tune`: of the file that it names, with `auto` the one that `luce tune` wrote if it is there, with `off` none.

    Raises TuneError when a file belongs to something else, or has what this model does not.
    """
    if choice == OFF:
        return None
    path = default_path(site, products) if choice == AUTO else Path(choice)
    if choice == AUTO and not path.is_file():
        return None
    table = TuneTable.load(path)
    check_table(table, path, site, products)
    return path, table


def check_table(table: TuneTable, path: Path, site: Site, products: Iterable[Product]) -> None:
    """Raise TuneError unless the table was measured on such a device with these libraries, for products that the model has."""
    again = "measure again with `luce tune`"
    for name in ("device", "architecture", "libraries"):
        expected, found = getattr(site, name), getattr(table, name)
        if expected != found:
            raise TuneError(f"{path}: {name}: expected {expected!r}, found a table of {found!r}; {again}")
    known = {p.key for p in products}
    for entry in table.entries:
        if (entry.type_id, entry.k, entry.m, entry.n_used) not in known:
            raise TuneError(f"{path}: expected products of this model, found {entry}; {again}")


def apply_table(choices: Choices, path: Path, table: TuneTable) -> None:
    """Set everything, in place of what was set before. Raises TuneError, with nothing set, for a choice that the device does not have."""
    choices.clear()
    for e in table.entries:
        if not choices.choose(e.kind, e.type_id, e.k, e.m, e.n_used, e.rows, e.value):
            choices.clear()
            raise TuneError(
                f"{path}: {e}: expected a choice that this device has, found {e.value}; measure again with `luce tune`"
            )


class TunedDevice:
    """A device whose choices belong to the models of one table, as long as there is one of them. `tuning`: what is in effect."""

    def __init__(self, device: str, tuning: Tuning) -> None:
        self._device = device
        self._held = True
        self.tuning = tuning

    def close(self) -> None:
        """One model less. Idempotent."""
        if not self._held:
            return
        self._held = False
        with _lock:
            tuning, users = _in_use.pop(self._device)
            if users > 1:
                _in_use[self._device] = (tuning, users - 1)


_lock = threading.Lock()
_in_use: dict[str, tuple[Tuning, int]] = {}


def hold_device(device: str, tuning: Tuning, choices: Choices, table: TuneTable | None) -> TunedDevice:
    """Set a table (or none) for one more model on a device. Raises TuneError when a model with another table is there."""
    with _lock:
        now, users = _in_use.get(device, (tuning, 0))
        if users and now.digest != tuning.digest:
            raise TuneError(
                f"{device}: expected the table of the model that is loaded there ({now.path or 'none'}), found {tuning.path or 'none'}; "
                "a device has one table at a time"
            )
        if not users:
            choices.clear()
            if table is not None:
                apply_table(choices, Path(tuning.path or ""), table)
        _in_use[device] = (now, users + 1)
    return TunedDevice(device, now)


def tune_device(device: str, choice: str, products: list[Product]) -> TunedDevice:
    """Set a GPU's choices for a model as `--tune` says; on the CPU there are none, and a file is refused.

    Raises TuneError, or NativeError for a device that is not there.
    """
    if parse_device(device)[0] == "cpu":
        if choice not in (AUTO, OFF):
            raise TuneError(f"expected a GPU for the table {choice}, found the CPU, which has nothing to choose")
        return hold_device(device, NO_TUNING, _Nothing(), None)
    found = choose_table(choice, this_site(device), products)
    if found is None:
        return hold_device(device, NO_TUNING, DeviceChoices(device), None)
    path, table = found
    tuning = Tuning(str(path), table.digest, len(table.entries))
    return hold_device(device, tuning, DeviceChoices(device), table)


class _Nothing:
    """The CPU's choices."""

    def choose(self, *_: object) -> bool:
        return False

    def clear(self) -> None:
        pass
