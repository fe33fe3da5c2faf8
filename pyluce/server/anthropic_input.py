"""Anthropic's messages as a chat job: their blocks become the messages that chat templates know."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from pyluce.engine import RequestError
from pyluce.server.conversation import refuse_same_names
from pyluce.server.jobs import ChatJob, Reasoning, ToolChoice
from pyluce.server.schemas.anthropic import (
    AnthropicTool,
    AnthropicToolChoice,
    Block,
    CountTokensRequest,
    InputMessage,
    MessagesRequest,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from pyluce.server.schemas.common import make_sampling
from pyluce.server.settings import ServerSettings

_REASONING_FIELDS = ("thinking.type", "thinking.type", "thinking.budget_tokens")


def anthropic_job(body: CountTokensRequest, settings: ServerSettings) -> ChatJob:
    """What the request asks for. Raises RequestError naming the field that cannot be served."""
    refuse_same_names([tool.name for tool in body.tools or ()], "tools[{}].name")
    choice, parallel = _choice(body.tool_choice)
    job = ChatJob(
        messages=_messages(body),
        tools=[_tool(tool) for tool in body.tools or ()] or None,
        tool_choice=choice,
        parallel_calls=parallel,
        reasoning=_reasoning(body),
    )
    if not isinstance(body, MessagesRequest):
        return job
    fields = {name: getattr(settings.sampling, name) for name in settings.sampling.__dataclass_fields__}
    given = {"temperature": body.temperature, "top_p": body.top_p, "top_k": body.top_k}
    fields.update({name: value for name, value in given.items() if value is not None})
    return replace(
        job,
        sampling=make_sampling(fields, {}),
        max_tokens=body.max_tokens,
        stop=tuple(body.stop_sequences or ()),
        stop_field="stop_sequences",
    )


def _messages(body: CountTokensRequest) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if body.system is not None:
        system = body.system if isinstance(body.system, str) else "\n\n".join(block.text for block in body.system)
        messages.append({"role": "system", "content": system})
    if body.messages[-1].role == "assistant":
        raise RequestError(
            f"messages[{len(body.messages) - 1}].role: expected the last message to be the user's, found assistant; "
            "continuing a given beginning of an answer is not implemented"
        )
    for index, message in enumerate(body.messages):
        where = f"messages[{index}].content"
        if isinstance(message.content, str):
            messages.append({"role": message.role, "content": message.content})
        elif message.role == "assistant":
            messages.append(_assistant(message, where))
        else:
            messages += _user(message, where)
    return messages


def _assistant(message: InputMessage, where: str) -> dict[str, Any]:
    plain: dict[str, Any] = {"role": "assistant", "content": ""}
    for index, block in enumerate(_blocks(message)):
        if isinstance(block, TextBlock):
            plain["content"] += block.text
        elif isinstance(block, ThinkingBlock):
            plain["reasoning_content"] = plain.get("reasoning_content", "") + block.thinking
        elif isinstance(block, ToolUseBlock):
            call = {
                "id": block.id,
                "type": "function",
                "function": {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)},
            }
            plain.setdefault("tool_calls", []).append(call)
        else:
            raise RequestError(
                f"{where}[{index}].type: expected a block of an assistant's message, found 'tool_result'"
            )
    return plain


def _user(message: InputMessage, where: str) -> list[dict[str, Any]]:
    """A user's blocks: each tool result is a message of its own, text between them is joined."""
    messages: list[dict[str, Any]] = []
    for index, block in enumerate(_blocks(message)):
        if isinstance(block, ToolResultBlock):
            content = block.content
            text = content if isinstance(content, str) else "".join(part.text for part in content or ())
            if block.is_error:
                text = f"Error: {text}"
            messages.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": text})
        elif isinstance(block, TextBlock):
            if messages and messages[-1]["role"] == "user":
                messages[-1]["content"] += block.text
            else:
                messages.append({"role": "user", "content": block.text})
        else:
            raise RequestError(f"{where}[{index}].type: expected 'text' or 'tool_result', found {block.type!r}")
    if not messages:
        raise RequestError(f"{where}: expected at least one block, found none")
    return messages


def _blocks(message: InputMessage) -> list[Block]:
    return [] if isinstance(message.content, str) else message.content


def _tool(tool: AnthropicTool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    return {"type": "function", "function": function}


def _choice(choice: AnthropicToolChoice | None) -> tuple[ToolChoice, bool]:
    if choice is None:
        return ToolChoice(), True
    if (choice.type == "tool") != (choice.name is not None):
        raise RequestError("tool_choice.name: expected with the type tool, and only with it")
    mode = {"any": "required", "tool": "named"}.get(choice.type, choice.type)
    return ToolChoice(mode, choice.name), not choice.disable_parallel_tool_use


def _reasoning(body: CountTokensRequest) -> Reasoning:
    thinking = body.thinking
    if thinking is None:
        return Reasoning(fields=_REASONING_FIELDS)
    if thinking.type != "enabled" and thinking.budget_tokens is not None:
        raise RequestError(f"thinking.budget_tokens: expected with the type enabled only, found {thinking.type}")
    if (
        isinstance(body, MessagesRequest)
        and thinking.budget_tokens is not None
        and thinking.budget_tokens >= body.max_tokens
    ):
        raise RequestError(
            f"thinking.budget_tokens: expected less than max_tokens ({body.max_tokens}), found {thinking.budget_tokens}"
        )
    return Reasoning(thinking.type != "disabled", None, thinking.budget_tokens, _REASONING_FIELDS)
