"""The comparisons themselves: one unit in the last place, a sign of zero and a NaN must show."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.compare import BytesDiffer, ValuesDiffer, assert_close, assert_same_bytes, logit_hash, row_hashes


def rows() -> np.ndarray:
    return np.random.default_rng(1).standard_normal((3, 17)).astype(np.float32)


def test_equal_bytes_pass() -> None:
    assert_same_bytes(rows(), rows(), "same")
    assert logit_hash(rows()) == logit_hash(rows())
    assert len(set(row_hashes(rows()))) == 3


@pytest.mark.parametrize("change", ("ulp", "nan"))
def test_smallest_change_shows(change: str) -> None:
    changed = rows()
    changed[2, 5] = np.nextafter(changed[2, 5], np.float32(9)) if change == "ulp" else np.nan
    with pytest.raises(BytesDiffer, match="the first is row 2: 1 of 17"):
        assert_same_bytes(changed, rows(), "changed")
    assert logit_hash(changed) != logit_hash(rows())


def test_sign_of_zero_shows() -> None:
    expected, actual = np.zeros((1, 4), np.float32), np.zeros((1, 4), np.float32)
    actual[0, 1] = -0.0
    with pytest.raises(BytesDiffer):
        assert_same_bytes(actual, expected, "zeros")


def test_expected_nan_proves_nothing() -> None:
    with pytest.raises(AssertionError, match="not finite"):
        assert_same_bytes(np.full((1, 2), np.nan), np.full((1, 2), np.nan), "both NaN")


def test_close_needs_value_and_argmax() -> None:
    assert assert_close(rows() + np.float32(5e-5), rows(), "near").argmax_agreement == 1.0
    with pytest.raises(ValuesDiffer):
        assert_close(rows() + np.float32(2e-4), rows(), "far")
    with pytest.raises(ValuesDiffer):
        assert_close(np.float32([[1.0, 1.00001]]), np.float32([[1.00001, 1.0]]), "another argmax")
    with pytest.raises(ValuesDiffer):
        assert_close(np.float32([[np.nan, 0]]), np.float32([[0, 0]]), "NaN")
