"""These tests need ggml-hip on the fake runtime, in a process of their own: `make amd-run` builds it and starts them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from pyluce.native import load_libraries
from pyluce.native.library import LIBRARY_DIR_VARIABLE
from tests.rdna.kernels.device import ARCHS, LIBRARIES, FakeDevice, Interpreter

HERE = Path(__file__).parent
NAMED = Path(os.environ.get(LIBRARY_DIR_VARIABLE, "-")).resolve() == LIBRARIES
BUILT = (LIBRARIES / "libggml-hip.so").is_file()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = f"needs {LIBRARY_DIR_VARIABLE}={LIBRARIES}" if BUILT else "needs the libraries of `make amd-run`"
    for item in items:
        if HERE in item.path.parents and not (NAMED and BUILT):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(params=ARCHS)
def arch(request: pytest.FixtureRequest) -> str:
    """The architecture that a test runs on."""
    load_libraries("hip")
    return str(request.param)


@pytest.fixture
def device(arch: str) -> str:
    """Its device by our name."""
    return f"hip:{ARCHS.index(arch)}"


@pytest.fixture
def recorded(arch: str) -> Iterator[FakeDevice]:
    """Launches are recorded and not executed."""
    with FakeDevice() as fake:
        yield fake
    fake.check()


@pytest.fixture
def executed(arch: str) -> Iterator[FakeDevice]:
    """Launches are executed by the interpreter, which looks for races."""
    with FakeDevice(Interpreter()) as fake:
        yield fake
    fake.check()
