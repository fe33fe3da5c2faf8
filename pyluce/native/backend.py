"""Owners on a device: the backend that computes, buffers that hold data, the allocator of a graph's memory."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from pyluce.native import callbacks, ggml, log, luce, rpc
from pyluce.native import ggml_backend as api
from pyluce.native.devices import find_device, parse_device
from pyluce.native.errors import NativeError, UnsupportedOpError
from pyluce.native.ggml_backend import BackendBufferUsage, BackendDevType
from pyluce.native.library import load_libraries
from pyluce.native.owner import Owner
from pyluce.native.structs import ABORT_CALLBACK, GGML_MAX_N_THREADS, GGMLStatus
from pyluce.native.tensors import Graph, TensorArena, describe_op


class Backend(Owner):
    """A device that computes: "cpu" with a number of threads, "cuda:N", "hip:N" or "rpc:HOST:PORT". Used by the thread that made it.

    Raises ValueError for another name, NativeError when there is no such device. With more than one CPU thread the workers
    are kept from graph to graph, and spin between graphs for a while that ``poll`` sets (0 none, 100 longest). Measured on
    2 busy cores, 600 small ops, 2 threads: 2 ms with kept workers, 50 to 130 ms with ggml's default of new workers for
    every graph.
    """

    def __init__(self, name: str = "cpu", n_threads: int = 1, poll: int = 50) -> None:
        super().__init__()
        self.is_cpu = parse_device(name)[0] == "cpu"
        if not 0 <= poll <= 100:
            raise ValueError(f"expected a polling level from 0 to 100, found {poll}")
        self.name = name
        self.poll = poll
        self._busy = False  # something was started that was not waited for
        device = find_device(name)
        if not self.is_cpu:
            self.n_threads = 1
            self._cpu_only(n_threads == 1, f"{n_threads} threads")
            self._own("ggml_backend_dev_init", api.ggml_backend_dev_init(device, None), api.ggml_backend_free)
            return
        pools: list[int] = []
        self._pools = pools

        def free(address: int) -> None:
            api.ggml_backend_free(address)
            while pools:
                api.ggml_threadpool_free(pools.pop())

        self._own("ggml_backend_init_by_type", api.ggml_backend_init_by_type(BackendDevType.CPU, None), free)
        try:
            self.set_threads(n_threads)
        except BaseException:
            self.close()
            raise

    def set_threads(self, n_threads: int) -> None:
        """Use so many threads from the next graph on (1 to 512). ValueError on a GPU."""
        self._cpu_only(self.is_cpu, "a number of threads")
        if not 1 <= n_threads <= GGML_MAX_N_THREADS:
            raise ValueError(f"expected 1 to {GGML_MAX_N_THREADS} threads, found {n_threads}")
        backend = self.ptr
        if n_threads > 1:
            params = api.ggml_threadpool_params_default(n_threads)
            params.poll = self.poll
            pool = api.ggml_threadpool_new(ctypes.byref(params))
            if not pool:
                raise NativeError(f"ggml_threadpool_new returned NULL for {n_threads} threads", log.take())
            self._pools.append(pool)
            api.ggml_backend_cpu_set_threadpool(backend, pool)
        else:
            api.ggml_backend_cpu_set_threadpool(backend, None)
        api.ggml_backend_cpu_set_n_threads(backend, n_threads)
        while len(self._pools) > (n_threads > 1):
            api.ggml_threadpool_free(self._pools.pop(0))
        self.n_threads = n_threads

    def set_abort(self, should_abort: Callable[[], bool] | None) -> None:
        """Ask ``should_abort()`` between ops while a graph computes; None asks nothing.

        When it returns True, or raises (which is noted in the log), ``compute`` raises NativeError. ValueError on a GPU.
        """
        self._cpu_only(self.is_cpu, "an abort callback")
        pointer = self.ptr
        callback: Any = None
        if should_abort is not None:
            callback = callbacks.guarded(ABORT_CALLBACK, lambda _data: bool(should_abort()), default=True, what="abort")
        api.ggml_backend_cpu_set_abort_callback(pointer, callback, None)
        self._keep_alive(callback)

    def _cpu_only(self, fine: bool, what: str) -> None:
        if not fine:
            raise ValueError(f"expected the CPU for {what}, found the device {self.name}")

    @property
    def device(self) -> int:
        """The ``ggml_backend_dev_t``."""
        device = api.ggml_backend_get_device(self.ptr)
        if not device:
            raise NativeError(f"the backend {self.name!r} has no device", log.take())
        return device

    @property
    def buffer_type(self) -> int:
        """The default ``ggml_backend_buffer_type_t``."""
        return api.ggml_backend_get_default_buffer_type(self.ptr)

    @property
    def is_lost(self) -> bool:
        """Whether the connection to an `rpc:` device broke: nothing that was on it is there any more; a new Backend connects anew."""
        return rpc.ggml_backend_rpc_is_lost(self.ptr)

    def supports(self, tensor: int) -> bool:
        """Whether the device can compute this op with its sources where they are."""
        return api.ggml_backend_dev_supports_op(self.device, tensor)

    def check_supports(self, graph: Graph) -> None:
        """Raise UnsupportedOpError, naming the first op with its operands, unless the device computes every node of the graph.

        ggml itself would stop the process. Operands must be where they will be when it is computed.
        """
        for node in graph.nodes():
            if not self.supports(node):
                raise UnsupportedOpError(
                    f"expected ops that the device {self.name} computes, found {describe_op(node)}", log.take()
                )

    def compute(self, graph: Graph) -> None:
        """Compute a graph whose tensors have memory. Raises NativeError with the status and the log tail on failure."""
        self.start(graph)
        self.wait()

    def start(self, graph: Graph) -> None:
        """As `compute`, but a GPU may still compute when this returns: `wait` before anything but `fetch`. A CPU is done."""
        graph.check_memory()
        self._busy = True
        status = api.ggml_backend_graph_compute_async(self.ptr, graph.ptr)
        callbacks.raise_pending()
        check_status(status, "ggml_backend_graph_compute_async")

    def fetch(self, tensor: int, address: int, offset: int, n_bytes: int) -> None:
        """Copy bytes of a result to host memory behind what was started; they are there after `wait`."""
        self._busy = True
        api.ggml_backend_tensor_get_async(self.ptr, tensor, address, offset, n_bytes)

    def busy(self) -> None:
        """Something was started on this device by other means; `wait` is to wait for it."""
        self._busy = True

    def wait(self) -> None:
        """Return when everything is done that was started."""
        if self._busy:
            api.ggml_backend_synchronize(self.ptr)
            self._busy = False


class BackendBuffer(Owner):
    """Memory for tensor data. Made by ``for_arena``, ``from_pointer`` or ``of_size``."""

    def __init__(self, constructor: str, pointer: int | None, *, parent: Owner | None = None, keep: Any = None) -> None:
        super().__init__()
        self._own(constructor, pointer, api.ggml_backend_buffer_free, parent=parent, keep=keep)

    @classmethod
    def for_arena(
        cls, arena: TensorArena, buffer_type: int, usage: BackendBufferUsage = BackendBufferUsage.ANY
    ) -> BackendBuffer:
        """Memory of ``buffer_type`` for every tensor of the arena that has none. The arena holds it and closes it."""
        pointer = api.ggml_backend_alloc_ctx_tensors_from_buft(arena.ptr, buffer_type)
        buffer = cls("ggml_backend_alloc_ctx_tensors_from_buft", pointer, parent=arena)
        buffer.set_usage(usage)
        arena.buffers.append(buffer)
        return buffer

    @classmethod
    def of_size(cls, buffer_type: int, n_bytes: int) -> BackendBuffer:
        """Memory of ``buffer_type``; tensors are put into it with ``place``."""
        return cls("ggml_backend_buft_alloc_buffer", api.ggml_backend_buft_alloc_buffer(buffer_type, n_bytes))

    @classmethod
    def from_pointer(cls, address: int, n_bytes: int, keep: Any) -> BackendBuffer:
        """Host memory that exists already (an mmap, an array), not copied; ``keep`` holds it until then.

        ``address`` must be a multiple of the CPU tensor alignment.
        """
        alignment = api.ggml_backend_buft_get_alignment(api.ggml_backend_cpu_buffer_type())
        if not address or address % alignment or n_bytes <= 0:
            raise ValueError(
                f"expected a non-NULL address that is a multiple of {alignment} and a positive size, found "
                f"{address:#x} and {n_bytes} bytes"
            )
        pointer = api.ggml_backend_cpu_buffer_from_ptr(address, n_bytes)
        return cls("ggml_backend_cpu_buffer_from_ptr", pointer, keep=keep)

    @property
    def base(self) -> int:
        """Address of the first byte."""
        return api.ggml_backend_buffer_get_base(self.ptr) or 0

    @property
    def n_bytes(self) -> int:
        """Size in bytes."""
        return api.ggml_backend_buffer_get_size(self.ptr)

    def place(self, tensor: int, address: int) -> None:
        """Give a tensor without memory the bytes at ``address``. Raises ValueError when they are not in the buffer."""
        pointer = self.ptr
        end = address + api.ggml_backend_buft_get_alloc_size(api.ggml_backend_buffer_get_type(pointer), tensor)
        if address < self.base or end > self.base + self.n_bytes:
            raise ValueError(
                f"expected bytes within {self.base:#x} to {self.base + self.n_bytes:#x}, found {address:#x} to {end:#x}"
            )
        header = ggml.ggml_tensor.from_address(tensor)
        if header.buffer or header.data or header.view_src:
            raise ValueError(f"expected a tensor without memory that is not a view, found {header.name!r}")
        check_status(api.ggml_backend_tensor_alloc(pointer, tensor, address), "ggml_backend_tensor_alloc")

    def clear(self, value: int = 0) -> None:
        """Set every byte to ``value``."""
        api.ggml_backend_buffer_clear(self.ptr, value)

    def set_usage(self, usage: BackendBufferUsage) -> None:
        """Tell ggml what the memory is for."""
        api.ggml_backend_buffer_set_usage(self.ptr, usage)


class GraphAllocator(Owner):
    """Plans where a graph's intermediate tensors live (``ggml_gallocr``), and owns that memory.

    ``epoch`` counts how often the memory moved: a graph allocated in an earlier epoch must be allocated again, and
    ``Backend.compute`` refuses it. One allocator a retained graph, or one reserved for the largest, avoids that.
    """

    def __init__(self, backend: Backend) -> None:
        super().__init__()
        self.epoch = 0
        pointer = api.ggml_gallocr_new(backend.buffer_type)
        self._own("ggml_gallocr_new", pointer, api.ggml_gallocr_free, parent=backend)

    def reserve(self, graph: Graph) -> None:
        """Make the memory large enough for this graph. Raises NativeError when it cannot be had."""
        self._planned("ggml_gallocr_reserve", api.ggml_gallocr_reserve, graph)

    def alloc(self, graph: Graph) -> None:
        """Give every tensor of the graph its address. Raises NativeError when the memory cannot be had."""
        self._planned("ggml_gallocr_alloc_graph", api.ggml_gallocr_alloc_graph, graph)
        graph.allocated_by(self, self.epoch)
        luce.ggml_luce_graph_retain(graph.ptr)

    @property
    def n_bytes(self) -> int:
        """Size of the planned memory in bytes."""
        return api.ggml_gallocr_get_buffer_size(self.ptr, 0)

    def _planned(self, name: str, function: Callable[[int, int], bool], graph: Graph) -> None:
        before = self.n_bytes
        done = function(self.ptr, graph.ptr)
        if self.n_bytes != before:
            self.epoch += 1
        if not done:
            raise NativeError(f"{name} failed for a graph of {graph.n_nodes} nodes", log.take())


def check_status(status: int, what: str) -> None:
    """Raise NativeError unless a ``ggml_status`` is SUCCESS."""
    if status != GGMLStatus.SUCCESS:
        raise NativeError(f"{what} failed: {ggml.ggml_status_to_string(status).decode()} ({status})", log.take())


def cpu_repack_buffer_types() -> list[int]:
    """The CPU's extra buffer types (repacked weights), in ggml's order of preference; empty when it has none.

    A weight belongs there when ``ggml_backend_dev_supports_op`` says so for an op whose source is in such a buffer.
    """
    load_libraries()
    device = api.ggml_backend_dev_by_type(BackendDevType.CPU)
    if not device:
        raise NativeError("expected a CPU device, found none", log.take())
    registry = api.ggml_backend_dev_backend_reg(device)
    address = api.ggml_backend_reg_get_proc_address(registry, b"ggml_backend_dev_get_extra_bufts")
    if not address:
        return []
    get_types = ctypes.CFUNCTYPE(ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p)(address)
    found: list[int] = []
    types = get_types(device)
    while types and types[len(found)]:
        found.append(types[len(found)])
    return found


def cpu_repack_buffer_type() -> int | None:
    """The CPU's first extra buffer type whose name says that it repacks, or None."""
    for buffer_type in cpu_repack_buffer_types():
        if b"REPACK" in api.ggml_backend_buft_name(buffer_type).upper():
            return buffer_type
    return None
