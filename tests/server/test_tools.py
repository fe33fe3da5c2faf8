"""Tool calls and JSON answers, over every API that has them."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.server.test_messages import add_up
from tests.support.sse import chunks, parse

CHAT = "/v1/chat/completions"
ARGUMENTS = '{"path": "C:\\\\new\\\\u", "text": "a \\"q\\"\\n漢😀 </x>", "n": [1, {"k": null}]}'
CALL = f'<tool_call>\n{{"name": "write", "arguments": {ARGUMENTS}}}\n</tool_call>'
SECOND = '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>'
PARAMETERS = {"type": "object", "properties": {"path": {"type": "string"}}}
TOOLS = [
    {"type": "function", "function": {"name": "write", "description": "w", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "stop", "parameters": {"type": "object", "additionalProperties": False}}},
]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "maximum": 99, "minimum": 0}},
    "required": ["a"],
    "additionalProperties": False,
}


def ask(client: httpx.Client, text: str, **options: Any) -> dict[str, Any]:
    response = client.post(CHAT, json={"messages": [{"role": "user", "content": text}], **options})
    assert response.status_code == 200, response.text
    choice: dict[str, Any] = response.json()["choices"][0]
    return choice


def streamed_calls(parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The calls that the chunks build."""
    calls: list[dict[str, Any]] = []
    for part in parts:
        for choice in part["choices"]:
            for piece in choice["delta"].get("tool_calls", ()):
                if piece["index"] == len(calls):
                    calls.append({key: piece[key] for key in ("id", "type", "function")})
                else:
                    calls[piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]
    return calls


def test_a_call_between_texts(client: httpx.Client) -> None:
    text = f"why</think>Let me see.\n{CALL}\n{SECOND}"
    choice = ask(client, text, tools=TOOLS)
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls"
    assert message["content"] == "Let me see."
    assert message["reasoning_content"] == "why"
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["write", "stop"]
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == json.loads(ARGUMENTS)
    assert len({call["id"] for call in message["tool_calls"]}) == 2

    body = {"messages": [{"role": "user", "content": text}], "tools": TOOLS, "stream": True}
    parts = chunks(client.post(CHAT, json=body).content)
    calls = streamed_calls(parts)
    assert [call["function"] for call in calls] == [call["function"] for call in message["tool_calls"]]
    assert sum(bool(c["delta"].get("tool_calls")) for part in parts for c in part["choices"]) > 5, "one lump"
    assert parts[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_a_turn_with_calls_can_be_sent_back(client: httpx.Client) -> None:
    message = ask(client, f"</think>{CALL}", tools=TOOLS)["message"]
    history = [
        {"role": "user", "content": "x"},
        message,
        {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "</think>done"},
    ]
    again = client.post(CHAT, json={"messages": history, "tools": TOOLS})
    assert again.json()["choices"][0]["message"]["content"] == "done"
    tokens = client.post("/tokenize", json={"messages": history, "tools": TOOLS}).json()["tokens"]
    assert ARGUMENTS in client.post("/detokenize", json={"tokens": tokens}).json()["content"]


def test_calls_that_are_none(client: httpx.Client) -> None:
    unknown = '<tool_call>{"name": "other", "arguments": {}}</tool_call>'
    for options in ({"tools": TOOLS}, {"tools": TOOLS, "tool_choice": "none"}, {}):
        choice = ask(client, f"</think>{unknown}", **options)
        assert choice["message"]["content"] == unknown
        assert choice["finish_reason"] == "stop"
    cut = ask(client, f"</think>{CALL}", tools=TOOLS, max_tokens=70)
    assert cut["finish_reason"] == "length"
    with pytest.raises(ValueError, match="."):
        json.loads(cut["message"]["tool_calls"][0]["function"]["arguments"])


def test_one_call_at_most(client: httpx.Client) -> None:
    choice = ask(client, f"</think>{SECOND}\nand\n{CALL}", tools=TOOLS, parallel_tool_calls=False)
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["stop"]
    assert choice["message"]["content"] is None


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "stop"}}])
def test_calls_that_must_be(client: httpx.Client, choice: Any) -> None:
    for thinking in (True, False):
        options = {"tools": TOOLS[1:], "tool_choice": choice, "parallel_tool_calls": False, "max_tokens": 300}
        found = ask(client, "hm</think>no tools please", enable_thinking=thinking, **options)
        assert found["finish_reason"] == "tool_calls", found
        assert [call["function"]["name"] for call in found["message"]["tool_calls"]] == ["stop"]
        json.loads(found["message"]["tool_calls"][0]["function"]["arguments"])


@pytest.mark.parametrize("thinking", [True, False])
def test_a_schema(client: httpx.Client, thinking: bool) -> None:
    format = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    options = {"response_format": format, "enable_thinking": thinking, "max_tokens": 300}
    choice = ask(client, "hm</think>anything", **options)
    assert 0 <= json.loads(choice["message"]["content"])["a"] <= 99
    assert choice["finish_reason"] == "stop"
    if thinking:
        assert choice["message"]["reasoning_content"] == "hm"
    body = {"messages": [{"role": "user", "content": "hm</think>anything"}], "stream": True, **options}
    parts = chunks(client.post(CHAT, json=body).content)
    text = "".join(c["delta"].get("content") or "" for part in parts for c in part["choices"])
    assert text == choice["message"]["content"]
    whole = client.post(
        "/v1/responses",
        json={
            "input": "hm</think>anything",
            "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}},
            "reasoning": {"effort": "high" if thinking else "none"},
        },
    ).json()
    assert whole["output"][-1]["content"][0]["text"] == choice["message"]["content"]


def test_a_thinking_budget(client: httpx.Client) -> None:
    free = ask(client, "LONG thoughts ", max_tokens=60)
    assert free["message"]["content"] == ""
    for options in ({"thinking_budget": 9}, {"reasoning": {"max_tokens": 9}}):
        found = ask(client, "LONG thoughts ", max_tokens=60, **options)
        assert found["message"]["content"]
        assert 0 < len(found["message"]["reasoning_content"]) <= 12
    default = ask(client, "LONG thoughts ", max_tokens=200)
    assert default["message"]["content"]
    anthropic = client.post(
        "/v1/messages",
        json={
            "messages": [{"role": "user", "content": "LONG thoughts "}],
            "max_tokens": 60,
            "thinking": {"type": "enabled", "budget_tokens": 9},
        },
    ).json()
    assert [block["type"] for block in anthropic["content"]] == ["thinking", "text"]


def test_anthropics_tools(client: httpx.Client) -> None:
    tools = [
        {"name": "write", "input_schema": PARAMETERS},
        {"name": "stop", "input_schema": TOOLS[1]["function"]["parameters"]},
    ]
    text = f"why</think>Let me see.\n{CALL}\n{SECOND}"
    body: dict[str, Any] = {"messages": [{"role": "user", "content": text}], "tools": tools, "max_tokens": 400}
    whole = client.post("/v1/messages", json=body).json()
    assert [block["type"] for block in whole["content"]] == ["thinking", "text", "tool_use", "tool_use"]
    assert whole["content"][2]["input"] == json.loads(ARGUMENTS)
    assert whole["stop_reason"] == "tool_use"
    streamed = add_up(parse(client.post("/v1/messages", json={**body, "stream": True}).content))
    for block in (*whole["content"], *streamed["content"]):
        block.pop("id", None)
    assert streamed["content"] == whole["content"]
    history = [
        *body["messages"],
        {"role": "assistant", "content": [{**block, "id": "call_1"} if "input" in block else block for block in whole["content"]]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "call_1", "content": "</think>fine"}]},
    ]  # fmt: skip
    answer = client.post("/v1/messages", json={**body, "messages": history}).json()
    assert answer["content"] == [{"type": "text", "text": "fine"}]
    forced = {**body, "tool_choice": {"type": "tool", "name": "stop", "disable_parallel_tool_use": True}}
    assert client.post("/v1/messages", json=forced).json()["content"][-1]["name"] == "stop"


def test_tools_of_the_responses_api(client: httpx.Client) -> None:
    tools = [{"type": "function", "name": "write", "parameters": PARAMETERS}, {"type": "function", "name": "stop"}]
    body: dict[str, Any] = {"input": f"why</think>Let me see.\n{CALL}\n{SECOND}", "tools": tools}
    whole = client.post("/v1/responses", json=body).json()
    assert [item["type"] for item in whole["output"]] == ["reasoning", "message", "function_call", "function_call"]
    call = whole["output"][2]
    assert json.loads(call["arguments"]) == json.loads(ARGUMENTS)
    events = parse(client.post("/v1/responses", json={**body, "stream": True}).content)
    deltas = [event.json["delta"] for event in events if event.name == "response.function_call_arguments.delta"]
    done = [event.json["arguments"] for event in events if event.name == "response.function_call_arguments.done"]
    assert "".join(deltas) == "".join(done) == call["arguments"] + whole["output"][3]["arguments"]
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "</think>fine"}
    history = [{"role": "user", "content": "x"}, *whole["output"], output]
    answer = client.post("/v1/responses", json={"input": history, "tools": tools}).json()
    assert answer["output"][-1]["content"][0]["text"] == "fine"


BAD: list[tuple[str, dict[str, Any]]] = [
    ("tool_choice", {"tool_choice": "required"}),
    ("tool_choice", {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}}),
    ("response_format", {"tools": TOOLS, "response_format": {"type": "json_object"}}),
    (
        "response_format.json_schema.schema.if",
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"if": {}}}}},
    ),
    ("thinking_budget", {"thinking_budget": 5, "max_tokens": 2}),
]


@pytest.mark.parametrize(("field", "changes"), BAD)
def test_what_cannot_be_kept_to(client: httpx.Client, field: str, changes: dict[str, Any]) -> None:
    response = client.post(CHAT, json={"messages": [{"role": "user", "content": "x"}], **changes})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == field, response.text
