"""/metrics, /props and usage tell the same truth."""

from __future__ import annotations

from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from pyluce.options import LoadOptions
from tests.support.echo_service import echo_server

PROPS_KEYS = {
    "default_generation_settings", "model_alias", "model_path", "build_info", "speculative_mode", "server", "model",
    "runtime", "reasoning", "model_card", "budget_envelope", "speculative", "sampling", "pflash", "prefix_cache",
    "full_cache", "tool_replay", "daemon", "api", "capabilities", "memory",
}  # fmt: skip


def scrape(client: httpx.Client) -> dict[tuple[str, tuple[str, ...]], float]:
    """Samples by name and label values."""
    families = text_string_to_metric_families(client.get("/metrics").text)
    return {
        (sample.name, tuple(sample.labels.values())): sample.value for family in families for sample in family.samples
    }


def test_counters_equal_usage() -> None:
    options = LoadOptions(max_ctx=512, max_concurrency=3, max_queue=7, chunk=16)
    with echo_server(options) as (server, _, _), httpx.Client(base_url=server.url, timeout=20) as client:
        before = scrape(client)
        assert before["luce_prompt_tokens_total", ()] == 0
        usages: list[dict[str, Any]] = []
        for text, extra in (("a</think>b", {}), ("</think>hello", {"n": 2}), ("</think>LONG", {"max_tokens": 5})):
            body = {"messages": [{"role": "user", "content": text}], **extra}
            usages.append(client.post("/v1/chat/completions", json=body).json()["usage"])
        client.post("/v1/chat/completions", json={"messages": []})
        client.get("/made-up")
        after = scrape(client)
        prefilled = sum(usage["timings"]["prefilled_tokens"] for usage in usages)
        assert after["luce_prompt_tokens_total", ()] == prefilled
        assert after["luce_cached_prompt_tokens_total", ()] == 0
        assert after["luce_generated_tokens_total", ()] == sum(usage["completion_tokens"] for usage in usages)
        assert after["luce_requests_total", ("stop",)] == 3
        assert after["luce_requests_total", ("length",)] == 1
        assert after["luce_slots", ("free",)] == 3
        assert after["luce_queue_limit", ()] == 7
        assert after["luce_invariant_violations_total", ()] == 0
        assert after["luce_http_requests_total", ("/v1/chat/completions", "200")] == 3
        assert after["luce_http_requests_total", ("/v1/chat/completions", "400")] == 1
        assert after["luce_http_requests_total", ("other", "404")] == 1


def test_props_say_what_runs() -> None:
    options = LoadOptions(max_ctx=640, max_concurrency=2, max_queue=5, chunk=32, kv_type="f32")
    with echo_server(options, model_alias="mine", default_max_tokens=9) as (server, luce, _):
        shown = httpx.get(server.url + "/props").json()
        assert set(shown) == PROPS_KEYS
        assert shown["default_generation_settings"] == {
            "n_ctx": 640, "temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repeat_penalty": 1.0,
        }  # fmt: skip
        runtime = shown["runtime"]
        assert (runtime["slots"], runtime["max_queue"], runtime["chunk"]) == (2, 5, 32)
        assert (runtime["kv_cache_k"], runtime["kv_cache_v"]) == ("f32", "f32")
        assert (runtime["backend"], runtime["target_device"]) == ("cpu", "cpu")
        assert runtime["tune"] == {"file": None, "digest": None, "entries": 0}
        assert shown["model_alias"] == "mine"
        assert shown["model_path"] == str(luce.info.path)
        assert shown["build_info"].endswith("props_schema=2")
        assert shown["memory"]["process"]["rss_bytes"] > 0
        assert "/v1/chat/completions" in shown["api"]["endpoints"]
        models = httpx.get(server.url + "/v1/models").json()
        assert [model["id"] for model in models["data"]] == ["mine"]
        assert httpx.get(server.url + "/v1/models/mine").json() == models["data"][0]
        body = {"messages": [{"role": "user", "content": "</think>LONG"}]}
        usage = httpx.post(server.url + "/v1/chat/completions", json=body, timeout=20).json()["usage"]
        assert usage["completion_tokens"] == 9


def test_every_endpoint_is_described(client: httpx.Client) -> None:
    document = client.get("/openapi.json").json()
    expected = {
        "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens",
        "/v1/models", "/v1/models/{model_id}", "/tokenize", "/detokenize", "/health", "/health/live", "/props",
        "/metrics", "/", "/status/json", "/status/events", "/park", "/unpark",
    }  # fmt: skip
    assert set(document["paths"]) == expected
    assert set(client.get("/props").json()["api"]["endpoints"]) == {
        path.replace("model_id}", "model_id:path}") for path in expected
    }
    for operations in document["paths"].values():
        for operation in operations.values():
            assert "422" not in operation["responses"]
            assert operation["responses"]["default"]["description"]
