"""The instruction tables need tinygrad (Python 3.11 and later); compiled kernels a HIP compiler: `make amd-check` fetches
one into build/rocm, LUCE_ROCM names another."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from buildtools import rocm
from buildtools.report import BuildError

ROOT = Path(__file__).resolve().parents[2]
NEEDED = ("tinygrad", "msgpack", "elftools")
MISSING = [name for name in NEEDED if importlib.util.find_spec(name) is None]
collect_ignore_glob = ["test_*.py", "kernels/*"] if MISSING else []
FLAGS = "-x hip --cuda-device-only --no-gpu-bundle-output -O3 -std=gnu++17 -ffp-contract=off".split()


def toolchain() -> Path | None:
    """The folder of clang++ for AMD GPUs, or None."""
    for folder in filter(None, (os.environ.get("LUCE_ROCM"), ROOT / "build" / "rocm", "/opt/rocm")):
        try:
            return rocm.programs(Path(folder))
        except BuildError:
            continue
    return None


@pytest.fixture(scope="session", params=["gfx1151", "gfx1201"])
def target(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def arch(target: str) -> str:
    """tinygrad's name of the target's instruction set."""
    return {"gfx1151": "rdna3", "gfx1201": "rdna4"}[target]


@pytest.fixture(scope="session")
def compiled(target: str) -> Callable[[str], Any]:
    """A file of tests/rdna/sources as a code object; kept in build/rdna by what it was made of."""
    from tests.rdna import CodeObject

    programs = toolchain()
    if programs is None:
        pytest.skip("no HIP compiler: make amd-check fetches one, LUCE_ROCM names one")

    def compile_source(name: str) -> CodeObject:
        source = Path(__file__).parent / "sources" / name
        made_of = " ".join([*FLAGS, target, str(programs)]).encode() + source.read_bytes()
        code = ROOT / "build" / "rdna" / f"{source.stem}.{target}.{hashlib.sha256(made_of).hexdigest()[:16]}.co"
        if not code.is_file():
            code.parent.mkdir(parents=True, exist_ok=True)
            part = code.with_suffix(f".{os.getpid()}")
            command = [str(programs / "clang++"), *FLAGS, f"--offload-arch={target}", str(source), "-o", str(part)]
            subprocess.run(command, check=True)
            part.replace(code)
        return CodeObject.load(code)

    return compile_source
