"""The graphs that need the most memory: a runner makes them first, and a plan measures them."""

from __future__ import annotations

from pyluce.graph.chunks import pad_rows
from pyluce.graph.trunk import GraphKey
from pyluce.native.luce import Phase


def largest_graphs(chunk_rows: int, n_row_rows: int, span: int, n_streams: int = 1) -> list[GraphKey]:
    """A full chunk of each stream with and without logits (either may need more), and a row graph of `n_row_rows`, all with the widest span."""
    chunks = [
        GraphKey(Phase.CHUNK, chunk_rows, n, span, stream) for stream in range(n_streams) for n in (0, pad_rows(1))
    ]
    return [GraphKey(Phase.ROW, n_row_rows, n_row_rows, span), *chunks]
