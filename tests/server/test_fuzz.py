"""Request bodies made up from /openapi.json, right and wrong ones: never a 500, never a hang, always the error shape."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pyluce.options import LoadOptions
from pyluce.server.schemas.chat import ChatRequest
from tests.support.echo_service import echo_server

schemathesis = pytest.importorskip("schemathesis")

PATHS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/tokenize",
    "/detokenize",
)
MODES = (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE)


@pytest.fixture(scope="module")
def fuzz_url() -> Iterator[str]:
    with echo_server(LoadOptions(max_ctx=256), default_max_tokens=8) as (server, luce, _):
        yield server.url
        assert luce.stats().invariant_violations == 0
        assert luce.stats().busy_slots == 0


@pytest.fixture(scope="module")
def api(fuzz_url: str) -> Any:
    return schemathesis.openapi.from_url(f"{fuzz_url}/openapi.json")


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name.lower())
@pytest.mark.parametrize("path", PATHS)
def test_any_body(api: Any, path: str, mode: Any) -> None:
    @settings(max_examples=10, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(case=api[path]["POST"].as_strategy(generation_mode=mode))
    def check(case: Any) -> None:
        response = case.call(timeout=20)
        status = response.status_code
        assert status < 500, response.text
        if status >= 400:
            body = response.json()
            assert isinstance(body["error"]["message"], str)
            assert body["error"]["message"]
            if path.startswith("/v1/messages"):
                assert body["type"] == "error"
            else:
                assert body["error"]["type"] == "invalid_request_error"

    check()


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
FIELDS = sorted({*ChatRequest.model_fields, "unknown"})
GOOD_VALUES: dict[str, list[Any]] = {
    "n": [1, 2, 16],
    "temperature": [0, 0.5, 1e-9, 100],
    "top_p": [0.0, 0.5, 1],
    "top_k": [0, 1, 2**31 - 1],
    "seed": [0, 2**32 - 2, 2**32 - 1],
    "max_tokens": [1, 5, 200, 2**70],
    "stop": ["x", ["x", "\u2028"], [], "\ud800"],
    "logprobs": [True, False],
    "top_logprobs": [0, 20],
    "logit_bias": [{"5": 100}, {"5": -100}, {"-1": 1}, {"9" * 30: 1}],
    "stream": [True, False],
    "reasoning_effort": ["none", "low", "max"],
    "thinking_budget": [0, 1, 2**40],
    "response_format": [{"type": "json_object"}, {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "?"}}}],
    "tools": [[], [{"type": "function", "function": {"name": "f", "parameters": {"type": {}}}}]],
    "tool_choice": ["auto", "none", "required", {"type": "function", "function": {"name": "f"}}],
    "chat_template_kwargs": [{"messages": []}, {"enable_thinking": "x"}, {"\ufdd0": "\ufdd0"}],
}  # fmt: skip


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(data=st.data())
def test_changed_bodies(fuzz_url: str, data: st.DataObject) -> None:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": data.draw(st.text(max_size=10))}], "max_tokens": 5}
    for name in data.draw(st.lists(st.sampled_from(FIELDS), min_size=1, max_size=4, unique=True)):
        good = st.sampled_from(GOOD_VALUES[name]) if name in GOOD_VALUES else JSON_VALUES
        body[name] = data.draw(good | JSON_VALUES)
    response = httpx.post(
        f"{fuzz_url}/v1/chat/completions",
        content=json.dumps(body).encode("ascii"),
        headers={"Content-Type": "application/json"},
        timeout=20,
    )
    assert response.status_code in (200, 400), response.text
    if response.status_code == 400:
        assert response.json()["error"]["message"]
