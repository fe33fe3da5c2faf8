"""NULL from every native constructor, failed statuses, full arenas, memory that moved: exceptions, never a crash."""

from __future__ import annotations

import ast
import gc
import mmap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyluce.native import (
    Backend,
    BackendBuffer,
    ClosedError,
    GgufFile,
    Graph,
    GraphAllocator,
    LlamaContext,
    LlamaModel,
    NativeError,
    SamplerChain,
    TensorArena,
    Vocabulary,
    WrongThreadError,
    cpu_repack_buffer_type,
    ggml,
    ggml_backend,
    gguf,
    llama,
    log,
    tensor_get,
    tensor_set,
)
from pyluce.native import (
    backend as backend_module,
)
from pyluce.native.ggml import GGMLType
from tests.native.small_models import write_llama
from tests.native.test_owner import in_thread

NATIVE = Path(backend_module.__file__).parent


def one_tensor() -> TensorArena:
    arena = TensorArena(4096)
    arena.new_tensor(GGMLType.F32, [4], "x")
    return arena


CONSTRUCTORS: dict[str, tuple[Any, Callable[[Path, Backend], Any]]] = {
    "ggml_init": (ggml, lambda path, backend: TensorArena(4096)),
    "ggml_new_graph_custom": (ggml, lambda path, backend: Graph(TensorArena(1 << 16), 8)),
    "ggml_backend_init_by_type": (ggml_backend, lambda path, backend: Backend()),
    "ggml_threadpool_new": (ggml_backend, lambda path, backend: Backend(n_threads=2)),
    "ggml_gallocr_new": (ggml_backend, lambda path, backend: GraphAllocator(backend)),
    "ggml_backend_buft_alloc_buffer": (
        ggml_backend,
        lambda path, backend: BackendBuffer.of_size(backend.buffer_type, 4096),
    ),
    "ggml_backend_cpu_buffer_from_ptr": (
        ggml_backend,
        lambda path, backend: BackendBuffer.from_pointer(1 << 20, 4096, None),
    ),
    "ggml_backend_alloc_ctx_tensors_from_buft": (
        ggml_backend,
        lambda path, backend: BackendBuffer.for_arena(one_tensor(), backend.buffer_type),
    ),
    "gguf_init_from_file": (gguf, lambda path, backend: GgufFile(path)),
    "llama_model_load_from_file": (llama, lambda path, backend: Vocabulary(path)),
    "llama_init_from_model": (llama, lambda path, backend: LlamaContext(path)),
    "llama_sampler_chain_init": (llama, lambda path, backend: SamplerChain(5)),
    "llama_sampler_init_greedy": (llama, lambda path, backend: SamplerChain(5).add_greedy()),
    "llama_sampler_clone": (llama, lambda path, backend: SamplerChain(5).clone()),
}


@pytest.mark.parametrize("name", list(CONSTRUCTORS))
def test_null_becomes_an_exception_with_the_log(
    name: str, llama_path: Path, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, make = CONSTRUCTORS[name]
    make(llama_path, backend)
    monkeypatch.setattr(module, name, lambda *_: log.note(f"reason of {name}"))
    with pytest.raises(NativeError) as caught:
        make(llama_path, backend)
    assert f"reason of {name}" in "\n".join(caught.value.log_tail)


def test_null_model_from_a_file_that_lacks_a_tensor(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "lacking.gguf", leave_out="blk.0.ffn_up.weight")
    for make in (LlamaModel, LlamaContext):
        with pytest.raises(NativeError, match="cannot load the model") as caught:
            make(path)
        assert any("blk.0.ffn_up.weight" in line for line in caught.value.log_tail)


@pytest.mark.parametrize(("status", "text"), [(-1, "FAILED|failed|error"), (-2, "alloc"), (1, "abort")])
def test_failed_status(backend: Backend, monkeypatch: pytest.MonkeyPatch, status: int, text: str) -> None:
    with TensorArena.for_counts(2, 8) as arena:
        graph = Graph(arena, 8)
        backend.compute(graph)
        monkeypatch.setattr(ggml_backend, "ggml_backend_graph_compute_async", lambda *_: status)
        with pytest.raises(NativeError, match=rf"(?i)ggml_backend_graph_compute_async failed: .*({text}).*\({status}\)"):
            backend.compute(graph)


def test_a_refused_allocation_is_an_error(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    with TensorArena.for_counts(2, 8) as arena, GraphAllocator(backend) as allocator:
        graph = Graph(arena, 8)
        for name, method in (("ggml_gallocr_reserve", "reserve"), ("ggml_gallocr_alloc_graph", "alloc")):
            monkeypatch.setattr(ggml_backend, name, lambda *_: False)
            with pytest.raises(NativeError, match=f"{name} failed"):
                getattr(allocator, method)(graph)


def test_memory_that_cannot_be_had(backend: Backend) -> None:
    with pytest.raises(MemoryError, match="cannot map"):
        TensorArena(1 << 60)
    with pytest.raises(NativeError, match="ggml_backend_buft_alloc_buffer returned NULL") as caught:
        BackendBuffer.of_size(backend.buffer_type, 1 << 60)
    assert any("failed to allocate" in line for line in caught.value.log_tail)


def test_a_full_arena_is_an_error() -> None:
    with TensorArena.for_counts(2) as arena:
        for name in ("a", "b"):
            arena.new_tensor(GGMLType.F32, [1], name)
        with pytest.raises(NativeError, match="free bytes in the arena for the tensor 'd'"):
            for name in ("c", "d"):
                arena.new_tensor(GGMLType.F32, [1], name)
        with pytest.raises(NativeError, match="free bytes in the arena for a graph of 2048 nodes"):
            Graph(arena, 2048)
        assert arena.find("b") in arena.tensors() and arena.find("x") is None


@pytest.mark.parametrize(
    ("type", "ne"),
    [(0, []), (0, [1] * 5), (0, [0]), (0, [4, -1]), (GGMLType.Q4_K, [128]), (0, [2**40, 2**30]), (31, [4]), (-1, [4])],
)
def test_bad_shapes_and_types_are_refused(type: int, ne: list[int]) -> None:
    with TensorArena(1 << 16) as arena, pytest.raises(ValueError):
        arena.new_tensor(type, ne)


def test_names_that_ggml_would_cut_are_refused() -> None:
    with TensorArena(1 << 16) as arena:
        arena.new_tensor(GGMLType.F32, [1], "x" * 63)
        with pytest.raises(ValueError, match="at most 63 bytes, found 64"):
            arena.new_tensor(GGMLType.F32, [1], "é" * 32)


def test_an_mmap_is_used_in_place_and_held(backend: Backend) -> None:
    memory = mmap.mmap(-1, 4096)
    array = np.frombuffer(memory, dtype=np.float32)
    array[:8] = np.arange(8)
    with TensorArena.for_counts(2) as arena:
        tensor = arena.new_tensor(GGMLType.F32, [8], "mapped")
        buffer = BackendBuffer.from_pointer(array.ctypes.data, 4096, keep=array)
        assert (buffer.base, buffer.n_bytes) == (array.ctypes.data, 4096)
        with pytest.raises(ValueError, match="expected bytes within"):
            buffer.place(tensor, buffer.base + 4096 - 16)
        buffer.place(tensor, buffer.base)
        with pytest.raises(ValueError, match="expected a tensor without memory"):
            buffer.place(tensor, buffer.base)
        array[0] = 42
        assert tensor_get(tensor, np.float32, 8).tolist() == [42, 1, 2, 3, 4, 5, 6, 7]
        del array
        gc.collect()
        with pytest.raises(BufferError):
            memory.close()
        buffer.close()
        gc.collect()
        memory.close()


def test_an_address_that_is_not_aligned_is_refused() -> None:
    for address, size in ((0, 64), (4097, 64), (4096, 0)):
        with pytest.raises(ValueError, match="expected a non-NULL address that is a multiple of 32"):
            BackendBuffer.from_pointer(address, size, None)


def double(arena: TensorArena, n: int) -> tuple[Graph, int]:
    graph = Graph(arena, 8)
    x = arena.new_tensor(GGMLType.F32, [n], "x")
    ggml.ggml_set_input(x)
    graph.expand(ggml.ggml_scale(arena.ptr, x, 2.0))
    return graph, x


def test_a_graph_whose_memory_moved_or_is_gone_is_not_computed(backend: Backend) -> None:
    with TensorArena(1 << 18) as arena:
        small, x = double(arena, 64)
        large, _ = double(arena, 1 << 16)
        allocator = GraphAllocator(backend)
        allocator.alloc(small)
        backend.compute(small)
        allocator.alloc(large)
        with pytest.raises(NativeError, match="grown for another graph since"):
            backend.compute(small)
        backend.compute(large)
        allocator.close()
        with pytest.raises(NativeError, match="been closed"):
            backend.compute(large)
    assert x


def test_reserving_the_largest_first_moves_nothing(backend: Backend) -> None:
    with TensorArena(1 << 18) as arena, GraphAllocator(backend) as allocator:
        large, _ = double(arena, 1 << 16)
        allocator.reserve(large)
        for n in (64, 128, 256):
            graph, x = double(arena, n)
            allocator.alloc(graph)
            tensor_set(x, np.ones(n, np.float32))
            backend.compute(graph)
            assert allocator.epoch == 1


def test_closed_owners_are_errors(backend: Backend) -> None:
    arena = TensorArena(1 << 16)
    graph = Graph(arena, 8)
    arena.close()
    for use in (lambda: arena.new_tensor(0, [1]), lambda: graph.n_nodes, lambda: backend.compute(graph)):
        with pytest.raises(ClosedError):
            use()
    backend.close()
    with pytest.raises(ClosedError):
        backend.set_threads(1)


def test_other_threads_are_refused_everywhere(backend: Backend, llama_path: Path) -> None:
    with TensorArena(1 << 16) as arena, LlamaContext(llama_path, n_ctx=32) as context, SamplerChain(5) as chain:
        graph = Graph(arena, 8)
        uses: list[Callable[[], Any]] = [
            lambda: arena.new_tensor(0, [1]),
            lambda: backend.compute(graph),
            lambda: context.decode([1]),
            lambda: context.clear(),
            lambda: chain.accept(1),
            lambda: chain.clone(),
            lambda: GraphAllocator(backend),
            lambda: BackendBuffer.for_arena(arena, 0),
            context.close,
        ]
        for use in uses:
            assert isinstance(in_thread(use), WrongThreadError)
        assert context.decode([1]) is not None


def test_thirty_two_threads_at_once_all_get_an_exception(llama_path: Path) -> None:
    raised: list[BaseException | None] = []
    with LlamaContext(llama_path, n_ctx=32) as context:
        threads = [
            threading.Thread(target=lambda: raised.append(in_thread(lambda: context.decode([1, 2])))) for _ in range(32)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [type(error) for error in raised] == [WrongThreadError] * 32


def test_repack_buffer_multiplies_like_the_plain_one(backend: Backend) -> None:
    buffer_type = cpu_repack_buffer_type()
    if buffer_type is None:
        pytest.skip("this CPU build repacks nothing")
    from pyluce.native import quantize

    weights = quantize(GGMLType.Q4_0, np.random.default_rng(1).standard_normal((64, 256)))
    x = np.random.default_rng(2).standard_normal((9, 256)).astype(np.float32)
    results = []
    for place in (backend.buffer_type, buffer_type):
        with TensorArena.for_counts(4) as held, TensorArena.for_counts(8, 8) as arena, GraphAllocator(backend) as plan:
            w = held.new_tensor(GGMLType.Q4_0, [256, 64], "w")
            buffer = BackendBuffer.for_arena(held, place, ggml_backend.BackendBufferUsage.WEIGHTS)
            tensor_set(w, weights)
            y = arena.new_tensor(GGMLType.F32, [256, 9], "y")
            ggml.ggml_set_input(y)
            out = ggml.ggml_mul_mat(arena.ptr, w, y)
            assert backend.supports(out)
            graph = Graph(arena, 8)
            graph.expand(out)
            plan.alloc(graph)
            tensor_set(y, x)
            backend.compute(graph)
            results.append(tensor_get(out, np.float32, (9, 64)))
            assert buffer.n_bytes >= weights.nbytes
    np.testing.assert_allclose(results[0], results[1], rtol=2e-2, atol=2e-1)


def test_every_status_is_looked_at() -> None:
    """No call whose result says whether it worked stands alone as a statement in the binding."""
    checked = {
        "ggml_backend_graph_compute",
        "ggml_backend_tensor_alloc",
        "ggml_backend_view_init",
        "ggml_gallocr_reserve",
        "ggml_gallocr_alloc_graph",
        "ggml_prec_set_acc",
        "ggml_prec_set_src",
        "llama_decode",
        "llama_memory_seq_rm",
        "llama_state_get_data",
        "llama_state_set_data",
        "llama_tokenize",
        "llama_detokenize",
    }
    found = []
    for path in NATIVE.parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
                function = node.value.func
                name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
                if name in checked:
                    found.append(f"{path.name}:{node.lineno}: {name}")
    assert found == []
