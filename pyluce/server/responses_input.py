"""The Responses API's input items as a chat job."""

from __future__ import annotations

import base64
import binascii
from typing import Any

from pyluce.engine import RequestError
from pyluce.server.conversation import check_arguments, refuse_same_names
from pyluce.server.jobs import ChatJob, JsonFormat, Reasoning, ToolChoice
from pyluce.server.schemas.common import make_sampling
from pyluce.server.schemas.responses import (
    FunctionCallItem,
    FunctionOutputItem,
    InputText,
    MessageItem,
    ReasoningItem,
    ResponsesRequest,
)
from pyluce.server.settings import ServerSettings

_REASONING_FIELDS = ("reasoning.effort", "reasoning.effort", "reasoning.effort")
_SEALED = "luce1:"


def responses_job(body: ResponsesRequest, settings: ServerSettings) -> ChatJob:
    """What the request asks for. Raises RequestError naming the field that cannot be served."""
    if body.max_output_tokens is not None and body.max_output_tokens < 1:
        raise RequestError(f"max_output_tokens: expected at least 1, found {body.max_output_tokens}")
    fields = {name: getattr(settings.sampling, name) for name in settings.sampling.__dataclass_fields__}
    given = {"temperature": body.temperature, "top_p": body.top_p}
    fields.update({name: value for name, value in given.items() if value is not None})
    with_logprobs = "message.output_text.logprobs" in (body.include or ())
    if body.top_logprobs and not with_logprobs:
        raise RequestError("top_logprobs: expected with include 'message.output_text.logprobs' only")
    refuse_same_names([tool.name for tool in body.tools or ()], "tools[{}].name")
    return ChatJob(
        messages=_messages(body),
        sampling=make_sampling(fields, {}),
        max_tokens=body.max_output_tokens,
        max_tokens_field="max_output_tokens",
        n_logprobs=(body.top_logprobs or 0) if with_logprobs else None,
        tools=[_tool(tool.model_dump(exclude_none=True)) for tool in body.tools or ()] or None,
        tool_choice=_choice(body),
        parallel_calls=body.parallel_tool_calls is not False,
        reasoning=Reasoning(None, body.reasoning.effort if body.reasoning else None, None, _REASONING_FIELDS),
        json_format=_format(body),
    )


def seal(reasoning: str) -> str:
    """Reasoning as `encrypted_content`: opaque to clients, who send it back; there is nothing secret in it."""
    return _SEALED + base64.urlsafe_b64encode(reasoning.encode("utf-8", "surrogatepass")).decode("ascii")


def unseal(sealed: str, where: str) -> str:
    """The reasoning in `encrypted_content`. Raises RequestError for what `seal` did not make."""
    try:
        if not sealed.startswith(_SEALED):
            raise ValueError("not made by this server")
        raw = base64.b64decode(sealed.removeprefix(_SEALED), altchars=b"-_", validate=True)
        return raw.decode("utf-8", "surrogatepass")
    except (ValueError, binascii.Error) as error:
        raise RequestError(f"{where}: expected what this server sent, found other data ({error})") from error


def _messages(body: ResponsesRequest) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if body.instructions is not None:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        messages.append({"role": "user", "content": body.input})
        return messages
    if not body.input:
        raise RequestError("input: expected at least one item, found none")
    open_turn: dict[str, Any] | None = None  # the assistant's message that reasoning, text and calls belong to
    for index, item in enumerate(body.input):
        where = f"input[{index}]"
        if isinstance(item, MessageItem) and item.role != "assistant":
            open_turn = None
            role = "system" if item.role == "developer" else item.role
            messages.append({"role": role, "content": _text(item.content)})
        elif isinstance(item, FunctionOutputItem):
            open_turn = None
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})
        else:
            if open_turn is None or (isinstance(item, ReasoningItem) and len(open_turn) > 2):
                open_turn = {"role": "assistant", "content": ""}
                messages.append(open_turn)
            _add_to_turn(open_turn, item, where)
    return messages


def _add_to_turn(turn: dict[str, Any], item: MessageItem | FunctionCallItem | ReasoningItem, where: str) -> None:
    if isinstance(item, MessageItem):
        turn["content"] += _text(item.content)
    elif isinstance(item, FunctionCallItem):
        function = {"name": item.name, "arguments": check_arguments(item.arguments, f"{where}.arguments")}
        turn.setdefault("tool_calls", []).append({"id": item.call_id, "type": "function", "function": function})
    else:
        reasoning = "".join(part.text for part in item.content or ())
        if not reasoning and item.encrypted_content is not None:
            reasoning = unseal(item.encrypted_content, f"{where}.encrypted_content")
        turn["reasoning_content"] = reasoning


def _text(content: str | list[InputText]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    function = {key: value for key, value in tool.items() if key != "type"}
    return {"type": "function", "function": function}


def _choice(body: ResponsesRequest) -> ToolChoice:
    choice = body.tool_choice
    if choice is None:
        return ToolChoice()
    return ToolChoice(choice) if isinstance(choice, str) else ToolChoice("named", choice.name)


def _format(body: ResponsesRequest) -> JsonFormat | None:
    given = body.text.format if body.text is not None else None
    if given is None or given.type == "text":
        return None
    if given.type == "json_object":
        return JsonFormat(None, "text.format")
    if given.schema_ is None:
        raise RequestError("text.format.schema: required, but missing")
    return JsonFormat(given.schema_, "text.format.schema")
