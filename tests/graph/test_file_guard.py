"""A model's file that is cut off or written to while the model runs: an error, never an answer, and never the end of the process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from pyluce.luce import Luce
from pyluce.weights import ModelError
from tests.support.device import LOAD_OPTIONS, only_cpu
from tests.support.models import SEED, TEST_SHAPE, ModelCache, model_cache  # noqa: F401
from tests.support.runs import open_runner

ROOT = Path(__file__).resolve().parents[2]

_CUT_OFF = """
import os, sys
from pathlib import Path
from pyluce.weights import ModelError, ModelFile
from tests.support.runs import open_runner

path = Path(sys.argv[1])
if sys.argv[2] == "unguarded":
    ModelFile.guard = lambda self: None
with open_runner(path, repack=False) as runner:
    state = runner.new_sequence()
    os.truncate(path, runner.model.shards[0].header.data_offset + 4096)
    for _ in range(2):
        try:
            runner.prefill(state, list(range(3, 60)))
        except ModelError as error:
            print(error)
            state.clear()
    state.free()
"""


@pytest.fixture
def model(model_cache: ModelCache, tmp_path: Path) -> Path:  # noqa: F811
    """Without an n-gram table, whose rows are read and not mapped."""
    path = tmp_path / "model.gguf"
    shape = replace(TEST_SHAPE, ple_layer=None).with_type("Q8_0")
    path.write_bytes(model_cache.write("guarded.gguf", shape, SEED).read_bytes())
    return path


def cut_off(model: Path, how: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", _CUT_OFF, str(model), how]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT)


@only_cpu
def test_a_file_that_is_cut_off_is_an_error_at_every_step_from_then_on(model: Path) -> None:
    size = model.stat().st_size
    done = cut_off(model, "guarded")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 2 and all(
        f"size: expected {size} bytes as when it was opened, found" in line for line in lines
    )
    assert "Restore the file and start again" in lines[0]


@only_cpu
def test_control_without_the_guard_the_process_ends(model: Path) -> None:
    assert cut_off(model, "unguarded").returncode == -signal.SIGBUS


def test_a_file_that_is_written_to_is_seen_by_the_next_sequence(model: Path) -> None:
    with open_runner(model, n_slots=2) as runner:
        first = runner.new_sequence()
        runner.prefill(first, list(range(3, 40)))
        status = model.stat()
        os.utime(model, ns=(status.st_atime_ns + 10**9, status.st_mtime_ns))
        runner.new_sequence().free()
        with model.open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"\0")
        os.utime(model, ns=(status.st_atime_ns, status.st_mtime_ns + 10**9))
        with pytest.raises(ModelError, match=f"expected {status.st_size} bytes, unchanged .* written to since"):
            runner.new_sequence()
        assert runner.n_free_slots == 1, "no slot is lost"
        first.free()


def test_requests_fail_until_the_file_is_as_it_was_and_loaded_again(model: Path) -> None:
    whole, status = model.read_bytes(), model.stat()
    prompt = list(range(3, 60))
    with Luce.load(model, max_ctx=256, max_concurrency=2, prefix_cache_mib=0, **LOAD_OPTIONS) as luce:
        expected = luce.generate(tokens=prompt, max_tokens=4, temperature=0.0).tokens
        os.truncate(model, status.st_size - 64)
        for _ in range(3):  # more than there are slots
            with pytest.raises(ModelError, match="written to since"):
                luce.generate(tokens=prompt, max_tokens=4, temperature=0.0)
        assert luce.stats().busy_slots == luce.stats().invariant_violations == 0
        model.write_bytes(whole)
        os.utime(model, ns=(status.st_atime_ns, status.st_mtime_ns))
        luce.park()
        luce.unpark()
        assert luce.generate(tokens=prompt, max_tokens=4, temperature=0.0).tokens == expected
