"""Measures the candidates of every product and makes a table of the best.

A product is timed as a graph of itself: several weights one after the other, more bytes than a GPU's cache holds, with a small op in
between so that no two become one launch, replayed without waiting. Row products are timed with 1, 2, 4 and 8 rows and get one
choice, since a row's bits must not depend on how many there are; chunk products one for each power of two of columns.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Final, Protocol

import numpy as np

from pyluce.native import ggml, luce
from pyluce.native.backend import Backend, BackendBuffer, GraphAllocator
from pyluce.native.ggml import GGMLType
from pyluce.native.luce import Phase
from pyluce.native.tensors import Graph, TensorArena, set_name, tensor_set
from pyluce.native.tune import SMALLEST_ROWS, TuneKind
from pyluce.tuning.apply import Choices, Site
from pyluce.tuning.products import Product
from pyluce.tuning.table import Entry, TuneTable

ROW_COUNTS: Final = (1, 2, 4, 8)
WEIGHT_BYTES: Final = 128 << 20
"""Weights that a graph reads at least: more than the cache of any GPU (50 MB of an H200, 64 MB of an RX 9700)."""
MAX_WEIGHTS: Final = 32
SMALL_CHUNK_GRAPH: Final = 4
WARM_UPS: Final = 3
"""Computations before the timed ones: ggml captures a graph in the second."""
ROUNDS: Final = 5
REPLAYS: Final = 3
MARGIN: Final = 0.02
"""What a candidate must gain over the default to replace it: less is noise."""
_number = itertools.count()
"""In the names of nodes: a device takes a graph that looks like one before for that, and replays what it captured then, choices and all."""
FILL: Final = 0x22
"""The byte that weights are made of: small positive numbers in every type."""


class Measured(Choices, Protocol):
    """`pyluce.native.tune.DeviceChoices`."""

    @property
    def driver(self) -> int:
        """The driver's version."""

    def candidates(self, kind: TuneKind, type_id: int, k: int, m: int, n_used: int, rows: int) -> list[int]:
        """What `choose` takes for this product; empty when there is no choice."""


Progress = Callable[[int, int, str], None]
Timer = Callable[[Product, Phase, int], "Timed"]


class Timed(Protocol):
    """One product with so many rows, ready to run. A context manager."""

    def seconds(self) -> float:
        """Of one product, with the choices that are set now."""

    def __enter__(self) -> Timed: ...
    def __exit__(self, *_: object) -> None: ...


class ProductTimer:
    """One product with `n_rows` rows on a device. Every call of `seconds` builds its graph anew, so that it has the choices of the moment."""

    def __init__(self, backend: Backend, product: Product, phase: Phase, n_rows: int) -> None:
        self._backend, self._product, self._phase, self._n_rows = backend, product, phase, n_rows
        self._stack = ExitStack()
        kind, p = GGMLType(product.type_id), product
        n_bytes = p.m * (p.k // ggml.ggml_blck_size(kind)) * ggml.ggml_type_size(kind) * max(1, p.n_expert)
        most = MAX_WEIGHTS if phase is Phase.ROW else SMALL_CHUNK_GRAPH
        self.n_products = most if p.n_expert else max(1, min(most, -(-WEIGHT_BYTES // n_bytes)))
        n_weights = max(1, min(self.n_products, -(-WEIGHT_BYTES // n_bytes)))
        try:
            self._arena = TensorArena.for_counts(n_weights + self.n_products + 2)
            self._stack.callback(self._arena.close)
            experts = (p.n_expert,) if p.n_expert else ()
            self._weights = [self._arena.new_tensor(kind, (p.k, p.m, *experts)) for _ in range(n_weights)]
            inputs = p.n_used if p.each_input else 1
            self._x = self._arena.new_tensor(GGMLType.F32, (p.k, inputs, n_rows) if p.n_expert else (p.k, n_rows))
            self._between = self._arena.new_tensor(GGMLType.F32, (32, 1))
            self._ids = [
                self._arena.new_tensor(GGMLType.I32, (p.n_used, n_rows))
                for _ in range(self.n_products * bool(p.n_expert))
            ]
            buffer = BackendBuffer.for_arena(self._arena, backend.buffer_type)
            buffer.clear(FILL)
            rng = np.random.default_rng(0)
            for ids in self._ids:
                tensor_set(
                    ids, np.ascontiguousarray(rng.random((n_rows, p.n_expert)).argsort(1)[:, : p.n_used], np.int32)
                )
        except BaseException:
            self._stack.close()
            raise

    def seconds(self) -> float:
        """Of one product: the fastest of `ROUNDS`, the small op beside it included."""
        n_nodes = 4 * self.n_products + 8
        with TensorArena.for_counts(n_nodes, n_nodes) as arena:
            graph = Graph(arena, n_nodes)
            for i in range(self.n_products):
                weight = self._weights[i % len(self._weights)]
                if self._product.n_expert:
                    node = ggml.ggml_mul_mat_id(arena.ptr, weight, self._x, self._ids[i])
                else:
                    node = ggml.ggml_mul_mat(arena.ptr, weight, self._x)
                luce.ggml_luce_set_phase(node, self._phase)
                set_name(node, f"timed {next(_number)}")
                graph.expand(node)
                between = luce.ggml_luce_silu_scale(arena.ptr, self._between, 1.0)
                assert between is not None
                graph.expand(between)
            self._backend.check_supports(graph)
            with GraphAllocator(self._backend) as allocator:
                allocator.alloc(graph)
                for _ in range(WARM_UPS):
                    self._backend.compute(graph)
                return min(self._round(graph) for _ in range(ROUNDS)) / (REPLAYS * self.n_products)

    def _round(self, graph: Graph) -> float:
        begun = time.perf_counter()
        for _ in range(REPLAYS):
            self._backend.start(graph)
        self._backend.wait()
        return time.perf_counter() - begun

    def __enter__(self) -> ProductTimer:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def measure(
    products: Sequence[Product],
    choices: Measured,
    timer: Timer,
    site: Site,
    *,
    model: str,
    chunk: int,
    progress: Progress = lambda done, total, what: None,
) -> TuneTable:
    """Time every candidate of every product and choose. `chunk`: columns of the largest chunk. Leaves no choice set."""
    work = list(_work(products, choices, chunk))
    entries: list[Entry] = []
    choices.clear()
    try:
        for done, (kind, product, rows, candidates) in enumerate(work):
            progress(
                done, len(work), f"{kind.name.lower()} {GGMLType(product.type_id).name} [{product.k}, {product.m}]"
            )
            found = _choose(choices, timer, kind, product, rows, candidates)
            if found is not None:
                entries.append(found)
    finally:
        choices.clear()
    return TuneTable(site.device, site.architecture, choices.driver, site.libraries, model, tuple(sorted(entries)))


def _work(
    products: Sequence[Product], choices: Measured, chunk: int
) -> Iterator[tuple[TuneKind, Product, int, list[int]]]:
    """Every product of which there is something to choose, with rows 0 for a row graph."""
    for product in products:
        most = SMALLEST_ROWS if product.last_rows else chunk
        columns = [SMALLEST_ROWS << i for i in range(16) if SMALLEST_ROWS << i < 2 * most]
        for kind, rows in ((TuneKind.ROW, 0), *((TuneKind.CHUNK, n) for n in columns)):
            candidates = choices.candidates(kind, *product.key, rows)
            if len(candidates) > 1:
                yield kind, product, rows, candidates


def _choose(
    choices: Measured, timer: Timer, kind: TuneKind, product: Product, rows: int, candidates: Sequence[int]
) -> Entry | None:
    """The best candidate, if it is better than what is done without a table."""
    counts = ROW_COUNTS if kind is TuneKind.ROW else (rows,)
    phase = Phase.ROW if kind is TuneKind.ROW else Phase.CHUNK
    times: dict[str, float] = {}
    gains: dict[int, float] = dict.fromkeys(candidates, 0.0)
    for count in counts:
        with timer(product, phase, count) as timed:
            choices.clear()
            default = timed.seconds()
            times[f"{count}:default"] = round(1e6 * default, 2)
            for value in candidates:
                if not choices.choose(kind, *product.key, rows, value):
                    raise RuntimeError(f"{product}: the candidate {value} was refused")
                seconds = timed.seconds()
                times[f"{count}:{value}"] = round(1e6 * seconds, 2)
                gains[value] += 1.0 - seconds / default
    best = max(candidates, key=lambda value: gains[value])
    if gains[best] / len(counts) < MARGIN:
        return None
    return Entry(kind, *product.key, rows, best, times)
