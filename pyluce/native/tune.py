"""A GPU's table of choices between its kernels (``luce-tune.cuh``): what there is to choose, setting it, forgetting it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from enum import IntEnum
from typing import Any, Final

from pyluce.native.devices import parse_device
from pyluce.native.errors import NativeError
from pyluce.native.library import build_command, load_libraries

MAX_CANDIDATES: Final = 64
SMALLEST_ROWS: Final = 16


class TuneKind(IntEnum):
    """``enum luce_tune_kind``: products of a row graph, whose bits depend on the choice, and of a chunk graph, whose bits do not."""

    ROW = 0
    CHUNK = 1


class DeviceChoices:
    """The choices of one GPU. They take effect in graphs that are computed for the first time after them.

    A product is named by kind, ggml type, k and m of its weights [k, m], picks of a row (0: no experts) and, of a chunk, columns: a
    power of two from 16 on that stands for as many columns and fewer, down to the next one. Raises ValueError for the CPU, which has
    nothing to choose, NativeError when the libraries are of another version.
    """

    def __init__(self, device: str) -> None:
        backend, self._index = parse_device(device)
        if backend == "cpu":
            raise ValueError("expected a GPU, found the CPU: it has one kernel for each product")
        if backend == "rpc":
            raise ValueError(f"expected a GPU of this machine, found {device!r}: its choices are made where it is")
        library = load_libraries(backend).handles[f"ggml-{backend}"]
        product = [ctypes.c_int] * 3 + [ctypes.c_int64] * 4
        self._candidates = _find(
            library, "ggml_luce_tune_candidates", ctypes.c_int, [*product, ctypes.c_void_p, ctypes.c_int]
        )
        self._set = _find(library, "ggml_luce_tune_set", ctypes.c_bool, [*product, ctypes.c_int])
        self._clear = _find(library, "ggml_luce_tune_clear", None, [ctypes.c_int])
        self._driver = _find(library, "ggml_luce_tune_driver", ctypes.c_int, [])

    @property
    def driver(self) -> int:
        """The driver's version as it gives it, 0 when it does not."""
        return int(self._driver())

    def candidates(self, kind: TuneKind, type_id: int, k: int, m: int, n_used: int, rows: int) -> list[int]:
        """What `choose` takes for this product; empty when there is no choice. ValueError for a product that the library cannot name."""
        values = (ctypes.c_int * MAX_CANDIDATES)()
        count = self._candidates(self._index, kind, type_id, k, m, n_used, rows, values, MAX_CANDIDATES)
        if count < 0:
            raise ValueError(
                f"expected a product that the library knows, found {kind.name} type {type_id} [{k}, {m}], {n_used} picks, {rows} columns"
            )
        return list(values[: min(count, MAX_CANDIDATES)])

    def choose(self, kind: TuneKind, type_id: int, k: int, m: int, n_used: int, rows: int, value: int) -> bool:
        """Set a product's choice; False when it is no candidate, and nothing changed then."""
        return bool(self._set(self._index, kind, type_id, k, m, n_used, rows, value))

    def clear(self) -> None:
        """Forget every choice: each product has its default again."""
        self._clear(self._index)


def _find(library: ctypes.CDLL, name: str, result: Any, arguments: list[Any]) -> Callable[..., Any]:
    try:
        found = getattr(library, name)
    except AttributeError:
        raise NativeError(
            f"expected the function {name} in {library._name}, found none: build the libraries again, {build_command('cuda')} (or hip)"
        ) from None
    found.restype, found.argtypes = result, arguments
    return found  # type: ignore[no-any-return]
