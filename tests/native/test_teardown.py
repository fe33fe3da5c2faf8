"""Ends of processes: whatever is open and however it is left, exit code 0, empty stderr, flat memory."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., subprocess.CompletedProcess[str]]

PREAMBLE = """
import gc, os, sys, threading, time
import numpy as np
from pyluce.native import *
from pyluce.native import ggml as g
from pyluce.native.ggml import GGMLType

def make(path):
    backend = Backend(n_threads=2)
    arena = TensorArena.for_counts(8, 8)
    x = arena.new_tensor(GGMLType.F32, [256], "x")
    graph = Graph(arena, 8)
    graph.expand(g.ggml_scale(arena.ptr, x, 2.0))
    allocator = GraphAllocator(backend)
    allocator.alloc(graph)
    g_buffer = BackendBuffer.of_size(backend.buffer_type, 1 << 16)
    context = LlamaContext(path, n_ctx=64)
    context.decode([1, 2, 3])
    vocabulary = Vocabulary(path)
    chain = SamplerChain(vocabulary.n_tokens, vocabulary)
    chain.add_grammar('root ::= "a" root | "a"')
    chain.add_draw(1)
    backend.compute(graph)
    return [backend, arena, graph, allocator, g_buffer, context, vocabulary, chain, GgufFile(path)]

path = sys.argv[1]
"""

ENDINGS = {
    "exit with everything open": "owners = make(path)",
    "sys.exit with everything open": "owners = make(path); sys.exit(0)",
    "closed in order": "for owner in make(path): owner.close()",
    "closed in reverse order": "for owner in reversed(make(path)): owner.close()",
    "closed twice": "owners = make(path)\nfor owner in owners + owners[::-1]: owner.close()",
    "dropped": "make(path); gc.collect()",
    "held by a module global": "import types\nm = types.ModuleType('m'); sys.modules['m'] = m; m.kept = make(path)",
    "lost in a cycle": "owners = make(path)\nfor o in owners: o.cycle = owners\ndel owners, o\ngc.collect()",
    "in a cycle at exit": "owners = make(path)\nfor o in owners: o.cycle = owners\ngc.disable(); del owners, o",
    "exception half-way": """
class Broken(TensorArena):
    def __init__(self):
        super().__init__(1 << 16)
        self.buffer = BackendBuffer.of_size(Backend().buffer_type, 4096)
        raise ValueError("half-way")
try:
    Broken()
except ValueError:
    pass
""",
    "close called by an exit hook": "import atexit\nowners = make(path)\natexit.register(lambda: [o.close() for o in owners])",
    "made by a thread that ended": "t = threading.Thread(target=lambda: globals().update(o=make(path))); t.start(); t.join()",
    "held by a thread that waits": """
def work():
    global owners
    owners = make(path)
    ready.set()
    time.sleep(60)
ready = threading.Event()
threading.Thread(target=work, daemon=True).start()
ready.wait()
""",
    "forked child exits normally": """
import warnings
warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of a fork beside other threads: the workers
owners = make(path)
child = os.fork()
if child == 0:
    for owner in owners:
        try: owner.ptr
        except ForkedError: continue
        os._exit(3)
    owners[0].close()
    sys.exit(0)
status = os.waitpid(child, 0)[1]
assert status == 0, status
owners[0].compute(owners[2])
""",
    "forked child loads its own": """
import warnings
warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of a fork beside other threads: the workers
owners = make(path)
child = os.fork()
if child == 0:
    mine = make(path)
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
""",
}


@pytest.mark.parametrize("name", list(ENDINGS))
def test_process_ends_cleanly(run_python: Run, llama_path: Path, name: str) -> None:
    done = run_python(PREAMBLE + ENDINGS[name], llama_path)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "")


def test_a_crash_would_be_noticed(run_python: Run, llama_path: Path) -> None:
    double_free = "owners = make(path); context = owners[5]; context._handle._free(context.ptr)"
    done = run_python(PREAMBLE + double_free, llama_path)
    assert done.returncode != 0


def test_opening_and_closing_a_hundred_times_keeps_memory_flat(run_python: Run, llama_path: Path) -> None:
    program = """
import psutil
def resident(): return psutil.Process().memory_info().rss
def cycle(how):
    owners = make(path)
    if how: [o.close() for o in owners]
for i in range(30): cycle(i % 2)
gc.collect(); before = resident()
for i in range(100): cycle(i % 2)
gc.collect(); grown = resident() - before
print(grown)
keep = [make(path) for _ in range(10)]
print(resident() - before)
"""
    done = run_python(PREAMBLE + program, llama_path)
    assert (done.returncode, done.stderr) == (0, "")
    grown, held = (int(line) for line in done.stdout.split())
    assert grown < 3 << 20, f"100 rounds grew the process by {grown} bytes"
    assert held > 2 * max(grown, 1), "ten open sets must show, or this test measures nothing"


def test_a_fatal_native_error_shows_the_python_line(run_python: Run, llama_path: Path) -> None:
    program = "owners = make(path)\ng.ggml_mul_mat(owners[1].ptr, g.ggml_new_tensor_1d(owners[1].ptr, 0, 3), owners[1].find('x'))"
    done = run_python(PREAMBLE + program, llama_path)
    assert done.returncode == -6
    assert "native code stopped the process" in done.stderr and "ggml_can_mul_mat" in done.stderr
    assert "<string>" in done.stderr
