"""The graphs that need the most memory: a runner makes them first, and a plan measures them."""

from __future__ import annotations

from pyluce.graph.chunks import pad_rows
from pyluce.graph.trunk import GraphKey
from pyluce.native.luce import Phase


def largest_graphs(chunk_rows: int, n_row_rows: int, span: int) -> list[GraphKey]:
    """A full chunk with and without logits (either may need more), and a row graph of `n_row_rows`, all with the widest span."""
    return [
        GraphKey(Phase.ROW, n_row_rows, n_row_rows, span),
        GraphKey(Phase.CHUNK, chunk_rows, 0, span),
        GraphKey(Phase.CHUNK, chunk_rows, pad_rows(1), span),
    ]
