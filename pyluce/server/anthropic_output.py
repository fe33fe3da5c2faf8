"""Writes Anthropic's message: content blocks, whole or as the events of a stream."""

from __future__ import annotations

import json
from typing import Any

from pyluce.server.context import AppContext
from pyluce.server.errors import as_api_error
from pyluce.server.reply import Answer, CallArguments, End, Kind, Part, Piece, Plan, Text, new_id
from pyluce.server.reply import Reasoning as ReasoningPiece
from pyluce.server.sse import frame
from pyluce.server.usage import timings

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessageWriter:
    """One message: there is one choice only."""

    def __init__(self, context: AppContext, plan: Plan) -> None:
        self._head = {"id": new_id("msg_"), "type": "message", "role": "assistant", "model": context.model_name}
        self._prompt_tokens = len(plan.choices[0].prompt)
        self._answer = Answer()
        self._index = -1

    def whole(self, answers: list[Answer]) -> dict[str, Any]:
        (answer,) = answers
        end = answer.end
        return {
            **self._head,
            "content": [_block(part) for part in answer.parts],
            **_stop(end),
            "usage": {
                **self._usage(end.timings.completion_tokens, end.timings.cached_tokens),
                "timings": timings([end]),
            },
        }

    def begin(self) -> list[bytes]:
        message: dict[str, Any] = {
            **self._head,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(0),
        }
        return [_event({"type": "message_start", "message": message}), _event({"type": "ping"})]

    def frames(self, index: int, pieces: list[Piece]) -> list[bytes]:
        out: list[bytes] = []
        for piece in pieces:
            begun = self._answer.add(piece)
            if begun is not None:
                out += self._close_block()
                self._index += 1
                out.append(
                    _event({"type": "content_block_start", "index": self._index, "content_block": _empty(begun)})
                )
            delta = _delta(piece)
            if delta is not None:
                out.append(_event({"type": "content_block_delta", "index": self._index, "delta": delta}))
            if isinstance(piece, End):
                out += self._close_block()
                usage = {
                    **self._usage(piece.timings.completion_tokens, piece.timings.cached_tokens),
                    "timings": timings([piece]),
                }
                out.append(_event({"type": "message_delta", "delta": _stop(piece), "usage": usage}))
        return out

    def end(self) -> list[bytes]:
        return [_event({"type": "message_stop"})]

    def failure(self, error: BaseException) -> list[bytes]:
        return [frame(as_api_error(error).anthropic(), "error")]

    def _close_block(self) -> list[bytes]:
        return [_event({"type": "content_block_stop", "index": self._index})] if self._index >= 0 else []

    def _usage(self, output_tokens: int, cached_tokens: int = 0) -> dict[str, Any]:
        return {
            "input_tokens": self._prompt_tokens - cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached_tokens,
            "output_tokens": output_tokens,
        }


def _stop(end: End) -> dict[str, Any]:
    reason = "stop_sequence" if end.stop_string is not None else _STOP_REASONS[end.reason]
    return {"stop_reason": reason, "stop_sequence": end.stop_string}


def _block(part: Part) -> dict[str, Any]:
    if part.kind is Kind.TEXT:
        return {"type": "text", "text": part.text}
    if part.kind is Kind.REASONING:
        return {"type": "thinking", "thinking": part.text, "signature": ""}
    return {"type": "tool_use", "id": part.id, "name": part.name, "input": _parsed(part.text)}


def _empty(part: Part) -> dict[str, Any]:
    if part.kind is Kind.TEXT:
        return {"type": "text", "text": ""}
    if part.kind is Kind.REASONING:
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "tool_use", "id": part.id, "name": part.name, "input": {}}


def _delta(piece: Piece) -> dict[str, Any] | None:
    if isinstance(piece, Text):
        return {"type": "text_delta", "text": piece.text}
    if isinstance(piece, ReasoningPiece):
        return {"type": "thinking_delta", "thinking": piece.text}
    if isinstance(piece, CallArguments):
        return {"type": "input_json_delta", "partial_json": piece.text}
    return None


def _parsed(arguments: str) -> Any:
    """A call's input. What an answer that was cut off left incomplete cannot be an object; it is handed over as it is."""
    try:
        return json.loads(arguments) if arguments else {}
    except ValueError:
        return {"_incomplete": arguments}


def _event(data: dict[str, Any]) -> bytes:
    return frame(data, data["type"])
