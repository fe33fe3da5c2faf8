"""Everything that is refused is refused by name, in the right shape, before any work."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from pyluce.options import LoadOptions
from pyluce.server.errors import as_api_error
from pyluce.weights import ModelError
from tests.support.echo_service import echo_server

CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "x"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}

# field that the answer must name: changes to a good request
BAD_CHAT: list[tuple[str, dict[str, Any]]] = [
    ("frob", {"frob": 1}),
    ("messages", {"messages": []}),
    ("messages", {"messages": "hi"}),
    ("messages[0].role", {"messages": [{"role": "robot", "content": "x"}]}),
    ("messages[0].content", {"messages": [{"role": "user"}]}),
    ("messages[0].content", {"messages": [{"role": "user", "content": 5}]}),
    ("messages[0].content[0].type", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
    ("messages[0].image", {"messages": [{"role": "user", "content": "x", "image": "y"}]}),
    ("messages[0].tool_calls", {"messages": [{"role": "user", "content": "x", "tool_calls": []}]}),
    ("messages[0].tool_call_id", {"messages": [{"role": "user", "content": "x", "tool_call_id": "1"}]}),
    ("n", {"n": 99}),
    ("n", {"n": 0}),
    ("n", {"n": True}),
    ("temperature", {"temperature": "0.7"}),
    ("temperature", {"temperature": -1}),
    ("top_p", {"top_p": 2}),
    ("top_k", {"top_k": -1}),
    ("min_p", {"min_p": 1.5}),
    ("repetition_penalty", {"repetition_penalty": 0}),
    ("rep_pen", {"rep_pen": -1}),
    ("repeat_penalty", {"repetition_penalty": 1.1, "repeat_penalty": 1.1}),
    ("frequency_penalty", {"frequency_penalty": 3}),
    ("presence_penalty", {"presence_penalty": -3}),
    ("seed", {"seed": -1}),
    ("seed", {"seed": 2**40}),
    ("logit_bias", {"logit_bias": {"x": 1}}),
    ("logit_bias", {"logit_bias": {"100000": 1}}),
    ("logit_bias[5]", {"logit_bias": {"5": 1000}}),
    ("max_tokens", {"max_tokens": 0}),
    ("max_completion_tokens", {"max_tokens": 5, "max_completion_tokens": 6}),
    ("max_tokens", {"max_tokens": 1.5}),
    ("max_tokens", {"max_tokens": 100000}),
    ("stop[0]", {"stop": ""}),
    ("stop", {"stop": ["x"] * 17}),
    ("stop", {"stop": 5}),
    ("stream_options", {"stream_options": {"include_usage": True}}),
    ("stream_options.x", {"stream": True, "stream_options": {"x": True}}),
    ("top_logprobs", {"top_logprobs": 3}),
    ("top_logprobs", {"logprobs": True, "top_logprobs": 21}),
    ("response_format.type", {"response_format": {"type": "xml"}}),
    ("response_format.json_schema", {"response_format": {"type": "json_schema"}}),
    ("reasoning_effort", {"reasoning_effort": "extreme"}),
    ("reasoning_effort", {"reasoning_effort": "high", "enable_thinking": False}),
    ("thinking_budget", {"thinking_budget": 5, "enable_thinking": False}),
    ("modalities[0]", {"modalities": ["audio"]}),
    ("store", {"store": True}),
    ("tools[0].type", {"tools": [{"type": "web_search"}]}),
    ("tools[1].function.name", {"tools": [TOOL, TOOL]}),
    ("tool_choice", {"tool_choice": "always", "tools": [TOOL]}),
    ("audio", {"audio": {"voice": "x"}}),
    ("functions", {"functions": []}),
]


@pytest.mark.parametrize(("field", "changes"), BAD_CHAT, ids=lambda value: value if isinstance(value, str) else "")
def test_bad_chat_requests(client: httpx.Client, field: str, changes: dict[str, Any]) -> None:
    response = client.post(CHAT, json={"messages": USER, **changes})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == field, error
    assert error["message"].startswith(field), error
    assert set(error) == {"message", "type", "param", "code"}


BAD_COMPLETIONS: list[tuple[str, dict[str, Any]]] = [
    ("echo", {"echo": True}),
    ("suffix", {"suffix": "x"}),
    ("best_of", {"best_of": 2}),
    ("prompt", {"prompt": []}),
    ("prompt", {"prompt": None}),
    ("prompt", {"prompt": ["x"] * 9, "n": 2}),
    ("prompt", {"prompt": [99999]}),
    ("logprobs", {"logprobs": 21}),
    ("messages", {"messages": USER}),
]


@pytest.mark.parametrize(("field", "changes"), BAD_COMPLETIONS)
def test_bad_completions(client: httpx.Client, field: str, changes: dict[str, Any]) -> None:
    response = client.post("/v1/completions", json={"prompt": "x", **changes})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["message"].startswith(field)


BAD_RESPONSES: list[tuple[str, dict[str, Any]]] = [
    ("previous_response_id", {"previous_response_id": "resp_1"}),
    ("conversation", {"conversation": "c"}),
    ("store", {"store": True}),
    ("background", {"background": True}),
    ("truncation", {"truncation": "auto"}),
    ("input", {"input": []}),
    ("input[0]", {"input": [{"type": "item_reference", "id": "x"}]}),
    ("input[0].content[0].type", {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}),
    ("tools[0].type", {"tools": [{"type": "web_search"}]}),
    ("max_output_tokens", {"max_output_tokens": 0}),
    ("max_output_tokens", {"max_output_tokens": 99999}),
    ("include[0]", {"include": ["file_search_call.results"]}),
    ("text.format.schema", {"text": {"format": {"type": "json_schema"}}}),
    ("input[0].encrypted_content", {"input": [{"type": "reasoning", "encrypted_content": "zzz"}]}),
]


@pytest.mark.parametrize(("field", "changes"), BAD_RESPONSES)
def test_bad_responses(client: httpx.Client, field: str, changes: dict[str, Any]) -> None:
    response = client.post("/v1/responses", json={"input": "x", **changes})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == field, response.text


BAD_MESSAGES: list[tuple[str, dict[str, Any]]] = [
    ("max_tokens", {"max_tokens": None}),
    ("max_tokens", {"max_tokens": 99999}),
    ("messages", {"messages": []}),
    ("messages[1].role", {"messages": [*USER, {"role": "assistant", "content": "so far"}]}),
    ("messages[0].role", {"messages": [{"role": "system", "content": "x"}]}),
    ("messages[0].content[0].type", {"messages": [{"role": "user", "content": [{"type": "image"}]}]}),
    ("thinking.budget_tokens", {"thinking": {"type": "enabled", "budget_tokens": 100}}),
    ("thinking.type", {"thinking": {"type": "sometimes"}}),
    ("stop_sequences[0]", {"stop_sequences": [""]}),
    ("tool_choice.name", {"tool_choice": {"type": "tool"}}),
    ("tools[0].input_schema", {"tools": [{"name": "f"}]}),
    ("mcp_servers", {"mcp_servers": []}),
    ("temperature", {"temperature": 200}),
]


@pytest.mark.parametrize(("field", "changes"), BAD_MESSAGES)
def test_bad_messages_have_anthropics_shape(client: httpx.Client, field: str, changes: dict[str, Any]) -> None:
    body = {"messages": USER, "max_tokens": 10, **changes}
    response = client.post("/v1/messages", json=body)
    assert response.status_code == 400, response.text
    answer = response.json()
    assert answer["type"] == "error"
    assert answer["error"]["type"] == "invalid_request_error"
    assert answer["error"]["message"].startswith(field), answer


def test_too_long_prompts_are_refused_with_both_numbers(client: httpx.Client) -> None:
    response = client.post(CHAT, json={"messages": [{"role": "user", "content": "x" * 5000}]})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "2048" in error["message"]
    assert any(int(word) > 5000 for word in error["message"].split() if word.isdigit())


@pytest.mark.parametrize(
    ("content", "kind", "status"),
    [
        (b"{", "application/json", 400),
        (b"[1]", "application/json", 400),
        (b"\xff\xfe", "application/json", 400),
        (b"", "application/json", 400),
        (b"", None, 400),
        (b"null", "application/json", 400),
        (b'{"messages":' + b"[" * 100000, "application/json", 400),
        (b'{"messages":[{"role":"user","content":"\\ud800"}]}', "application/json", 400),
        (b'{"messages":[{"role":"user","content":"x"}],"temperature":NaN}', "application/json", 400),
        (b'{"messages":[{"role":"user","content":"x"}],"seed":' + b"9" * 6000 + b"}", "application/json", 400),
        (b'{"\\ud800":1,"messages":[{"role":"user","content":"x"}]}', "application/json", 400),
        (b"a=b", "application/x-www-form-urlencoded", 415),
        (b"{}", "text/plain", 415),
    ],
)
def test_bodies_that_are_no_requests(client: httpx.Client, content: bytes, kind: str | None, status: int) -> None:
    headers = {"Content-Type": kind} if kind else {}
    response = client.post(CHAT, content=content, headers=headers)
    assert response.status_code == status, response.text
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_unknown_places_and_methods(client: httpx.Client) -> None:
    response = client.get("/v2/nothing")
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "not_found"
    response = client.get(CHAT)
    assert response.status_code == 405
    assert response.headers["allow"] == "POST"
    assert response.json()["error"]["code"] == "method_not_allowed"
    response = client.get("/v1/models/other")
    assert response.status_code == 404
    assert response.json()["error"]["param"] == "model"
    response = client.get("/v1/messages")
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_a_damaged_row_ends_one_request(client: httpx.Client) -> None:
    response = client.post(CHAT, json={"messages": [{"role": "user", "content": "NAN"}]})
    assert response.status_code == 500
    error = response.json()["error"]
    assert error["type"] == "server_error"
    streamed = client.post(CHAT, json={"messages": [{"role": "user", "content": "NAN"}], "stream": True})
    assert streamed.status_code == 200
    assert b'"error"' in streamed.content
    assert b"[DONE]" not in streamed.content
    assert client.post(CHAT, json={"messages": USER}).status_code == 200


def test_request_ids(client: httpx.Client) -> None:
    assert client.get("/health").headers["x-request-id"].startswith("req_")
    assert client.get("/health", headers={"X-Request-Id": "mine-1"}).headers["x-request-id"] == "mine-1"
    assert client.get("/health", headers={"X-Request-Id": "a b"}).headers["x-request-id"] != "a b"


def test_key_limit_and_origins() -> None:
    settings: dict[str, Any] = {"api_key": "secret", "max_body_bytes": 2000, "cors_origins": ("http://a.example",)}
    with (
        echo_server(LoadOptions(max_ctx=512), **settings) as (server, _, _),
        httpx.Client(base_url=server.url, timeout=20) as client,
    ):
        good = {"messages": USER}
        refused = client.post(CHAT, json=good)
        assert refused.status_code == 401
        assert refused.headers["www-authenticate"] == "Bearer"
        assert "secret" not in refused.text
        for wrong in ({"Authorization": "Bearer other"}, {"x-api-key": "sécret".encode()}, {"Authorization": "secret"}):
            assert client.post(CHAT, json=good, headers=wrong).status_code == 401  # type: ignore[arg-type]
        assert client.post("/v1/messages", json=good).json()["error"]["type"] == "authentication_error"
        for right in ({"Authorization": "Bearer secret"}, {"authorization": "bearer secret"}, {"x-api-key": "secret"}):
            assert client.post(CHAT, json=good, headers=right).status_code == 200
        for path in ("/health", "/health/live", "/props", "/", "/openapi.json"):
            assert client.get(path).status_code == 200
        for path in ("/metrics", "/status/json", "/v1/models"):
            assert client.get(path).status_code == 401

        client.headers["x-api-key"] = "secret"
        large = {"messages": [{"role": "user", "content": "x" * 3000}]}
        too_large = client.post(CHAT, json=large)
        assert too_large.status_code == 413
        assert "2000" in too_large.json()["error"]["message"]
        in_pieces = client.post(CHAT, content=iter([b"{" * 1500] * 2), headers={"Content-Type": "application/json"})
        assert in_pieces.status_code == 413

        allowed = client.get("/health", headers={"Origin": "http://a.example"})
        assert allowed.headers["access-control-allow-origin"] == "http://a.example"
        assert (
            "access-control-allow-origin" not in client.get("/health", headers={"Origin": "http://b.example"}).headers
        )
        preflight = client.options(
            CHAT, headers={"Origin": "http://a.example", "Access-Control-Request-Method": "POST"}
        )
        assert preflight.status_code == 200


def test_no_origin_is_allowed_by_default(client: httpx.Client) -> None:
    response = client.get("/health", headers={"Origin": "http://a.example"})
    assert "access-control-allow-origin" not in response.headers


def test_a_model_file_that_changed_is_said_so() -> None:
    error = as_api_error(ModelError("m.gguf: size: expected 5 bytes, found 4"))
    assert (error.status, error.code, str(error)) == (503, "model_file", "m.gguf: size: expected 5 bytes, found 4")
