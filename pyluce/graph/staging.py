"""Host memory in which inputs wait for their upload: page-locked where the device has such, so that it fetches them by itself."""

from __future__ import annotations

from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt

from pyluce.native import ggml_backend as api
from pyluce.native.backend import Backend, BackendBuffer
from pyluce.native.tensors import memory_at

S = TypeVar("S", bound=np.generic)

ALIGNMENT: Final = 256


class HostMemory:
    """Memory of the host that the device reads and writes by itself (page-locked), or plain memory where there is no such."""

    def __init__(self, backend: Backend) -> None:
        self._host_type = api.ggml_backend_dev_host_buffer_type(backend.device)
        self._buffer: BackendBuffer | None = None
        self.array = np.zeros(0, np.uint8)
        self.address = 0

    def grow(self, n_bytes: int) -> None:
        """Have `n_bytes`, zeroed, instead of what there was."""
        self.close()
        if self._host_type:
            self._buffer = BackendBuffer.of_size(self._host_type, n_bytes)
            self.array = memory_at(self._buffer.base, n_bytes)
            self.array[:] = 0
        else:
            self.array = np.zeros(n_bytes, np.uint8)
        self.address = self.array.ctypes.data

    def close(self) -> None:
        """Free it. Idempotent."""
        self.array = np.zeros(0, np.uint8)
        self.address = 0
        if self._buffer is not None:
            self._buffer.close()
            self._buffer = None


class Staging:
    """Two blocks of one size: while one is on its way to the device, the other can be filled.

    An upload stands in the device's stream before the step that needs it, so a block must not be written between `send` and
    the end of that step, which `computed` reports; `settle` waits for the uploads of a step that never ended.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._memory = HostMemory(backend)
        self._blocks = [self._memory.array, self._memory.array]
        self._under_way = False

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return self._blocks[0].nbytes

    def grow(self, n_bytes: int) -> None:
        """Make the blocks larger; arrays of the old ones must not be used any more."""
        self.settle()
        size = -(-n_bytes // ALIGNMENT) * ALIGNMENT
        self._memory.grow(2 * size)
        self._blocks = [self._memory.array[:size], self._memory.array[size:]]

    def array(self, block: int, offset: int, shape: tuple[int, ...], dtype: type[S]) -> npt.NDArray[S]:
        """Memory of a block as an array."""
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return self._blocks[block][offset : offset + size].view(dtype).reshape(shape)

    def send(self, tensor: int, address: int, n_bytes: int) -> None:
        """Copy bytes of a block into a tensor, before what is computed next."""
        self._under_way = True
        api.ggml_backend_tensor_set_async(self._backend.ptr, tensor, address, 0, n_bytes)

    def computed(self) -> None:
        """What was sent has been used."""
        self._under_way = False

    def settle(self) -> None:
        """Both blocks can be written after this."""
        if self._under_way:
            api.ggml_backend_synchronize(self._backend.ptr)
            self._under_way = False

    def close(self) -> None:
        """Free the blocks. Idempotent."""
        self.settle()
        self._memory.close()
        self._blocks = [self._memory.array, self._memory.array]
