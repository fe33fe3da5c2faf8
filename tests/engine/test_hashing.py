from __future__ import annotations

import hashlib
import struct

import numpy as np
import pytest

from pyluce.engine import StepHasher, hash_logits, hash_tokens
from pyluce.engine.hashing import hash_steps


def test_the_documented_byte_format() -> None:
    assert hash_tokens([1, 2, 300]) == hashlib.sha256(b"\x01\0\0\0\x02\0\0\0\x2c\x01\0\0").digest()
    assert hash_logits(np.array([1.0, -0.5], np.float32)) == hashlib.sha256(struct.pack("<2f", 1.0, -0.5)).digest()
    hasher = StepHasher()
    rows = [np.array([value], np.float32) for value in (1.0, 2.0)]
    steps = [hasher.add(row) for row in rows]
    assert hasher.steps == tuple(steps)
    assert hasher.digest() == hash_steps(steps) == hashlib.sha256(steps[0] + steps[1]).digest()


def test_one_bit_changes_the_hash() -> None:
    row = np.array([1.0, 2.0], np.float32)
    other = row.copy()
    other.view(np.uint32)[1] ^= 1
    assert hash_logits(row) != hash_logits(other)
    assert hash_logits(np.array([0.0], np.float32)) != hash_logits(np.array([-0.0], np.float32))


def test_a_strided_row_hashes_as_its_values() -> None:
    table = np.arange(8, dtype=np.float32).reshape(4, 2)
    assert hash_logits(table[:, 1]) == hash_logits(table[:, 1].copy())


def test_another_type_is_refused() -> None:
    with pytest.raises(TypeError, match="float64"):
        hash_logits(np.zeros(2))  # type: ignore[arg-type]
