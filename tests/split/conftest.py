"""One expert device for all tests that do not kill it: a server, or a second GPU beside the one under test."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.split.server import RpcServer
from tests.support.device import ON_GPU
from tests.support.models import model_cache

__all__ = ["expert_device", "model_cache", "server"]

SECOND = os.environ.get("LUCE_TEST_EXPERT_DEVICE", "")
"""Beside `LUCE_TEST_DEVICE=cuda:0`: the device that has the experts."""


@pytest.fixture(scope="session")
def server() -> Iterator[RpcServer]:
    running = RpcServer()
    yield running
    running.kill()


@pytest.fixture(scope="session")
def expert_device(request: pytest.FixtureRequest) -> str:
    if SECOND:
        return SECOND
    if ON_GPU:
        pytest.skip("LUCE_TEST_EXPERT_DEVICE names a second GPU")
    found: RpcServer = request.getfixturevalue("server")
    return found.device
