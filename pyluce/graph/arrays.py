"""Input tensors of a graph, and the arrays that fill them.

A graph of few rows has all its inputs as parts of one tensor, so that one copy brings them to a device: a copy takes longer to start
than such inputs take on the way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt

from pyluce.graph.staging import ALIGNMENT, Staging
from pyluce.native import ggml
from pyluce.native.ggml import GGMLType
from pyluce.native.tensors import Graph, TensorArena, tensor_memory, tensor_struct

S = TypeVar("S", bound=np.generic)

FEW_ROWS: Final = 64
"""Up to this many rows of a row graph are one copy, and are written together, whichever sequences they belong to."""


@dataclass(frozen=True, slots=True)
class InputSpec:
    """An input: its name in the graph, type and ne (fastest axis first)."""

    name: str
    type: GGMLType
    ne: tuple[int, ...]


def aligned(n_bytes: int) -> int:
    """The next place for an array in a block."""
    return -(-n_bytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True)
class GraphInputs:
    """The input tensors of a graph by name. `whole`: the I8 tensor that they are parts of, None where each stands alone."""

    tensors: dict[str, int]
    whole: int | None

    @classmethod
    def new(cls, arena: TensorArena, graph: Graph, specs: Sequence[InputSpec], *, packed: bool) -> GraphInputs:
        """Make them in a graph that has no nodes yet."""
        if not packed:
            alone = {spec.name: arena.new_tensor(spec.type, spec.ne, spec.name) for spec in specs}
            for tensor in alone.values():
                ggml.ggml_set_input(tensor)
            return cls(alone, None)
        offsets, end = [], 0
        for spec in specs:
            offsets.append(end)
            end += aligned(int(np.prod(spec.ne)) * ggml.ggml_type_size(spec.type))
        whole = arena.new_tensor(GGMLType.I8, (end,), "inputs")
        ggml.ggml_set_input(whole)
        parts = {
            spec.name: arena.new_part(whole, spec.type, spec.ne, offset, spec.name)
            for spec, offset in zip(specs, offsets, strict=True)
        }
        for part in parts.values():
            graph.expand(part)  # first, where they stand between no two nodes that a device computes in one launch
        return cls(parts, whole)

    @property
    def n_bytes(self) -> int:
        """Bytes of a block of staging memory that their arrays take."""
        if self.whole is not None:
            return ggml.ggml_nbytes(self.whole)
        return sum(aligned(ggml.ggml_nbytes(tensor)) for tensor in self.tensors.values())


class InputArrays:
    """Arrays to fill, numpy order (slowest axis first): the tensors' own memory, or a block of staging memory.

    `of` is called for the inputs in the order in which they were made.
    """

    def __init__(self, inputs: GraphInputs, staging: Staging | None, block: int) -> None:
        self._inputs = inputs
        self._staging = staging
        self._block = block
        self._copies: list[tuple[int, int, int]] = []  # tensor, host address, bytes
        self._end = 0
        if staging is not None and inputs.whole is not None:
            self._copy(inputs.whole, staging.array(block, 0, (inputs.n_bytes,), np.uint8))

    def of(self, name: str, dtype: type[S]) -> npt.NDArray[S]:
        """[ne1, ne0] of an input of one or two axes."""
        tensor = self._inputs.tensors[name]
        if self._staging is None:
            return tensor_memory(tensor, dtype)
        ne = tensor_struct(tensor).ne
        array = self._staging.array(self._block, self._end, (ne[1], ne[0]), dtype)
        self._end += aligned(array.nbytes)
        if self._inputs.whole is None:
            self._copy(tensor, array)
        return array

    def maybe(self, name: str, dtype: type[S]) -> npt.NDArray[S] | None:
        """The same, None where the graph has no such input."""
        return self.of(name, dtype) if name in self._inputs.tensors else None

    def _copy(self, tensor: int, array: npt.NDArray[Any]) -> None:
        self._copies.append((tensor, array.ctypes.data, array.nbytes))

    def send(self) -> None:
        """Copy what is not written in place."""
        if self._staging is not None:
            for tensor, address, n_bytes in self._copies:
                self._staging.send(tensor, address, n_bytes)
