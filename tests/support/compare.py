"""Comparisons of logits: bit for bit (exactness), and within a bound (against an independent reference)."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np


class BytesDiffer(AssertionError):
    """Two sets of logits that had to be equal bit for bit are not; negative controls expect exactly this."""


class ValuesDiffer(AssertionError):
    """Logits are further from a reference than the bound, or another token wins."""


def logit_hash(logits: np.ndarray) -> str:
    """SHA-256 of the float32 bytes: NaN payloads and the sign of zero count."""
    return hashlib.sha256(np.ascontiguousarray(logits, dtype=np.float32).tobytes()).hexdigest()


def row_hashes(logits: np.ndarray) -> list[str]:
    """One hash a row of `logits` [n_rows, n_vocab]."""
    return [logit_hash(row) for row in np.atleast_2d(logits)]


def assert_same_bytes(actual: np.ndarray, expected: np.ndarray, what: str) -> None:
    """Raise BytesDiffer, naming the first row that differs and by how much, unless both hold the same finite bytes."""
    actual, expected = (np.atleast_2d(np.ascontiguousarray(x, dtype=np.float32)) for x in (actual, expected))
    if actual.shape != expected.shape:
        raise AssertionError(f"{what}: expected logits of shape {expected.shape}, found {actual.shape}")
    if not np.isfinite(expected).all():
        raise AssertionError(f"{what}: the expected logits are not finite, so they prove nothing")
    differ = actual.view(np.uint32) != expected.view(np.uint32)
    if differ.any():
        rows = np.flatnonzero(differ.any(axis=1))
        first = int(rows[0])
        gap = np.abs(actual[first].astype(np.float64) - expected[first].astype(np.float64)).max()
        raise BytesDiffer(
            f"{what}: {len(rows)} of {len(actual)} rows differ, the first is row {first}: "
            f"{int(differ[first].sum())} of {actual.shape[1]} values, by up to {gap:.3g}"
        )


@dataclass(frozen=True, slots=True)
class Distance:
    """How far logits are from a reference over all rows."""

    max_abs: float
    worst_row: int
    argmax_agreement: float

    def __str__(self) -> str:
        return (
            f"max |difference| {self.max_abs:.2e} (row {self.worst_row}), argmax agreement {self.argmax_agreement:.2%}"
        )


def distance(actual: np.ndarray, expected: np.ndarray) -> Distance:
    """`actual` against `expected`, both [n_rows, n_vocab]."""
    if actual.shape != expected.shape:
        raise AssertionError(f"expected logits of shape {expected.shape}, found {actual.shape}")
    gaps = np.abs(actual.astype(np.float64) - expected.astype(np.float64)).max(axis=1)
    gaps = np.where(np.isnan(gaps), np.inf, gaps)
    agree = float((actual.argmax(axis=1) == expected.argmax(axis=1)).mean())
    return Distance(float(gaps.max()), int(gaps.argmax()), agree)


def assert_close(actual: np.ndarray, expected: np.ndarray, what: str, limit: float = 1e-4) -> Distance:
    """Raise ValuesDiffer unless every value is within `limit` and every row has the same argmax."""
    found = distance(actual, expected)
    if not found.max_abs < limit or found.argmax_agreement < 1.0:
        raise ValuesDiffer(f"{what}: expected less than {limit:.0e} and the same argmax everywhere, found {found}")
    return found
