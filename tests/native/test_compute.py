"""Graphs computed through the binding, against numpy."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

from pyluce.native import Backend, BackendBuffer, Graph, GraphAllocator, TensorArena, tensor_get, tensor_set
from pyluce.native import ggml as g
from pyluce.native.ggml import GGMLSortOrder, GGMLType

Builder = Callable[[int, dict[str, int]], int]


def compute(backend: Backend, inputs: dict[str, np.ndarray], build: Builder) -> np.ndarray:
    """Build and compute one graph; numpy shapes are the reverse of ne."""
    types = {np.dtype(np.float32): GGMLType.F32, np.dtype(np.int32): GGMLType.I32, np.dtype(np.int64): GGMLType.I64}
    with TensorArena.for_counts(len(inputs)) as weights, TensorArena.for_counts(64, 64) as arena:
        tensors = {name: weights.new_tensor(types[x.dtype], x.shape[::-1], name) for name, x in inputs.items()}
        BackendBuffer.for_arena(weights, backend.buffer_type)
        for name, x in inputs.items():
            tensor_set(tensors[name], x)
        out = build(arena.ptr, tensors)
        graph = Graph(arena, 64)
        graph.expand(out)
        with GraphAllocator(backend) as allocator:
            allocator.alloc(graph)
            backend.compute(graph)
            header = g.ggml_tensor.from_address(out)
            shape = list(reversed(header.ne))
            return tensor_get(out, np.int32 if header.type == GGMLType.I32 else np.float32, shape)


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def test_matrix_product_and_swiglu(backend: Backend) -> None:
    x, gate, up, down = random(5, 32), random(48, 32, seed=1), random(48, 32, seed=2), random(32, 48, seed=3)

    def build(ctx: int, t: dict[str, int]) -> int:
        hidden = g.ggml_swiglu_split(ctx, g.ggml_mul_mat(ctx, t["gate"], t["x"]), g.ggml_mul_mat(ctx, t["up"], t["x"]))
        return g.ggml_mul_mat(ctx, t["down"], hidden)

    found = compute(backend, {"x": x, "gate": gate, "up": up, "down": down}, build)
    a = x.astype(np.float64) @ gate.T
    expected = (a / (1 + np.exp(-a)) * (x @ up.T)) @ down.T
    np.testing.assert_allclose(found[0, 0], expected, rtol=1e-4, atol=1e-4)


def test_norm_scale_softmax(backend: Backend) -> None:
    x = random(4, 64)
    found = compute(
        backend,
        {"x": x},
        lambda ctx, t: g.ggml_soft_max(ctx, g.ggml_scale(ctx, g.ggml_rms_norm(ctx, t["x"], 1e-6), 0.5)),
    )
    y = 0.5 * x / np.sqrt((x.astype(np.float64) ** 2).mean(axis=1, keepdims=True) + 1e-6)
    e = np.exp(y - y.max(axis=1, keepdims=True))
    np.testing.assert_allclose(found[0, 0], e / e.sum(axis=1, keepdims=True), rtol=1e-5)


def test_rows_are_read_and_written(backend: Backend) -> None:
    table, rows = random(10, 8), random(2, 8, seed=1)
    picked, places = np.array([7, 0, 7], np.int32), np.array([3, 9], np.int64)
    inputs = {"table": table, "rows": rows, "picked": picked, "places": places}
    found = compute(backend, inputs, lambda ctx, t: g.ggml_get_rows(ctx, t["table"], t["picked"]))
    assert np.array_equal(found[0, 0], table[picked])
    found = compute(backend, inputs, lambda ctx, t: g.ggml_set_rows(ctx, t["table"], t["rows"], t["places"]))
    expected = table.copy()
    expected[places] = rows
    assert np.array_equal(found[0, 0], expected)


def test_views_permutes_and_concat(backend: Backend) -> None:
    x = random(3, 4, 6)

    def build(ctx: int, t: dict[str, int]) -> int:
        part = g.ggml_view_3d(ctx, t["x"], 2, 4, 3, 6 * 4, 24 * 4, 2 * 4)
        swapped = g.ggml_cont(ctx, g.ggml_permute(ctx, part, 1, 0, 2, 3))
        return g.ggml_concat(ctx, swapped, swapped, 1)

    part = x[:, :, 2:4].transpose(0, 2, 1)
    assert np.array_equal(compute(backend, {"x": x}, build)[0], np.concatenate([part, part], axis=1))


def test_experts_picked_by_id(backend: Backend) -> None:
    experts, x, ids = random(4, 6, 8), random(3, 1, 8, seed=1), np.array([[0, 3], [2, 1], [3, 3]], np.int32)
    inputs = {"experts": experts, "x": x, "ids": ids}
    found = compute(backend, inputs, lambda ctx, t: g.ggml_mul_mat_id(ctx, t["experts"], t["x"], t["ids"]))
    expected = np.stack([[experts[i] @ x[row, 0] for i in ids[row]] for row in range(3)])
    np.testing.assert_allclose(found[0], expected, rtol=1e-5, atol=1e-6)


def test_sorting(backend: Backend) -> None:
    x = np.random.default_rng(5).permutation(24).reshape(2, 12).astype(np.float32)
    order = compute(backend, {"x": x}, lambda ctx, t: g.ggml_argsort(ctx, t["x"], GGMLSortOrder.DESC))
    assert np.array_equal(order[0, 0], np.argsort(-x, axis=1))
    best = compute(backend, {"x": x}, lambda ctx, t: g.ggml_top_k(ctx, t["x"], 3))
    assert [set(row) for row in best[0, 0]] == [set(np.argsort(-row)[:3]) for row in x]
    assert (
        compute(backend, {"x": x}, lambda ctx, t: g.ggml_argmax(ctx, t["x"])).ravel().tolist() == x.argmax(1).tolist()
    )


def test_reductions_and_repeat(backend: Backend) -> None:
    x = random(3, 5)
    sums = compute(backend, {"x": x}, lambda ctx, t: g.ggml_sum_rows(ctx, t["x"]))
    np.testing.assert_allclose(sums.ravel(), x.sum(axis=1), rtol=1e-5)
    repeated = compute(backend, {"x": x}, lambda ctx, t: g.ggml_repeat_4d(ctx, t["x"], 10, 3, 2, 1))
    assert np.array_equal(repeated[0], np.tile(x, (2, 1, 2)).reshape(2, 3, 10))


def test_two_threads_compute_the_same(backend: Backend) -> None:
    x, w = random(7, 256), random(64, 256, seed=1)
    one = compute(backend, {"x": x, "w": w}, lambda ctx, t: g.ggml_mul_mat(ctx, t["w"], t["x"]))
    backend.set_threads(2)
    two = compute(backend, {"x": x, "w": w}, lambda ctx, t: g.ggml_mul_mat(ctx, t["w"], t["x"]))
    np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-5)


def test_workers_are_kept_and_given_back() -> None:
    import psutil

    def check(expected: int) -> None:
        for _ in range(100):  # a joined thread may be listed a moment longer
            if process.num_threads() == expected:
                return
            time.sleep(0.02)
        assert process.num_threads() == expected

    process = psutil.Process()
    before = process.num_threads()
    with Backend(n_threads=3) as backend:
        check(before + 2)
        backend.set_threads(2)
        check(before + 1)
        x = random(4, 64)
        assert np.array_equal(compute(backend, {"x": x}, lambda ctx, t: g.ggml_scale(ctx, t["x"], 2.0))[0, 0], x * 2)
        check(before + 1)
        backend.set_threads(1)
        check(before)
        backend.set_threads(2)
    check(before)
    for n_threads in (0, 513):
        with pytest.raises(ValueError, match="expected 1 to 512 threads"):
            Backend(n_threads=n_threads)


def test_a_kept_graph_is_replayed_with_new_inputs(backend: Backend) -> None:
    with TensorArena.for_counts(8, 8) as arena, GraphAllocator(backend) as allocator:
        x = arena.new_tensor(GGMLType.F32, [16], "x")
        g.ggml_set_input(x)
        out = g.ggml_scale(arena.ptr, x, 2.0)
        g.ggml_set_output(out)
        graph = Graph(arena, 8)
        graph.expand(out)
        allocator.alloc(graph)
        assert graph.n_nodes == 1 and graph.nodes() == [out] and graph.find("x") == x
        for step in range(3):
            values = np.arange(16, dtype=np.float32) + step
            tensor_set(x, values)
            backend.compute(graph)
            assert np.array_equal(tensor_get(out, np.float32, 16), values * 2)


def test_other_threads_run_while_a_graph_computes(backend: Backend) -> None:
    gaps: list[float] = []
    stop = threading.Event()

    def tick() -> None:
        last = time.perf_counter()
        while not stop.is_set():
            time.sleep(0.002)
            now = time.perf_counter()
            gaps.append(now - last)
            last = now

    with TensorArena.for_counts(8, 8) as arena, GraphAllocator(backend) as allocator:
        a = arena.new_tensor(GGMLType.F32, [2048, 2048], "a")
        ggml_graph = Graph(arena, 8)
        ggml_graph.expand(g.ggml_mul_mat(arena.ptr, a, a))
        allocator.alloc(ggml_graph)
        tensor_set(a, np.ones((2048, 2048), np.float32))
        thread = threading.Thread(target=tick)
        thread.start()
        begin = time.perf_counter()
        backend.compute(ggml_graph)
        took = time.perf_counter() - begin
        stop.set()
        thread.join()
    assert took > 0.05 and len(gaps) >= 5, f"{len(gaps)} ticks in {took:.3f} s"


@pytest.mark.parametrize("array", [np.zeros(3, np.float32), np.zeros(5, np.float32), np.zeros(4, np.float64)])
def test_wrong_sizes_are_refused(backend: Backend, array: np.ndarray) -> None:
    with TensorArena.for_counts(1) as arena:
        tensor = arena.new_tensor(GGMLType.F32, [4], "four")
        with pytest.raises(ValueError, match="memory"):
            tensor_set(tensor, np.zeros(4, np.float32))
        BackendBuffer.for_arena(arena, backend.buffer_type)
        with pytest.raises(ValueError, match=r"'four' \(f32, ne \(4, 1, 1, 1\)\)"):
            tensor_set(tensor, array)
        with pytest.raises(ValueError, match="expected 16 contiguous bytes"):
            tensor_get(tensor, array.dtype, array.shape)
        tensor_set(tensor, np.arange(4, dtype=np.float32))
        assert tensor_get(tensor, np.float32, (2, 2)).tolist() == [[0, 1], [2, 3]]
