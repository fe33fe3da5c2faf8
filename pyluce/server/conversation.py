"""Messages and tools as chat templates expect them, out of OpenAI's chat request."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from pyluce.engine import RequestError
from pyluce.server.schemas.chat import ChatMessage, Tool
from pyluce.server.schemas.common import join_parts


def chat_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """The messages for the template. Raises RequestError for a field that its role does not have."""
    return [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def chat_tools(tools: Sequence[Tool] | None) -> list[dict[str, Any]] | None:
    """The tools for the template. Raises RequestError when two have one name."""
    if not tools:
        return None
    plain = [tool.model_dump(exclude_none=True) for tool in tools]
    refuse_same_names([tool.function.name for tool in tools], "tools[{}].function.name")
    return plain


def refuse_same_names(names: Sequence[str], field: str) -> None:
    """Raise RequestError for the second of two tools with one name; `field` has a place for its index."""
    for index, name in enumerate(names):
        if name in names[:index]:
            raise RequestError(f"{field.format(index)}: expected different names, found {name!r} twice")


def check_arguments(text: str, field: str) -> str:
    """A call's arguments, JSON text of an object. Raises RequestError for anything else."""
    try:
        value = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{field}: expected JSON text, found an error: {error}") from error
    if not isinstance(value, dict):
        raise RequestError(f"{field}: expected a JSON object, found {type(value).__name__}")
    return text if text.strip() else "{}"


def _message(message: ChatMessage, where: str) -> dict[str, Any]:
    role = "system" if message.role == "developer" else message.role
    content = join_parts(message.content)
    if message.role != "assistant":
        for name in ("tool_calls", "reasoning_content"):
            if getattr(message, name) is not None:
                raise RequestError(f"{where}.{name}: expected with the role assistant only, found {message.role}")
    if message.role != "tool" and message.tool_call_id is not None:
        raise RequestError(f"{where}.tool_call_id: expected with the role tool only, found {message.role}")
    if content is None and not message.tool_calls:
        raise RequestError(f"{where}.content: required, but missing")
    plain: dict[str, Any] = {"role": role, "content": content if content is not None else ""}
    for name in ("name", "reasoning_content", "tool_call_id"):
        value = getattr(message, name)
        if value is not None:
            plain[name] = value
    if message.tool_calls:
        plain["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.function.name,
                    "arguments": check_arguments(
                        call.function.arguments, f"{where}.tool_calls[{index}].function.arguments"
                    ),
                },
            }
            for index, call in enumerate(message.tool_calls)
        ]
    return plain
