"""Owners of tensor and graph memory, and moving data between tensors and numpy.

Shapes called ``ne`` are fastest axis first, as ggml prints them; numpy shapes are the reverse.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from pyluce.native import ggml, ggml_backend
from pyluce.native.errors import NativeError
from pyluce.native.library import load_libraries
from pyluce.native.owner import Owner
from pyluce.native.structs import GGML_MAX_DIMS, GGML_MAX_NAME, ggml_init_params, ggml_tensor

if TYPE_CHECKING:
    from pyluce.native.backend import GraphAllocator


class TensorArena(Owner):
    """A ``ggml_context``: the memory that tensor headers and graphs live in, of a fixed size in bytes.

    With ``no_alloc`` (the default) the tensors' data live elsewhere: in a ``BackendBuffer`` or where a
    ``GraphAllocator`` puts them. ``buffers`` holds the buffers made for the arena, so that nothing frees them while the
    tensors point there. Raises MemoryError when the memory cannot be had.
    """

    def __init__(self, mem_bytes: int, no_alloc: bool = True) -> None:
        super().__init__()
        load_libraries()
        if mem_bytes <= 0:
            raise ValueError(f"expected a positive arena size in bytes, found {mem_bytes}")
        try:
            memory = mmap.mmap(-1, mem_bytes)
        except (OSError, OverflowError, ValueError) as error:
            raise MemoryError(f"cannot map {mem_bytes} bytes for tensor headers: {error}") from error
        first = ctypes.c_char.from_buffer(memory)
        self.buffers: list[Owner] = []
        self.mem_bytes = mem_bytes
        self.no_alloc = no_alloc
        params = ggml_init_params(mem_bytes, ctypes.addressof(first), no_alloc)
        self._own("ggml_init", ggml.ggml_init(params), ggml.ggml_free, keep=(first, memory))

    @classmethod
    def for_counts(cls, n_tensors: int, n_graph_nodes: int = 0) -> TensorArena:
        """An arena for so many tensor headers (views and graph nodes count) and one graph of ``n_graph_nodes``."""
        load_libraries()
        mem_bytes = (n_tensors + 1) * ggml.ggml_tensor_overhead()
        if n_graph_nodes:
            mem_bytes += ggml.ggml_graph_overhead_custom(n_graph_nodes, False)
        return cls(mem_bytes)

    @property
    def used_bytes(self) -> int:
        """Bytes of the arena that are in use."""
        return ggml.ggml_used_mem(self.ptr)

    def new_tensor(self, type: int, ne: Sequence[int], name: str = "") -> int:
        """A tensor of 1 to 4 axes, fastest first. Raises ValueError for a bad shape, NativeError for a full arena:
        ggml itself would stop the process.
        """
        ctx = self.ptr
        _check_shape(type, ne)
        data_bytes = 0 if self.no_alloc else _data_bytes(type, ne)
        needed = ggml.ggml_tensor_overhead() + data_bytes
        if ggml.ggml_used_mem(ctx) + needed > self.mem_bytes:
            raise NativeError(
                f"expected {needed} free bytes in the arena for the tensor {name!r}, found "
                f"{self.mem_bytes - ggml.ggml_used_mem(ctx)} of {self.mem_bytes}; make the arena larger"
            )
        tensor = ggml.ggml_new_tensor(ctx, type, len(ne), (ctypes.c_int64 * len(ne))(*ne))
        if name:
            set_name(tensor, name)
        return tensor

    def new_part(self, whole: int, type: int, ne: Sequence[int], offset: int, name: str = "") -> int:
        """A contiguous tensor in the bytes from `offset` on of `whole`, a tensor of I8 with one axis, whatever its own type.

        Raises ValueError for a bad shape or one that does not fit, NativeError for a full arena.
        """
        _check_shape(type, ne)
        n_bytes = _data_bytes(type, ne)
        of = tensor_struct(whole)
        if of.type != ggml.GGMLType.I8 or not 0 <= offset <= of.ne[0] - n_bytes:
            raise ValueError(f"expected {n_bytes} bytes at {offset} within I8 [n], found {_label(whole)}")
        if ggml.ggml_used_mem(self.ptr) + ggml.ggml_tensor_overhead() > self.mem_bytes:
            raise NativeError(f"expected room in the arena for the tensor {name!r}, found none; make the arena larger")
        part = ggml.ggml_view_1d(self.ptr, whole, n_bytes, offset)
        header = tensor_struct(part)
        header.type = type
        for axis in range(GGML_MAX_DIMS):
            header.ne[axis] = ne[axis] if axis < len(ne) else 1
        header.nb[0] = ggml.ggml_type_size(type)
        header.nb[1] = header.nb[0] * (ne[0] // ggml.ggml_blck_size(type))
        for axis in range(2, GGML_MAX_DIMS):
            header.nb[axis] = header.nb[axis - 1] * header.ne[axis - 1]
        if name:
            set_name(part, name)
        return part

    def tensors(self) -> list[int]:
        """Every tensor of the arena, oldest first."""
        ctx = self.ptr
        found: list[int] = []
        tensor = ggml.ggml_get_first_tensor(ctx)
        while tensor:
            found.append(tensor)
            tensor = ggml.ggml_get_next_tensor(ctx, tensor)
        return found

    def find(self, name: str) -> int | None:
        """The tensor of that name, or None."""
        return ggml.ggml_get_tensor(self.ptr, name.encode())


class Graph(Owner):
    """A computation graph of at most ``size`` nodes and leaves, in an arena's memory (closed with the arena)."""

    def __init__(self, arena: TensorArena, size: int) -> None:
        super().__init__()
        ctx = arena.ptr
        needed = ggml.ggml_graph_overhead_custom(size, False)
        if ggml.ggml_used_mem(ctx) + needed > arena.mem_bytes:
            raise NativeError(
                f"expected {needed} free bytes in the arena for a graph of {size} nodes, found "
                f"{arena.mem_bytes - ggml.ggml_used_mem(ctx)} of {arena.mem_bytes}; make the arena larger"
            )
        self.size = size
        self._memory: tuple[GraphAllocator, int] | None = None
        graph = ggml.ggml_new_graph_custom(ctx, size, False)
        self._own("ggml_new_graph_custom", graph, _nothing_to_free, parent=arena)

    def expand(self, tensor: int) -> None:
        """Add a tensor and everything that it depends on."""
        ggml.ggml_build_forward_expand(self.ptr, tensor)

    @property
    def n_nodes(self) -> int:
        """The number of ops."""
        return ggml.ggml_graph_n_nodes(self.ptr)

    def nodes(self) -> list[int]:
        """The tensors that ops compute, in order of computation."""
        graph = self.ptr
        return [ggml.ggml_graph_node(graph, i) for i in range(ggml.ggml_graph_n_nodes(graph))]

    def find(self, name: str) -> int | None:
        """The node or leaf of that name, or None."""
        return ggml.ggml_graph_get_tensor(self.ptr, name.encode())

    def allocated_by(self, allocator: GraphAllocator, epoch: int) -> None:
        """Called by GraphAllocator: remember which memory the graph's tensors are in."""
        self._memory = (allocator, epoch)

    def check_memory(self) -> None:
        """Raise NativeError when the allocator that placed the graph's tensors has freed or moved that memory."""
        if self._memory is None:
            return
        allocator, epoch = self._memory
        if allocator.closed or allocator.epoch != epoch:
            raise NativeError(
                "expected the memory that the graph was allocated in, found that its GraphAllocator has "
                f"{'been closed' if allocator.closed else 'grown for another graph since'}; allocate the graph again, "
                "or reserve for the largest graph first"
            )


def set_name(tensor: int, name: str) -> None:
    """Name a tensor. Raises ValueError when ggml would cut the name (more than 63 bytes)."""
    raw = name.encode()
    if len(raw) >= GGML_MAX_NAME:
        raise ValueError(f"expected a tensor name of at most {GGML_MAX_NAME - 1} bytes, found {len(raw)}: {name!r}")
    ggml.ggml_set_name(tensor, raw)


def tensor_struct(tensor: int) -> ggml_tensor:
    """The tensor's header as a structure: type, ne, nb, data. It is a view: valid while the arena is open."""
    return ggml_tensor.from_address(tensor)


def tensor_shape(tensor: int) -> tuple[int, int, int, int]:
    """The tensor's ne, fastest axis first."""
    ne = tensor_struct(tensor).ne
    return (ne[0], ne[1], ne[2], ne[3])


def tensor_set(tensor: int, array: NDArray[Any], offset_bytes: int = 0) -> None:
    """Copy an array's bytes into a tensor, from ``offset_bytes`` on.

    Raises ValueError when the tensor has no memory or, at offset 0, when the sizes in bytes differ.
    """
    source = np.ascontiguousarray(array)
    nbytes = _check_placed(tensor)
    if offset_bytes < 0 or offset_bytes + source.nbytes > nbytes or (offset_bytes == 0 and source.nbytes != nbytes):
        raise ValueError(
            f"expected {nbytes} bytes for the tensor {_label(tensor)}, found {source.nbytes} bytes at offset "
            f"{offset_bytes} ({source.dtype}, numpy shape {source.shape})"
        )
    ggml_backend.ggml_backend_tensor_set(tensor, source.ctypes.data, offset_bytes, source.nbytes)


def memory_at(address: int, n_bytes: int) -> NDArray[np.uint8]:
    """Host memory that somebody else owns, as uint8 [n_bytes]: valid as long as its owner keeps it."""
    return np.frombuffer(memoryview((ctypes.c_uint8 * n_bytes).from_address(address)), np.uint8)


def tensor_memory(tensor: int, dtype: DTypeLike) -> NDArray[Any]:
    """A tensor's own memory on a host backend, [ne1, ne0] for one or two axes."""
    header = tensor_struct(tensor)
    shape = (header.ne[1], header.ne[0])
    if not header.data:
        raise ValueError(f"expected a tensor with memory, found {header.name!r} without")
    return memory_at(header.data, shape[0] * shape[1] * np.dtype(dtype).itemsize).view(dtype).reshape(shape)


def tensor_raw(tensor: int) -> NDArray[np.uint8]:
    """The bytes of a contiguous tensor on a host backend: its own memory, uint8 [n_bytes]."""
    n_bytes = _check_placed(tensor)
    return memory_at(tensor_struct(tensor).data or 0, n_bytes)


def tensor_get(tensor: int, dtype: DTypeLike, shape: Sequence[int] | int) -> NDArray[Any]:
    """A copy of a contiguous tensor's data as an array of ``dtype`` and numpy ``shape`` (slowest axis first)."""
    nbytes = _check_placed(tensor)
    target = np.empty(shape, dtype=dtype)
    if target.nbytes != nbytes or not ggml.ggml_is_contiguous(tensor):
        raise ValueError(
            f"expected {nbytes} contiguous bytes of the tensor {_label(tensor)}, asked for {target.nbytes} bytes "
            f"({target.dtype}, numpy shape {target.shape})"
        )
    ggml_backend.ggml_backend_tensor_get(tensor, target.ctypes.data, 0, nbytes)
    return target


def tensor_bytes(tensor: int, offset: int, n_bytes: int) -> NDArray[np.uint8]:
    """A copy of some bytes of a tensor."""
    if offset < 0 or n_bytes < 0 or offset + n_bytes > _check_placed(tensor):
        raise ValueError(f"expected bytes of the tensor {_label(tensor)}, asked for {n_bytes} at {offset}")
    target = np.empty(n_bytes, np.uint8)
    ggml_backend.ggml_backend_tensor_get(tensor, target.ctypes.data, offset, n_bytes)
    return target


def describe_op(node: int) -> str:
    """An op with the types and shapes of its result and operands, for messages."""
    header = tensor_struct(node)
    sources = [_label(source) for source in header.src if source]
    return f"{(ggml.ggml_op_desc(node) or b'?').decode()} {_label(node)} of {', '.join(sources) or 'nothing'}"


def _nothing_to_free(address: int) -> None:
    """A graph is part of its arena."""


def _check_placed(tensor: int) -> int:
    header = tensor_struct(tensor)
    owner = tensor_struct(header.view_src) if header.view_src else header
    if not owner.buffer or not header.data:
        raise ValueError(f"expected the tensor {_label(tensor)} to have memory; allocate its arena or its graph first")
    return ggml.ggml_nbytes(tensor)


def _label(tensor: int) -> str:
    header = tensor_struct(tensor)
    type_name = ggml.ggml_type_name(header.type) or b"?"
    return f"{header.name.decode('utf-8', 'replace')!r} ({type_name.decode()}, ne {tensor_shape(tensor)})"


def _check_shape(type: int, ne: Sequence[int]) -> None:
    if not 1 <= len(ne) <= GGML_MAX_DIMS or any(n < 1 for n in ne):
        raise ValueError(f"expected 1 to {GGML_MAX_DIMS} axes of at least one element, found ne {tuple(ne)}")
    block = ggml.ggml_blck_size(ggml.GGMLType(type))
    if ne[0] % block != 0:
        raise ValueError(
            f"{ggml.GGMLType(type).name}: expected axis 0 to be a multiple of {block}, found ne {tuple(ne)}"
        )
    if _data_bytes(type, ne) >= 2**62:
        raise ValueError(f"expected fewer than 2**62 bytes, found ne {tuple(ne)} of {ggml.GGMLType(type).name}")


def _data_bytes(type: int, ne: Sequence[int]) -> int:
    rows = 1
    for n in ne[1:]:
        rows *= n
    return (ne[0] // ggml.ggml_blck_size(type)) * ggml.ggml_type_size(type) * rows
