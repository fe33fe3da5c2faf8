"""Writes the Responses API's response: output items, whole or as the events of a stream."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from pyluce.engine import TokenEvent
from pyluce.server.context import AppContext
from pyluce.server.errors import as_api_error
from pyluce.server.reply import Answer, CallArguments, End, Kind, Part, Piece, Text, Token, new_id
from pyluce.server.reply import Reasoning as ReasoningPiece
from pyluce.server.responses_input import seal
from pyluce.server.schemas.responses import ResponsesRequest
from pyluce.server.sse import frame
from pyluce.server.usage import timings

_PREFIXES = {Kind.TEXT: "msg_", Kind.REASONING: "rs_", Kind.CALL: "fc_"}


class ResponseWriter:
    """One response: there is one choice only."""

    def __init__(self, context: AppContext, body: ResponsesRequest) -> None:
        self._texts = context.token_texts
        self._body = body
        include = body.include or ()
        self._sealed = "reasoning.encrypted_content" in include
        self._n_top = (body.top_logprobs or 0) if "message.output_text.logprobs" in include else None
        self._head = {
            "id": new_id("resp_"),
            "object": "response",
            "created_at": int(time.time()),
            "model": context.model_name,
        }
        self._answer = Answer()
        self._items: list[dict[str, Any]] = []
        self._ids: list[str] = []
        self._sequence = -1

    def whole(self, answers: list[Answer]) -> dict[str, Any]:
        (answer,) = answers
        self._ids = [new_id(_PREFIXES[part.kind]) for part in answer.parts]
        items = [self._item(index, part, answer.tokens) for index, part in enumerate(answer.parts)]
        return self._response(_status(answer.end), items, answer.end)

    def begin(self) -> list[bytes]:
        response = self._response("in_progress", [], None)
        return [
            self._event("response.created", response=response),
            self._event("response.in_progress", response=response),
        ]

    def frames(self, index: int, pieces: list[Piece]) -> list[bytes]:
        out: list[bytes] = []
        for piece in pieces:
            open_part = self._answer.parts[-1] if self._answer.parts else None
            begun = self._answer.add(piece)
            if begun is not None:
                out += self._close(open_part)
                out += self._open(begun)
            out += self._delta(piece, [item.event for item in pieces if isinstance(item, Token)])
            if isinstance(piece, End):
                out += self._close(open_part)
        return out

    def end(self) -> list[bytes]:
        end = self._answer.end
        status = _status(end)
        return [self._event(f"response.{status}", response=self._response(status, self._items, end))]

    def failure(self, error: BaseException) -> list[bytes]:
        api_error = as_api_error(error)
        code = "rate_limit_exceeded" if api_error.status == 429 else "server_error"
        response = self._response("failed", self._items, None)
        response["error"] = {"code": code, "message": api_error.message}
        return [self._event("response.failed", response=response)]

    def _open(self, part: Part) -> list[bytes]:
        self._ids.append(new_id(_PREFIXES[part.kind]))
        empty = self._item(len(self._ids) - 1, Part(part.kind, part.id, part.name), (), "in_progress")
        out = [self._event("response.output_item.added", output_index=len(self._ids) - 1, item=empty)]
        if part.kind is not Kind.CALL:
            out.append(self._place("response.content_part.added", part=self._content(part.kind, "", ())))
        return out

    def _delta(self, piece: Piece, tokens: Sequence[TokenEvent]) -> list[bytes]:
        if isinstance(piece, Text):
            logprobs = [self._texts.chat_entry(event, self._n_top or 0) for event in tokens]
            return [self._place("response.output_text.delta", delta=piece.text, logprobs=logprobs)]
        if isinstance(piece, ReasoningPiece):
            return [self._place("response.reasoning_text.delta", delta=piece.text)]
        if isinstance(piece, CallArguments):
            name = "response.function_call_arguments.delta"
            return [self._event(name, item_id=self._ids[-1], output_index=len(self._ids) - 1, delta=piece.text)]
        return []

    def _close(self, part: Part | None) -> list[bytes]:
        """The end of the part that was open; its whole text is repeated, as this API does."""
        if part is None:
            return []
        index = len(self._ids) - 1
        item = self._item(index, part, self._answer.tokens)
        self._items.append(item)
        if part.kind is Kind.CALL:
            out = [
                self._event(
                    "response.function_call_arguments.done",
                    item_id=self._ids[-1],
                    output_index=index,
                    name=part.name,
                    arguments=item["arguments"],
                )
            ]
        else:
            content = item["content"][0]
            if part.kind is Kind.TEXT:
                out = [self._place("response.output_text.done", text=part.text, logprobs=content["logprobs"])]
            else:
                out = [self._place("response.reasoning_text.done", text=part.text)]
            out.append(self._place("response.content_part.done", part=content))
        return [*out, self._event("response.output_item.done", output_index=index, item=item)]

    def _item(self, index: int, part: Part, tokens: Sequence[TokenEvent], status: str = "completed") -> dict[str, Any]:
        item_id = self._ids[index]
        if part.kind is Kind.CALL:
            return {
                "type": "function_call",
                "id": item_id,
                "call_id": part.id,
                "name": part.name,
                "arguments": part.text,
                "status": status,
            }
        done = status == "completed"
        content = [self._content(part.kind, part.text, tokens)] if done else []
        if part.kind is Kind.TEXT:
            return {"type": "message", "id": item_id, "role": "assistant", "status": status, "content": content}
        item: dict[str, Any] = {"type": "reasoning", "id": item_id, "summary": [], "content": content, "status": status}
        if self._sealed:
            item["encrypted_content"] = seal(part.text) if done else None
        return item

    def _content(self, kind: Kind, text: str, tokens: Sequence[TokenEvent]) -> dict[str, Any]:
        if kind is Kind.REASONING:
            return {"type": "reasoning_text", "text": text}
        logprobs = [self._texts.chat_entry(event, self._n_top or 0) for event in tokens]
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    def _response(self, status: str, items: list[dict[str, Any]], end: End | None) -> dict[str, Any]:
        body = self._body
        given = body.model_dump(mode="json", by_alias=True, exclude_none=True)
        text = given.get("text", {})
        reasoning = body.reasoning
        return {
            **self._head,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "output": list(items),
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": reasoning.effort if reasoning else None, "summary": None},
            "store": False,
            "temperature": body.temperature,
            "text": {"format": text.get("format", {"type": "text"})},
            "tool_choice": given.get("tool_choice", "auto"),
            "tools": given.get("tools", []),
            "top_p": body.top_p,
            "truncation": "disabled",
            "usage": _usage(end) if end is not None else None,
        }

    def _place(self, kind: str, **fields: Any) -> bytes:
        """An event about the one content part of the open item."""
        return self._event(kind, item_id=self._ids[-1], output_index=len(self._ids) - 1, content_index=0, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._sequence += 1
        return frame({"type": kind, "sequence_number": self._sequence, **fields}, kind)


def _status(end: End) -> str:
    return "incomplete" if end.reason == "length" else "completed"


def _usage(end: End) -> dict[str, Any]:
    spent = end.timings
    return {
        "input_tokens": spent.prompt_tokens,
        "input_tokens_details": {"cached_tokens": spent.cached_tokens},
        "output_tokens": spent.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": end.reasoning_tokens},
        "total_tokens": spent.prompt_tokens + spent.completion_tokens,
        "timings": timings([end]),
    }
