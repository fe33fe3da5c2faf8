"""One server for all tests that do not kill it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.split.server import RpcServer
from tests.support.models import model_cache

__all__ = ["model_cache", "server"]


@pytest.fixture(scope="session")
def server() -> Iterator[RpcServer]:
    running = RpcServer()
    yield running
    running.kill()
