"""Writes routing counts to a file while a model runs: now and then from a thread of its own, and at the end."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from pyluce.placement.counts import RouteCounter, RouteShape
from pyluce.placement.table_file import read_routes_for, write_routes

SAVE_EVERY_S: Final = 60.0

log = logging.getLogger(__name__)


class RouteRecorder:
    """Counts picks into the file at `path`, going on with the counts that are in it. `close` writes once more.

    `add` is called from one thread at a time; a step waits for no file. Raises RoutesError when the file that is there cannot be used
    or belongs to another model, OSError when none can be written there.
    """

    def __init__(self, path: Path, shape: RouteShape, save_every_s: float = SAVE_EVERY_S) -> None:
        self.path = path
        self._counter = RouteCounter(shape)
        if path.exists():
            self._counter.counts = read_routes_for(path, shape)
        check_writable(path)
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._saved_rows = 0
        self._save_every_s = save_every_s
        self._thread = threading.Thread(target=self._save_now_and_then, name="luce-routes", daemon=True)
        self._thread.start()

    @property
    def shape(self) -> RouteShape:
        """The model's."""
        return self._counter.shape

    @property
    def n_rows(self) -> int:
        """Rows counted since the start."""
        return self._counter.n_rows

    def add(self, picks: npt.NDArray[np.int32]) -> None:
        """Count picks [n_layer, rows, n_used]."""
        with self._lock:
            self._counter.add(picks)

    def save(self) -> None:
        """Write what was counted, if there is something new or no file yet. Raises OSError."""
        with self._lock:
            n_rows, counts = self._counter.n_rows, self._counter.counts.copy()
        if n_rows != self._saved_rows or not self.path.exists():
            write_routes(self.path, self._counter.shape, counts)
            self._saved_rows = n_rows

    def close(self) -> None:
        """Stop the thread and write. Idempotent. What cannot be written is an error in the log: the model's work is done."""
        if self._stop.is_set():
            return
        self._stop.set()
        self._thread.join()
        self._try_to_save()

    def _save_now_and_then(self) -> None:
        while not self._stop.wait(self._save_every_s):
            self._try_to_save()

    def _try_to_save(self) -> None:
        try:
            self.save()
        except OSError as error:
            log.error("the routing table %s could not be written: %s", self.path, error.strerror or error)


def check_writable(path: Path) -> None:
    """Raise OSError, naming the folder, unless a file can be written beside `path`."""
    folder = path.parent
    if not folder.is_dir():
        raise NotADirectoryError(f"expected a folder to write to, found none at {folder}")
    if path.is_dir():
        raise IsADirectoryError(f"expected a file or nothing, found a folder at {path}")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(f"expected a folder that can be written to, found {folder} without permission")
