"""Parking over HTTP and from the command line, on the model that ships with the package."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner

from cli.main import luce as luce_command
from pyluce.luce import Luce
from pyluce.options import LoadOptions
from pyluce.server import LuceServer
from tests.support.disk import quick_disk  # noqa: F401
from tests.support.echo_service import echo_server, running_server
from tests.support.real_model import require_libraries

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LuceServer]:
    require_libraries()
    folder = tmp_path_factory.mktemp("cache")
    options = LoadOptions(
        max_ctx=1024, threads=1, max_concurrency=2, prefix_cache_mib=64, cache_dir=folder, park_after=600
    )
    with Luce.load_with(None, options) as luce, running_server(luce, options) as server:
        yield server


@pytest.fixture
def client(server: LuceServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        client.post("/unpark").raise_for_status()
        yield client


def chat(text: str, **options: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 40, **options}


def test_park_and_unpark(client: httpx.Client) -> None:
    before = client.post(CHAT, json=chat("What is the capital of France?")).json()
    assert client.get("/health").json()["parked"] is None
    assert client.post("/park").json() == {"status": "parked", "changed": True}
    assert client.post("/park", json={"discard": False}).json() == {"status": "parked", "changed": False}
    health = client.get("/health")
    assert health.status_code == 503 and health.json()["status"] == "parked" and not health.json()["ready"]
    assert client.get("/health/live").status_code == 200
    props = client.get("/props").json()
    assert props["daemon"] == {
        "alive": True,
        "parked": True,
        "parked_reason": "it was asked for",
        "park_after_s": 600,
        "unpark_on_request": False,
    }
    assert props["full_cache"]["enabled"] is True
    assert client.get("/status/json").json()["health"]["status"] == "parked"
    assert client.get("/status/json").json()["activity"] == "parked"
    assert client.get("/metrics").status_code == 200
    for path, body in (
        (CHAT, chat("x")),
        (CHAT, chat("x", stream=True)),
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/responses", {"input": "x"}),
    ):
        refused = client.post(path, json=body)
        assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 1
        error = refused.json()["error"]
        assert error["code"] == "model_parked" and "/unpark loads it again" in error["message"]
    anthropic = client.post("/v1/messages", json=chat("x"))
    assert anthropic.status_code == 503 and anthropic.json()["error"]["type"] == "overloaded_error"
    assert client.post("/tokenize", json={"content": "x"}).status_code == 200, "the vocabulary stays"
    assert client.post("/unpark").json() == {"status": "loaded", "changed": True}
    assert client.post("/unpark").json() == {"status": "loaded", "changed": False}
    health = client.get("/health")
    assert health.status_code == 200 and health.json()["status"] in ("ok", "busy")
    after = client.post(CHAT, json=chat("What is the capital of France?")).json()
    assert after["choices"] == before["choices"]
    assert after["usage"]["prompt_tokens_details"]["cached_tokens"] == before["usage"]["prompt_tokens"]
    assert client.get("/props").json()["full_cache"]["in_use"] > 0


def test_a_stream_goes_on_after_a_park(client: httpx.Client, server: LuceServer) -> None:
    body = {"prompt": "Once upon a time", "max_tokens": 400}
    whole = client.post("/v1/completions", json=body).json()["choices"][0]["text"]
    pieces: list[str] = []
    with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
        for line in response.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            pieces.append(json.loads(line[6:])["choices"][0]["text"])
            if len(pieces) == 4:
                httpx.post(server.url + "/park", timeout=60).raise_for_status()
                assert httpx.get(server.url + "/health").json()["busy_slots"] == 1, "it is not finished yet"
                httpx.post(server.url + "/unpark", timeout=60).raise_for_status()
    assert "".join(pieces) == whole


def test_the_commands(client: httpx.Client, server: LuceServer) -> None:
    runner = CliRunner()
    for command, said in (
        ("park", "parked"),
        ("park", "parked already"),
        ("unpark", "loaded"),
        ("unpark", "loaded already"),
    ):
        result = runner.invoke(luce_command, [command, "--url", server.url])
        assert result.exit_code == 0 and result.output == said + "\n"
    result = runner.invoke(luce_command, ["park", "--url", "http://127.0.0.1:1"])
    assert result.exit_code == 1 and "no server answers there" in result.output


def test_bad_bodies(client: httpx.Client) -> None:
    assert client.post("/park", json={"discard": "yes"}).status_code == 400
    assert client.post("/park", json={"now": True}).status_code == 400
    assert client.get("/park").status_code == 405


def test_what_would_be_lost_is_a_conflict() -> None:
    require_libraries()
    options = LoadOptions(max_ctx=512, threads=1, max_concurrency=1, prefix_cache_mib=64)
    with Luce.load_with(None, options) as luce, running_server(luce, options) as server:
        with httpx.Client(base_url=server.url, timeout=60) as client:
            client.post(CHAT, json=chat("Hello.")).raise_for_status()
            refused = client.post("/park")
            assert refused.status_code == 409 and refused.json()["error"]["code"] == "cannot_park"
            result = CliRunner().invoke(luce_command, ["park", "--url", server.url])
            assert result.exit_code == 1 and "would be lost" in result.output
            result = CliRunner().invoke(luce_command, ["park", "--discard", "--url", server.url])
            assert result.exit_code == 0
            client.post("/unpark").raise_for_status()
            assert client.post(CHAT, json=chat("Hello.")).status_code == 200


def test_a_request_brings_it_back_where_that_was_asked_for(tmp_path: Path) -> None:
    require_libraries()
    options = LoadOptions(
        max_ctx=512, threads=1, max_concurrency=1, prefix_cache_mib=64, cache_dir=tmp_path, unpark_on_request=True
    )
    with Luce.load_with(None, options) as luce, running_server(luce, options) as server:
        with httpx.Client(base_url=server.url, timeout=60) as client:
            before = client.post(CHAT, json=chat("Hello.")).json()
            client.post("/park").raise_for_status()
            health = client.get("/health")
            assert health.status_code == 200 and health.json()["status"] == "parked" and health.json()["ready"]
            assert client.post(CHAT, json=chat("Hello.")).json()["choices"] == before["choices"]
            assert client.get("/health").json()["parked"] is None


def test_a_model_that_cannot_be_parked_says_so() -> None:
    with echo_server() as (server, _, _):
        refused = httpx.post(server.url + "/park")
        assert refused.status_code == 409 and "cannot be parked" in refused.json()["error"]["message"]
        assert httpx.post(server.url + "/unpark").json() == {"status": "loaded", "changed": False}
