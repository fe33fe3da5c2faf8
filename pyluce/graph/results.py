"""Reads what a step computed: logits of the rows that are wanted, and of the others only the token with the largest one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from pyluce.graph.arrays import aligned
from pyluce.graph.copies import Copies
from pyluce.graph.staging import HostMemory
from pyluce.graph.trunk import StepGraph
from pyluce.native.backend import Backend
from pyluce.native.errors import NativeError
from pyluce.native.tensors import tensor_bytes, tensor_raw, tensor_shape

Logits: TypeAlias = npt.NDArray[np.float32]
Row: TypeAlias = Logits | int
Part: TypeAlias = tuple[int, int, int]
"""(tensor, first byte, bytes)"""

PINNED_BYTES: Final = 64 << 20
"""What a step leaves to read, if it is not more, arrives in page-locked memory, which is allocated when first needed."""


@dataclass(frozen=True, slots=True)
class Asked:
    """Parts of a step's results that are on their way; `places` where they arrive, None: they are read when the device is idle."""

    graph: StepGraph
    wants_logits: Sequence[bool]
    parts: list[Part]
    places: list[int] | None


class ResultReader:
    """Reads the results of the step that was started last. On a host backend they are read where they lie."""

    def __init__(self, backend: Backend, on_host: bool) -> None:
        self._backend = backend
        self._on_host = on_host
        self._memory = HostMemory(backend)
        self._copies = Copies()

    @property
    def host_bytes(self) -> int:
        """Bytes of memory that results arrive in."""
        return self._memory.array.nbytes

    def logits(self, graph: StepGraph, first: int, count: int) -> Logits:
        """Rows of logits [count, n_vocab], when everything that was started is done."""
        asked = self._ask(graph, [True] * count, [_rows(graph, first, count)])
        logits: Logits = self._copies.of(self._arrived(asked)[0]).view(np.float32).reshape(count, -1)
        return logits

    def ask(self, graph: StepGraph, wants_logits: Sequence[bool]) -> Asked:
        """To be called once a row graph was started: of each row its logits, or its best token where they are not wanted."""
        n = len(wants_logits)
        if all(wants_logits):
            return self._ask(graph, wants_logits, [_rows(graph, 0, n)])
        assert graph.best is not None
        wanted = [_rows(graph, i, 1) for i in range(n) if wants_logits[i]]
        return self._ask(graph, wants_logits, [(graph.best, 0, 4 * n), *wanted])

    def rows(self, asked: Asked) -> list[Row]:
        """What was asked for, when the step has ended; -1 for a row from which no token can be chosen."""
        found = self._arrived(asked)
        wants = asked.wants_logits
        if all(wants):
            return list(self._copies.of(found[0]).view(np.float32).reshape(len(wants), -1))
        rows: list[Row] = found[0].view(np.int32).tolist()
        for i, raw in zip([i for i, wanted in enumerate(wants) if wanted], found[1:], strict=True):
            rows[i] = self._copies.of(raw).view(np.float32)
        return rows

    def row_later(self, graph: StepGraph, i: int) -> Logits:
        """Logits [n_vocab] of a row of the step that has ended."""
        part = _rows(graph, i, 1)
        raw = self._own_memory(graph, part).copy() if self._on_host else tensor_bytes(*part)
        logits: Logits = raw.view(np.float32)
        return logits

    def _ask(self, graph: StepGraph, wants_logits: Sequence[bool], parts: list[Part]) -> Asked:
        if self._on_host or sum(size for _, _, size in parts) > PINNED_BYTES:
            return Asked(graph, wants_logits, parts, None)
        places, end = [], 0
        for _, _, size in parts:
            places.append(end)
            end += aligned(size)
        if end > self._memory.array.nbytes:
            self._memory.grow(end)
        for (tensor, first, size), place in zip(parts, places, strict=True):
            self._backend.fetch(tensor, self._memory.address + place, first, size)
        return Asked(graph, wants_logits, parts, places)

    def _arrived(self, asked: Asked) -> list[npt.NDArray[np.uint8]]:
        """Bytes of results, good until the next call or the next step."""
        self._backend.wait()
        if asked.places is None:
            if self._on_host:
                return [self._own_memory(asked.graph, part) for part in asked.parts]
            return [tensor_bytes(*part) for part in asked.parts]
        return [self._memory.array[at : at + size] for at, (_, _, size) in zip(asked.places, asked.parts, strict=True)]

    @staticmethod
    def _own_memory(graph: StepGraph, part: Part) -> npt.NDArray[np.uint8]:
        tensor, first, size = part
        memory = graph.memory.get(tensor)
        if memory is None:
            memory = graph.memory[tensor] = tensor_raw(tensor)
        return memory[first : first + size]

    def close(self) -> None:
        """Free the memory. Idempotent."""
        self._memory.close()


def _rows(graph: StepGraph, first: int, count: int) -> Part:
    if graph.logits is None:
        raise NativeError("expected a graph with logits, found one without")
    row_bytes = 4 * tensor_shape(graph.logits)[0]
    return graph.logits, first * row_bytes, count * row_bytes
