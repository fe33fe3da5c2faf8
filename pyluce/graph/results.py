"""Reads what a step computed: logits of the rows that are wanted, and of the others only the token with the largest one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from pyluce.graph.arrays import aligned
from pyluce.graph.copies import Bytes, Copies, Reused, plain_array
from pyluce.graph.trunk import StepGraph
from pyluce.native import ggml_backend as api
from pyluce.native.backend import Backend
from pyluce.native.errors import NativeError
from pyluce.native.host_array import host_array
from pyluce.native.tensors import tensor_bytes, tensor_raw, tensor_shape

Logits: TypeAlias = npt.NDArray[np.float32]
Row: TypeAlias = Logits | int
Part: TypeAlias = tuple[int, int, int]
"""(tensor, first byte, bytes)"""

ARRIVING_BYTES: Final = 64 << 20
"""What a row graph leaves to read, if it is not more, arrives behind the step, in page-locked memory that the caller may keep."""


@dataclass(frozen=True, slots=True)
class Asked:
    """Parts of a step's results; `arriving` where they are on their way to, None: they are read when the device is idle."""

    graph: StepGraph
    wants_logits: Sequence[bool]
    parts: list[Part]
    arriving: list[Bytes] | None


class ResultReader:
    """Reads the results of the step that was started last. What it returns is the caller's, for as long as it is held.

    A device writes logits of rows straight into what is returned: a few arrays of page-locked memory, each used again when nobody
    holds a row of it. When callers keep too many, or a step leaves too much, results are copied into memory of their own. On a host
    backend they lie in the graph's memory, and are copied.
    """

    def __init__(self, backend: Backend, on_host: bool) -> None:
        self._backend = backend
        self._on_host = on_host
        self._arrays = Reused(_arrays_of(backend))
        self._copies = Copies()

    @property
    def host_bytes(self) -> int:
        """Bytes of memory that results arrive in."""
        return self._arrays.n_bytes

    def logits(self, graph: StepGraph, first: int, count: int) -> Logits:
        """Rows of logits [count, n_vocab], when everything that was started is done, in memory of their own: prompts are kept for long."""
        self._backend.wait()
        part = _rows(graph, first, count)
        raw = self._own_memory(graph, part).copy() if self._on_host else tensor_bytes(*part)
        logits: Logits = raw.view(np.float32).reshape(count, -1)
        return logits

    def ask(self, graph: StepGraph, wants_logits: Sequence[bool]) -> Asked:
        """To be called once a row graph was started: of each row its logits, or its best token where they are not wanted."""
        n = len(wants_logits)
        if all(wants_logits):
            parts = [_rows(graph, 0, n)]
        else:
            assert graph.best is not None
            parts = [(graph.best, 0, 4 * n), *(_rows(graph, i, 1) for i in _wanted(wants_logits))]
        return Asked(graph, wants_logits, parts, None if self._on_host else self._fetch(parts))

    def rows(self, asked: Asked) -> Logits | list[Row]:
        """What was asked for, when the step has ended: [n, n_vocab] where all rows want their logits.

        Else a list, with -1 for a row from which no token can be chosen.
        """
        found = asked.arriving or self._copied(asked)
        wants = asked.wants_logits
        if all(wants):
            logits: Logits = found[0].view(np.float32).reshape(len(wants), -1)
            self._backend.wait()
            return logits
        best = found[0].view(np.int32)
        wanted = {i: raw.view(np.float32) for i, raw in zip(_wanted(wants), found[1:], strict=True)}
        self._backend.wait()  # as late as can be: nothing is left to do when the results are there
        rows: list[Row] = best.tolist()
        for i, row in wanted.items():
            rows[i] = row
        return rows

    def _fetch(self, parts: list[Part]) -> list[Bytes] | None:
        """Have parts written into page-locked memory, behind what was started; None when there is none to be had."""
        starts, end = [], 0
        for _, _, size in parts:
            starts.append(end)
            end += aligned(size)
        whole = self._arrays.take(end) if end <= ARRIVING_BYTES else None
        if whole is None:
            return None
        address = whole.ctypes.data
        for at, (tensor, first, size) in zip(starts, parts, strict=True):
            self._backend.fetch(tensor, address + at, first, size)
        return [whole[at : at + size] for at, (_, _, size) in zip(starts, parts, strict=True)]

    def _copied(self, asked: Asked) -> list[Bytes]:
        """Bytes of each part, when the device is idle."""
        self._backend.wait()
        if self._on_host:
            return [self._copies.of(self._own_memory(asked.graph, part)) for part in asked.parts]
        return [tensor_bytes(*part) for part in asked.parts]

    @staticmethod
    def _own_memory(graph: StepGraph, part: Part) -> Bytes:
        tensor, first, size = part
        memory = graph.memory.get(tensor)
        if memory is None:
            memory = graph.memory[tensor] = tensor_raw(tensor)
        return memory[first : first + size]

    def close(self) -> None:
        """Free the memory that nobody holds, and the rest when nobody does any more. Idempotent."""
        self._backend.wait()  # a step that failed may still write there
        self._arrays.clear()


def _arrays_of(backend: Backend) -> Callable[[int], Bytes]:
    """Makes arrays that the device writes by itself, where there are such."""
    host_type = api.ggml_backend_dev_host_buffer_type(backend.device)
    return partial(host_array, host_type) if host_type else plain_array


def _wanted(wants_logits: Sequence[bool]) -> list[int]:
    return [i for i, wanted in enumerate(wants_logits) if wanted]


def _rows(graph: StepGraph, first: int, count: int) -> Part:
    if graph.logits is None:
        raise NativeError("expected a graph with logits, found one without")
    row_bytes = 4 * tensor_shape(graph.logits)[0]
    return graph.logits, first * row_bytes, count * row_bytes
