"""Fixtures of the native tests."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pyluce.native import Backend, load_libraries
from tests.native.small_models import write_llama, write_vocabulary

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session", autouse=True)
def _libraries() -> None:
    load_libraries()


@pytest.fixture(scope="session")
def vocabulary_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_vocabulary(tmp_path_factory.mktemp("vocabulary") / "vocabulary.gguf")


@pytest.fixture(scope="session")
def llama_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("llama") / "llama.gguf")


@pytest.fixture
def backend() -> Iterator[Backend]:
    with Backend(n_threads=1) as backend:
        yield backend


@pytest.fixture
def run_python() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a program in a new interpreter with the project importable; its arguments are in ``sys.argv``."""

    def run(program: str, *arguments: object, timeout: float = 120) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-X", "faulthandler", "-c", program, *(str(a) for a in arguments)]
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout)

    return run
