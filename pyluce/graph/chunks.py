"""Where a prompt is cut into chunks: a function of the request's own tokens, never of what else runs or is cached."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from pyluce.graph.options import CHUNK_UNIT
from pyluce.state.pages import PAGE_TOKENS

if TYPE_CHECKING:
    from pyluce.weights import HParams

SMALLEST_SPAN: Final = 256  # blocks


def pad_rows(n_rows: int) -> int:
    """Rows of the chunk graph that `n_rows` tokens run in: whole units, so that the matrix kernels see no odd rest."""
    return -(-n_rows // CHUNK_UNIT) * CHUNK_UNIT


def chunk_bounds(start: int, end: int, chunk_tokens: int, cuts: Iterable[int] | None = None) -> list[tuple[int, int]]:
    """The chunks [first, last) of positions start .. end - 1: cut at multiples of `chunk_tokens` and at `cuts`.

    Raises ValueError for a cut outside the range.
    """
    inner = set(range((start // chunk_tokens + 1) * chunk_tokens, end, chunk_tokens))
    for cut in cuts or ():
        if not start < cut < end:
            raise ValueError(f"expected cuts between {start + 1} and {end - 1}, found {cut}")
        inner.add(cut)
    edges = [start, *sorted(inner), end]
    return list(zip(edges, edges[1:], strict=False))


def span_blocks(h: HParams, pages_per_slot: int, n_tokens: int) -> int:
    """Bound on the indexer's blocks that a row of a sequence of `n_tokens` sees: a power of two, so that few graphs serve all lengths."""
    limit = pages_per_slot * (PAGE_TOKENS // h.compress_ratio)
    span = SMALLEST_SPAN
    while span * h.compress_ratio < n_tokens:
        span *= 2
    return min(span, limit)
