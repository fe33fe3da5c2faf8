"""The log ring, what reaches Python's logging, and callbacks that raise."""

from __future__ import annotations

import ctypes
import gc
import logging

import numpy as np
import pytest

from pyluce.native import (
    Backend,
    BackendBuffer,
    GgufFile,
    Graph,
    LlamaModel,
    NativeError,
    TensorArena,
    callbacks,
    ggml,
    log,
    tensor_get,
    tensor_set,
)
from pyluce.native.log import LogRing
from pyluce.native.structs import ABORT_CALLBACK, GGMLLogLevel, GGMLType

INFO, WARN, CONT, DEBUG = GGMLLogLevel.INFO, GGMLLogLevel.WARN, GGMLLogLevel.CONT, GGMLLogLevel.DEBUG


def test_pieces_become_lines() -> None:
    ring = LogRing()
    assert ring.add(INFO, "load ") == []
    assert ring.add(CONT, "..") == []
    assert ring.tail() == ["load .."]
    assert ring.add(CONT, " done\nnext\n") == [(INFO, "load .. done"), (INFO, "next")]
    assert ring.add(WARN, "careful\n\n") == [(WARN, "careful")]
    assert ring.tail() == ["load .. done", "next", "careful"]
    assert ring.tail(1) == ["careful"]


def test_a_line_explains_one_failure() -> None:
    ring = LogRing()
    ring.add(WARN, "one\ntwo\n")
    assert ring.take() == ["one", "two"] and ring.take() == []
    ring.add(WARN, "three\nfo")
    assert ring.take(1) == ["fo"] and ring.take() == ["fo"]
    ring.add(CONT, "ur\n")
    assert ring.take() == ["four"] and ring.tail() == ["one", "two", "three", "four"]


def test_ring_is_bounded_and_debug_lines_do_not_push_others_out() -> None:
    ring = LogRing(max_lines=3)
    ring.add(WARN, "reason\n")
    for i in range(100):
        assert ring.add(DEBUG, f"detail {i}\n") == [(DEBUG, f"detail {i}")]
    assert ring.tail() == ["reason"]
    for i in range(5):
        ring.add(INFO, f"{i}\n")
    assert ring.tail() == ["2", "3", "4"]


def test_a_native_failure_carries_the_native_reason(tmp_path: object) -> None:
    path = f"{tmp_path}/broken.gguf"
    with open(path, "wb") as file:
        file.write(b"NOPE" + bytes(64))
    log.ring.clear()
    with pytest.raises(NativeError) as caught:
        GgufFile(path)
    assert any("invalid magic" in line for line in caught.value.log_tail), caught.value.log_tail
    assert "invalid magic" in str(caught.value) and path in str(caught.value)


def test_lines_reach_python_logging(caplog: pytest.LogCaptureFixture, tmp_path: object) -> None:
    path = f"{tmp_path}/broken.gguf"
    with open(path, "wb") as file:
        file.write(b"NOPE" + bytes(64))
    with caplog.at_level(logging.DEBUG, logger="pyluce.native"), pytest.raises(NativeError):
        GgufFile(path)
    assert [r.levelno for r in caplog.records if "invalid magic" in r.message] == [logging.ERROR]


def test_a_raising_log_handler_does_not_cross_into_c(tmp_path: object) -> None:
    class Broken(logging.Handler):
        def handle(self, record: logging.LogRecord) -> bool:
            raise RuntimeError("handler failed")

    path = f"{tmp_path}/broken.gguf"
    with open(path, "wb") as file:
        file.write(b"NOPE" + bytes(64))
    handler = Broken()
    log.logger.addHandler(handler)
    try:
        with pytest.raises(NativeError, match="invalid magic"):
            GgufFile(path)
    finally:
        log.logger.removeHandler(handler)


def scaled_graph(backend: Backend, arena: TensorArena, n_nodes: int) -> tuple[Graph, int]:
    x = arena.new_tensor(GGMLType.F32, [64], "x")
    out = x
    for _ in range(n_nodes):
        out = ggml.ggml_scale_inplace(arena.ptr, out, 1.0)
    graph = Graph(arena, 512)
    graph.expand(out)
    BackendBuffer.for_arena(arena, backend.buffer_type)
    tensor_set(x, np.arange(64, dtype=np.float32))
    return graph, out


def test_callbacks_live_through_a_thousand_collections(backend: Backend) -> None:
    calls = 0

    def count_and_collect() -> bool:
        nonlocal calls
        calls += 1
        gc.collect()
        return False

    with TensorArena.for_counts(300, 512) as arena:
        graph, out = scaled_graph(backend, arena, 250)
        backend.set_abort(count_and_collect)
        del count_and_collect
        gc.freeze()  # leaves out what the other tests made: a collection then takes microseconds
        try:
            while calls < 1000:
                before = calls
                backend.compute(graph)
                assert calls > before
        finally:
            gc.unfreeze()
        assert tensor_get(out, np.float32, 64).tolist() == list(range(64))


def test_the_callback_is_held_by_its_owner(backend: Backend) -> None:
    backend.set_abort(lambda: False)
    assert backend._handle is not None and isinstance(backend._handle.keep, ABORT_CALLBACK)
    backend.set_abort(None)
    assert backend._handle.keep is None


def test_an_abort_is_a_native_error(backend: Backend) -> None:
    with TensorArena.for_counts(300, 512) as arena:
        graph, _ = scaled_graph(backend, arena, 250)
        backend.set_abort(lambda: True)
        with pytest.raises(NativeError, match="operation aborted"):
            backend.compute(graph)
        backend.set_abort(None)
        backend.compute(graph)


def test_an_abort_callback_that_raises_stops_the_graph_and_is_noted(backend: Backend) -> None:
    def fail() -> bool:
        raise LookupError("no such request")

    with TensorArena.for_counts(300, 512) as arena:
        graph, _ = scaled_graph(backend, arena, 250)
        backend.set_abort(fail)
        with pytest.raises(NativeError, match="abort callback raised LookupError: no such request"):
            backend.compute(graph)


def test_an_interrupt_inside_a_callback_is_raised_after_the_call(backend: Backend) -> None:
    def interrupt() -> bool:
        raise KeyboardInterrupt

    with TensorArena.for_counts(300, 512) as arena:
        graph, _ = scaled_graph(backend, arena, 250)
        backend.set_abort(interrupt)
        with pytest.raises(KeyboardInterrupt):
            backend.compute(graph)
        callbacks.raise_pending()


def test_an_interrupt_while_a_model_loads_frees_it(llama_path: object) -> None:
    def interrupt(_fraction: float) -> bool:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        LlamaModel(str(llama_path), progress=interrupt)
    LlamaModel(str(llama_path)).close()


def test_progress_callback_counts_cancels_and_may_raise(llama_path: object) -> None:
    seen: list[float] = []

    def watch(fraction: float) -> bool:
        gc.collect()
        seen.append(fraction)
        return True

    with LlamaModel(str(llama_path), progress=watch):
        assert seen[0] == 0.0 and seen[-1] == 1.0 and seen == sorted(seen)
    with pytest.raises(NativeError, match="cannot load the model"):
        LlamaModel(str(llama_path), progress=lambda _fraction: False)

    def fail(_fraction: float) -> bool:
        raise OSError("display is gone")

    with pytest.raises(NativeError, match="progress callback raised OSError: display is gone"):
        LlamaModel(str(llama_path), progress=fail)


def test_a_callback_returns_its_default_after_an_exception() -> None:
    def fail(_data: object) -> bool:
        raise ValueError("x")

    for default in (True, False):
        assert callbacks.guarded(ABORT_CALLBACK, fail, default=default, what="test")(ctypes.c_void_p()) is default
