"""POST /v1/chat/completions: OpenAI's request, with the fields that this server adds."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from pyluce.server.schemas.common import SamplingFields, StreamOptions, Strict, TextPart


class FunctionCall(Strict):
    """The function of a tool call that the model made."""

    name: str
    arguments: str = Field(description="JSON text.")


class ToolCall(Strict):
    """A tool call that the model made in an earlier turn."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(Strict):
    """One message of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = Field(None, description="Handed to the chat template.")
    reasoning_content: str | None = Field(None, description="The reasoning of an earlier answer, for the template.")
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: list[Any] | None = Field(None, max_length=0)


class FunctionDefinition(Strict):
    """A function that the model may call."""

    name: str = Field(min_length=1, max_length=128)
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="A JSON schema.")
    strict: bool | None = None


class Tool(Strict):
    """A tool; functions are the only kind."""

    type: Literal["function"]
    function: FunctionDefinition


class ChosenFunction(Strict):
    """The function's name in `tool_choice`."""

    name: str


class NamedToolChoice(Strict):
    """`tool_choice`: this function."""

    type: Literal["function"]
    function: ChosenFunction


class JsonSchema(Strict):
    """The schema of `response_format`."""

    name: str
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    """`response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class ReasoningOptions(Strict):
    """`reasoning`, another spelling of the reasoning fields."""

    effort: str | None = None
    max_tokens: int | None = None


class ChatRequest(SamplingFields):
    """A chat completion."""

    model: str | None = None
    messages: list[ChatMessage] = Field(min_length=1)
    n: int | None = Field(None, ge=1, le=16)
    stop: str | list[str] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    reasoning_effort: str | None = Field(None, description="none, low, medium, high, x-high or max.")
    reasoning: ReasoningOptions | None = None
    enable_thinking: bool | None = None
    thinking_budget: int | None = Field(None, ge=0, description="Reasoning tokens at most.")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Variables for the chat template.")
    # labels that OpenAI keeps for the account; they ask nothing of the answer
    user: str | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: Literal["auto", "default"] | None = None
    store: Literal[False] | None = None
    modalities: list[Literal["text"]] | None = None
