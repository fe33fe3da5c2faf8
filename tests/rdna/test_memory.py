"""Buffers, their bounds and what may not be written."""

from __future__ import annotations

import numpy as np
import pytest

from tests.rdna.bench import Bench, isa
from tests.rdna.errors import OutOfBounds, RdnaError
from tests.rdna.memory import Memory


def test_buffers_hold_what_is_put_there() -> None:
    memory = Memory()
    a, b = memory.alloc(np.arange(6, dtype=np.float32), "a"), memory.alloc(b"xyz", "b")
    memory.write(a + 4, np.array([7.0], np.float32))
    assert memory.read(a, np.float32, (2, 3)).tolist() == [[0, 7, 2], [3, 4, 5]]
    assert memory.read(b, np.uint8, 3).tobytes() == b"xyz"
    with pytest.raises(OutOfBounds, match="host read: 4 bytes .* nearest is b .*ends 1 bytes behind its end"):
        memory.read(b, np.uint32, 1)
    memory.free(b)
    with pytest.raises(OutOfBounds, match="nearest is a"):
        memory.read(b, np.uint8, 1)
    with pytest.raises(RdnaError, match="expected a buffer that starts at"):
        memory.free(b)


def test_memory_of_this_process() -> None:
    host = np.arange(8, dtype=np.int32)
    memory = Memory()
    memory.map(host.ctypes.data, host.nbytes, "host")
    memory.write(host.ctypes.data + 8, np.array([-5], np.int32))
    assert host[2] == -5
    with pytest.raises(RdnaError, match="overlaps host"):
        memory.map(host.ctypes.data + 4, 4)


def test_one_access_to_several_buffers() -> None:
    """Lanes with addresses in different buffers load each from its own; a lane outside stops the run."""
    from tinygrad.renderer.amd.dsl import v

    b = Bench("rdna3")
    first, second = (b.memory.alloc(np.arange(k, k + 16, dtype=np.int32)) for k in (100, 200))
    addresses = np.array([first + 4 * k for k in range(16)] + [second + 4 * k for k in range(16)], np.uint64)
    b.vectors[1, 0], b.vectors[2, 0] = addresses & np.uint64(0xFFFFFFFF), addresses >> np.uint64(32)
    b.run(isa("rdna3").global_load_b32(v[3], v[1:2]))
    assert b.get(3).tolist() == [*range(100, 116), *range(200, 216)]
    b.vectors[1, 0, 20] += 4 * 16
    with pytest.raises(OutOfBounds, match="global_load_b32"):
        b.run(isa("rdna3").global_load_b32(v[3], v[1:2]))


def test_read_only_memory() -> None:
    from tinygrad.renderer.amd.dsl import v

    host = np.zeros(32, np.uint32)
    b = Bench("rdna4")
    b.memory.map(host.ctypes.data, host.nbytes, "constants", writable=False)
    addresses = host.ctypes.data + 4 * np.arange(32, dtype=np.uint64)
    b.vectors[1, 0], b.vectors[2, 0] = addresses & np.uint64(0xFFFFFFFF), addresses >> np.uint64(32)
    i = isa("rdna4")
    b.run(i.global_load_b32(v[3], v[1:2]))
    with pytest.raises(OutOfBounds, match="global_store_b32.* read only"):
        b.run(i.global_store_b32(vaddr=v[1:2], vsrc=v[3]))
