"""Global memory: buffers at addresses, every access checked against their bounds."""

from __future__ import annotations

import bisect
import ctypes
from typing import Any

import numpy as np

from tests.rdna.codeobject import CodeObject
from tests.rdna.errors import OutOfBounds, RdnaError

FIRST_ADDRESS = 0x7F00_0000_0000
GUARD = 4096  # bytes between two buffers: no stray access lands in a neighbour unseen


class Buffer:
    """Bytes at ``start``."""

    def __init__(self, start: int, data: np.ndarray, name: str, writable: bool = True) -> None:
        self.start, self.name = start, name
        self.protected = 0 if writable else data.nbytes  # so many bytes from the start may not be written
        self.bytes = data
        self.end = start + data.nbytes

    def __str__(self) -> str:
        return f"{self.name} [{self.start:#x}, {self.end:#x}), {self.end - self.start} bytes"


class Memory:
    """The device's memory. Addresses are plain integers; buffers do not move."""

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.buffers: list[Buffer] = []
        self.next = FIRST_ADDRESS
        self.codes: dict[int, tuple[int, CodeObject]] = {}

    def alloc(self, data: int | bytes | bytearray | np.ndarray, name: str = "", align: int = 256) -> int:
        """A new buffer: of so many bytes (filled with 0xA5), or holding a copy of ``data``. Returns its address."""
        if isinstance(data, int):
            content = np.full(data, 0xA5, np.uint8)
        elif isinstance(data, np.ndarray):
            content = np.frombuffer(np.ascontiguousarray(data).tobytes(), np.uint8).copy()
        else:
            content = np.frombuffer(bytes(data), np.uint8).copy()
        start = -(-self.next // align) * align
        self.next = start + content.nbytes + GUARD
        self._insert(Buffer(start, content, name or f"buffer {len(self.buffers)}"))
        return start

    def map(self, address: int, nbytes: int, name: str = "", writable: bool = True) -> None:
        """Make ``nbytes`` of this process at ``address`` a buffer there (memory that a host runtime allocated)."""
        block = (ctypes.c_uint8 * nbytes).from_address(address)
        self._insert(Buffer(address, np.frombuffer(block, np.uint8), name or f"host {address:#x}", writable))

    def free(self, address: int) -> None:
        """Forget the buffer that starts at ``address``."""
        at = bisect.bisect_left(self.starts, address)
        if at == len(self.starts) or self.starts[at] != address:
            raise RdnaError(f"expected a buffer that starts at {address:#x}, found none.")
        del self.starts[at], self.buffers[at]

    def _insert(self, buffer: Buffer) -> None:
        at = bisect.bisect_right(self.starts, buffer.start)
        before = self.buffers[at - 1] if at else None
        after = self.buffers[at] if at < len(self.buffers) else None
        for other in (before, after):
            if other is not None and other.start < buffer.end and buffer.start < other.end:
                raise RdnaError(f"{buffer} overlaps {other}.")
        self.starts.insert(at, buffer.start)
        self.buffers.insert(at, buffer)

    def load_code(self, code: CodeObject) -> int:
        """Place the code object (once) and return its base address."""
        if id(code) not in self.codes:
            start = -(-self.next // 4096) * 4096
            self.next = start + len(code.image) + GUARD
            content = np.frombuffer(bytes(code.relocate(start)), np.uint8).copy()
            buffer = Buffer(start, content, f"code object {code.name}")
            buffer.protected = min((at for at, _ in code.writable), default=len(content))
            self._insert(buffer)
            self.codes[id(code)] = (start, code)
        return self.codes[id(code)][0]

    def read(self, address: int, dtype: Any, shape: int | tuple[int, ...]) -> np.ndarray:
        """A copy of ``shape`` numbers at ``address``."""
        count = int(np.prod(shape))
        size = count * np.dtype(dtype).itemsize
        buffer = self.at(address, size, "host read")
        start = address - buffer.start
        return buffer.bytes[start : start + size].copy().view(dtype).reshape(shape)

    def write(self, address: int, data: np.ndarray) -> None:
        """Store ``data`` at ``address``."""
        content = np.frombuffer(np.ascontiguousarray(data).tobytes(), np.uint8)
        buffer = self.at(address, content.nbytes, "host write")
        start = address - buffer.start
        buffer.bytes[start : start + content.nbytes] = content

    def at(self, address: int, size: int, what: object) -> Buffer:
        """The buffer that holds all ``size`` bytes; OutOfBounds names ``what`` and the nearest buffer."""
        index = bisect.bisect_right(self.starts, address) - 1
        if index >= 0 and address + size <= self.buffers[index].end:
            return self.buffers[index]
        raise OutOfBounds(f"{what}: {size} bytes at {address:#x} are in no buffer.{self._nearest(address, size)}")

    def _nearest(self, address: int, size: int) -> str:
        if not self.buffers:
            return " There is no buffer."
        near = min(self.buffers, key=lambda b: max(b.start - address, address + size - b.end, 0))
        where = (
            f"{near.start - address} bytes before"
            if address < near.start
            else f"ends {address + size - near.end} bytes behind"
        )
        return f" The nearest is {near}: the access {where}{' its end' if address >= near.start else ' it'}."

    def find(self, addresses: np.ndarray, size: int, what: object) -> list[tuple[Buffer, Any]]:
        """Buffers and which of ``addresses`` (uint64, not empty) lie in each; an index of ``...`` for all in one."""
        low, high = int(addresses.min()), int(addresses.max())
        index = bisect.bisect_right(self.starts, low) - 1
        if index >= 0 and high + size <= self.buffers[index].end:
            return [(self.buffers[index], ...)]
        indices = np.searchsorted(np.array(self.starts, np.uint64), addresses, side="right") - 1
        found = []
        for index in np.unique(indices):
            chosen = np.flatnonzero(indices == index)
            top = int(addresses[chosen].max())
            buffer = self.at(top if index >= 0 else low, size, what)
            found.append((buffer, chosen))
        return found
