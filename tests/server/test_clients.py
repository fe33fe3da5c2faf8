"""The clients that people really use: OpenAI's and Anthropic's own Python packages."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import pydantic
import pytest

from tests.support.echo_service import echo_server

openai = pytest.importorskip("openai")
anthropic = pytest.importorskip("anthropic")

MESSAGES: list[Any] = [{"role": "user", "content": "why 漢\n</think>\n\nhello 😀 world"}]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with echo_server(api_key="key") as (server, _, _):
        yield server.url


@pytest.fixture(scope="module")
def client(url: str) -> Any:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="key", max_retries=0, timeout=20)


def test_models(client: Any) -> None:
    assert [model.id for model in client.models.list()] == ["fake"]
    assert client.models.retrieve("fake").owned_by == "luce"


def test_chat(client: Any) -> None:
    answer = client.chat.completions.create(model="fake", messages=MESSAGES, temperature=0)
    assert answer.choices[0].message.content == "hello 😀 world"
    assert answer.choices[0].message.reasoning_content == "why 漢"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    # an answer can be sent back as it came
    turn = [*MESSAGES, answer.choices[0].message, {"role": "user", "content": "</think>again"}]
    assert client.chat.completions.create(model="fake", messages=turn).choices[0].message.content == "again"


def test_streaming(client: Any) -> None:
    whole = client.chat.completions.create(model="fake", messages=MESSAGES)
    stream = client.chat.completions.create(
        model="fake", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    )
    content = reasoning = ""
    usage = None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            content += choice.delta.content or ""
            reasoning += getattr(choice.delta, "reasoning_content", None) or ""
    assert content == whole.choices[0].message.content
    assert reasoning == whole.choices[0].message.reasoning_content
    assert usage is not None
    assert usage.total_tokens == whole.usage.total_tokens


def test_logprobs(client: Any) -> None:
    answer = client.chat.completions.create(model="fake", messages=MESSAGES, logprobs=True, top_logprobs=2)
    entries = answer.choices[0].logprobs.content
    assert len(entries) == answer.usage.completion_tokens
    assert all(entry.top_logprobs[0].logprob >= entry.top_logprobs[1].logprob for entry in entries)


def test_completions(client: Any) -> None:
    answer = client.completions.create(model="fake", prompt=["ab", "cd"], max_tokens=3, logprobs=1)
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert len(answer.choices[0].logprobs.tokens) == 3
    parts = client.completions.create(model="fake", prompt="ab", max_tokens=3, stream=True)
    assert "".join(part.choices[0].text for part in parts) == answer.choices[0].text


def test_responses(client: Any) -> None:
    answer = client.responses.create(model="fake", input="why</think>hello")
    assert answer.output_text == "hello"
    assert answer.status == "completed"
    assert answer.usage.output_tokens_details.reasoning_tokens > 0
    with client.responses.stream(model="fake", input="why</think>hello") as stream:
        kinds = [event.type for event in stream]
        assert stream.get_final_response().output_text == "hello"
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"


def test_tools(client: Any) -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    tools = [{"type": "function", "function": {"name": "add", "parameters": parameters}}]
    call = '</think>ok\n<tool_call>\n{"name": "add", "arguments": {"a": 12}}\n</tool_call>'
    messages = [{"role": "user", "content": call}]
    answer = client.chat.completions.create(model="fake", messages=messages, tools=tools)
    (made,) = answer.choices[0].message.tool_calls
    assert (made.function.name, json.loads(made.function.arguments)) == ("add", {"a": 12})
    history = [*messages, answer.choices[0].message]
    history.append({"role": "tool", "tool_call_id": made.id, "content": "</think>24"})
    last = client.chat.completions.create(model="fake", messages=history, tools=tools)
    assert last.choices[0].message.content == "24"
    with client.chat.completions.stream(model="fake", messages=messages, tools=tools) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion()
    assert final.choices[0].message.tool_calls[0].function.arguments == made.function.arguments
    assert final.choices[0].finish_reason == "tool_calls"


def test_json_schema(client: Any) -> None:
    class City(pydantic.BaseModel):
        rank: Literal["first", "second"]
        size: int = pydantic.Field(ge=0, le=999)

    answer = client.chat.completions.parse(
        model="fake", messages=MESSAGES, response_format=City, max_tokens=200, reasoning_effort="none"
    )
    assert answer.choices[0].message.parsed.rank in ("first", "second")
    parsed = client.responses.parse(model="fake", input="x", text_format=City, reasoning={"effort": "none"})
    assert 0 <= parsed.output_parsed.size <= 999


def test_errors(client: Any, url: str) -> None:
    with pytest.raises(openai.BadRequestError, match="frob: unknown field"):
        client.chat.completions.create(model="fake", messages=MESSAGES, extra_body={"frob": 1})
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{url}/v1", api_key="other", max_retries=0).models.list()
    with pytest.raises(openai.APIError):
        list(client.chat.completions.create(model="fake", messages=[{"role": "user", "content": "NAN"}], stream=True))


def test_anthropics_client(url: str) -> None:
    client = anthropic.Anthropic(base_url=url, api_key="key", max_retries=0, timeout=20)
    whole = client.messages.create(model="fake", max_tokens=100, messages=MESSAGES)
    assert [block.type for block in whole.content] == ["thinking", "text"]
    assert whole.content[1].text == "hello 😀 world"
    assert whole.stop_reason == "end_turn"
    with client.messages.stream(model="fake", max_tokens=100, messages=MESSAGES) as stream:
        assert "".join(stream.text_stream) == "hello 😀 world"
        final = stream.get_final_message()
    assert [block.to_dict() for block in final.content] == [block.to_dict() for block in whole.content]
    assert final.usage.output_tokens == whole.usage.output_tokens
    count = client.messages.count_tokens(model="fake", messages=MESSAGES)
    assert count.input_tokens == whole.usage.input_tokens
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        client.messages.create(model="fake", max_tokens=100000, messages=MESSAGES)
    history = [*MESSAGES, {"role": "assistant", "content": final.content}, {"role": "user", "content": "</think>x"}]
    assert client.messages.create(model="fake", max_tokens=9, messages=history).content[0].text == "x"
