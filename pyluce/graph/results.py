"""Reads what a step computed: logits of the rows that are wanted, and of the others only the token with the largest one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from pyluce.graph.arrays import aligned
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


class ResultReader:
    """Waits for the step that was started and reads its results, before the next one. On a host backend they are read where they lie."""

    def __init__(self, backend: Backend, on_host: bool) -> None:
        self._backend = backend
        self._on_host = on_host
        self._memory = HostMemory(backend)

    @property
    def host_bytes(self) -> int:
        """Bytes of memory that results arrive in."""
        return self._memory.array.nbytes

    def logits(self, graph: StepGraph, first: int, count: int) -> Logits:
        """Rows of logits [count, n_vocab]."""
        return self._fetch(graph, [_rows(graph, first, count)])[0].view(np.float32).reshape(count, -1).copy()

    def rows(self, graph: StepGraph, wants_logits: Sequence[bool]) -> list[Row]:
        """Of each row of a row graph its logits [n_vocab], or its best token where they are not wanted and there is one."""
        n = len(wants_logits)
        if all(wants_logits):
            return list(self.logits(graph, 0, n))
        wanted = [i for i in range(n) if wants_logits[i]]
        assert graph.best is not None
        found = self._fetch(graph, [(graph.best, 0, 4 * n), *(_rows(graph, i, 1) for i in wanted)])
        best: list[int] = found[0].view(np.int32).tolist()
        rows: list[Row] = list(best)
        for i, raw in zip(wanted, found[1:], strict=True):
            rows[i] = raw.view(np.float32).copy()
        if min(best) < 0:
            for i in range(n):
                if best[i] < 0 and not wants_logits[i]:
                    rows[i] = self.logits(graph, i, 1)[0]
        return rows

    def _fetch(self, graph: StepGraph, parts: Sequence[Part]) -> list[npt.NDArray[np.uint8]]:
        """Bytes of results, good until the next call or the next step."""
        if self._on_host:
            self._backend.wait()
            for tensor, _, _ in parts:
                if tensor not in graph.memory:
                    graph.memory[tensor] = tensor_raw(tensor)
            return [graph.memory[tensor][first : first + size] for tensor, first, size in parts]
        if sum(size for _, _, size in parts) > PINNED_BYTES:
            self._backend.wait()
            return [tensor_bytes(tensor, first, size) for tensor, first, size in parts]
        places, end = [], 0
        for _, _, size in parts:
            places.append(end)
            end += aligned(size)
        if end > self._memory.array.nbytes:
            self._memory.grow(end)
        for (tensor, first, size), place in zip(parts, places, strict=True):
            self._backend.fetch(tensor, self._memory.address + place, first, size)
        self._backend.wait()
        return [self._memory.array[at : at + size] for at, (_, _, size) in zip(places, parts, strict=True)]

    def close(self) -> None:
        """Free the memory. Idempotent."""
        self._memory.close()


def _rows(graph: StepGraph, first: int, count: int) -> Part:
    if graph.logits is None:
        raise NativeError("expected a graph with logits, found one without")
    row_bytes = 4 * tensor_shape(graph.logits)[0]
    return graph.logits, first * row_bytes, count * row_bytes
