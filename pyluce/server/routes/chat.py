"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from pyluce.engine import RequestError
from pyluce.server.context import AppContext, get_context, openai_failure
from pyluce.server.conversation import chat_messages, chat_tools
from pyluce.server.jobs import ChatJob, JsonFormat, Reasoning, ToolChoice
from pyluce.server.prepare import plan_chat
from pyluce.server.reply import Answer, CallArguments, CallStart, End, Piece, Text, Token, new_id
from pyluce.server.reply import Reasoning as ReasoningPiece
from pyluce.server.schemas.chat import ChatRequest
from pyluce.server.schemas.common import stop_strings
from pyluce.server.settings import ServerSettings
from pyluce.server.sse import DONE, frame
from pyluce.server.usage import openai_usage

router = APIRouter()


@router.post("/v1/chat/completions", tags=["generation"])
async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
    """Answer a conversation."""
    context = get_context(request)
    job = chat_job(body, context.settings)
    plan = await context.text(request, partial(plan_chat, context=context, job=job))
    writer = ChatWriter(context, len(plan.choices), body)
    return await context.answer(request, plan, writer, bool(body.stream))


def chat_job(body: ChatRequest, settings: ServerSettings) -> ChatJob:
    """What the request asks for. Raises RequestError or ApiError naming the field that cannot be served."""
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options: expected with stream true only")
    if body.top_logprobs is not None and not body.logprobs:
        raise RequestError("top_logprobs: expected with logprobs true only")
    return ChatJob(
        messages=chat_messages(body.messages),
        sampling=body.sampling(settings.sampling),
        n=body.n or 1,
        max_tokens=_max_tokens(body),
        stop=stop_strings(body.stop),
        n_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        reasoning=_reasoning(body),
        template_variables=body.chat_template_kwargs or {},
        tools=chat_tools(body.tools),
        tool_choice=_tool_choice(body),
        parallel_calls=body.parallel_tool_calls is not False,
        json_format=_json_format(body),
    )


class ChatWriter:
    """Writes chat completions and their chunks."""

    def __init__(self, context: AppContext, n: int, body: ChatRequest) -> None:
        self._texts = context.token_texts
        self._head = {"id": new_id("chatcmpl-"), "created": int(time.time()), "model": context.model_name}
        self._n = n
        self._n_top = body.top_logprobs or 0
        self._with_logprobs = bool(body.logprobs)
        self._include_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
        self._ends: dict[int, End] = {}

    def whole(self, answers: list[Answer]) -> dict[str, Any]:
        ends = [answer.end for answer in answers]
        return {
            **self._head,
            "object": "chat.completion",
            "choices": [self._choice(index, answer) for index, answer in enumerate(answers)],
            "usage": openai_usage(ends),
        }

    def begin(self) -> list[bytes]:
        return [self._chunk(index, {"role": "assistant", "content": ""}, None, []) for index in range(self._n)]

    def frames(self, index: int, pieces: list[Piece]) -> list[bytes]:
        delta: dict[str, Any] = {}
        tokens = [piece.event for piece in pieces if isinstance(piece, Token)]
        calls: list[dict[str, Any]] = []
        end: End | None = None
        for piece in pieces:
            if isinstance(piece, Text):
                delta["content"] = delta.get("content", "") + piece.text
            elif isinstance(piece, ReasoningPiece):
                delta["reasoning_content"] = delta.get("reasoning_content", "") + piece.text
            elif isinstance(piece, CallStart):
                function = {"name": piece.name, "arguments": ""}
                calls.append({"index": piece.index, "id": piece.id, "type": "function", "function": function})
            elif isinstance(piece, CallArguments):
                calls.append({"index": piece.index, "function": {"arguments": piece.text}})
            elif isinstance(piece, End):
                end = piece
        if calls:
            delta["tool_calls"] = calls
        entries = [self._texts.chat_entry(event, self._n_top) for event in tokens]
        chunks = [self._chunk(index, delta, None, entries)] if delta or entries else []
        if end is not None:
            self._ends[index] = end
            chunks.append(self._chunk(index, {}, end.reason, []))
        return chunks

    def end(self) -> list[bytes]:
        if not self._include_usage:
            return [DONE]
        usage = openai_usage([self._ends[index] for index in range(self._n)])
        body = {**self._head, "object": "chat.completion.chunk", "choices": [], "usage": usage}
        return [frame(body), DONE]

    def failure(self, error: BaseException) -> list[bytes]:
        return openai_failure(error)

    def _choice(self, index: int, answer: Answer) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": answer.text or (None if answer.calls else "")}
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        if answer.calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.text}}
                for call in answer.calls
            ]
        entries = [self._texts.chat_entry(event, self._n_top) for event in answer.tokens]
        return {
            "index": index,
            "message": message,
            "logprobs": {"content": entries} if self._with_logprobs else None,
            "finish_reason": answer.end.reason,
        }

    def _chunk(self, index: int, delta: dict[str, Any], reason: str | None, entries: list[dict[str, Any]]) -> bytes:
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": {"content": entries} if entries else None,
            "finish_reason": reason,
        }
        body = {**self._head, "object": "chat.completion.chunk", "choices": [choice]}
        if self._include_usage:
            body["usage"] = None
        return frame(body)


def _max_tokens(body: ChatRequest) -> int | None:
    both = (body.max_tokens, body.max_completion_tokens)
    if None not in both and both[0] != both[1]:
        raise RequestError(f"max_completion_tokens: expected the same as max_tokens ({both[0]}), found {both[1]}")
    name = "max_tokens" if body.max_tokens is not None else "max_completion_tokens"
    value = both[0] if both[0] is not None else both[1]
    if value is not None and value < 1:
        raise RequestError(f"{name}: expected at least 1, found {value}")
    return value


def _reasoning(body: ChatRequest) -> Reasoning:
    nested = body.reasoning
    effort, budget = body.reasoning_effort, body.thinking_budget
    fields = ["enable_thinking", "reasoning_effort", "thinking_budget"]
    if nested is not None and nested.effort is not None:
        if effort is not None and effort != nested.effort:
            raise RequestError("reasoning.effort: contradicts reasoning_effort, expected one of them")
        effort, fields[1] = nested.effort, "reasoning.effort"
    if nested is not None and nested.max_tokens is not None:
        if budget is not None and budget != nested.max_tokens:
            raise RequestError("reasoning.max_tokens: contradicts thinking_budget, expected one of them")
        budget, fields[2] = nested.max_tokens, "reasoning.max_tokens"
    return Reasoning(body.enable_thinking, effort, budget, (fields[0], fields[1], fields[2]))


def _tool_choice(body: ChatRequest) -> ToolChoice:
    choice = body.tool_choice
    if choice is None:
        return ToolChoice()
    return ToolChoice(choice) if isinstance(choice, str) else ToolChoice("named", choice.function.name)


def _json_format(body: ChatRequest) -> JsonFormat | None:
    given = body.response_format
    if given is None:
        return None
    if (given.type == "json_schema") != (given.json_schema is not None):
        raise RequestError("response_format.json_schema: expected with the type json_schema, and only with it")
    if given.type == "text":
        return None
    if given.json_schema is None:
        return JsonFormat(None, "response_format")
    if given.json_schema.schema_ is None:
        raise RequestError("response_format.json_schema.schema: required, but missing")
    return JsonFormat(given.json_schema.schema_, "response_format.json_schema.schema")
