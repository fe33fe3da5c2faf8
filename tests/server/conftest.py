"""One echo server for all tests that leave it as it is, and a client for it."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from tests.support.echo_service import echo_server
from tests.support.models import model_cache
from tests.support.real_model import tiny_model

__all__ = ["model_cache", "tiny_model"]


@pytest.fixture(scope="session")
def echo_url() -> Iterator[str]:
    with echo_server() as (server, _, _):
        yield server.url


@pytest.fixture(scope="session")
def client(echo_url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=echo_url, timeout=20) as client:
        yield client
