"""POST /v1/completions: continue plain text or token ids, several prompts at once if need be."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from pyluce.engine import RequestError, TokenEvent
from pyluce.server.context import AppContext, get_context, openai_failure
from pyluce.server.prepare import plan_text
from pyluce.server.protocols import TextTools
from pyluce.server.reply import Answer, End, Piece, Plan, Text, Token, new_id
from pyluce.server.schemas.common import stop_strings
from pyluce.server.schemas.completions import CompletionRequest
from pyluce.server.settings import MAX_CHOICES
from pyluce.server.sse import DONE, frame
from pyluce.server.token_texts import finite
from pyluce.server.usage import openai_usage

router = APIRouter()


@router.post("/v1/completions", tags=["generation"])
async def create_completion(body: CompletionRequest, request: Request) -> Response:
    """Continue a text."""
    context = get_context(request)
    prompts = split_prompts(body.prompt)
    n = body.n or 1
    if len(prompts) * n > MAX_CHOICES:
        raise RequestError(
            f"prompt: expected at most {MAX_CHOICES} choices in all, found {len(prompts)} prompts with n {n}"
        )
    if body.max_tokens is not None and body.max_tokens < 1:
        raise RequestError(f"max_tokens: expected at least 1, found {body.max_tokens}")
    sampling = body.sampling(context.settings.sampling)
    stop = stop_strings(body.stop)

    def work(tools: TextTools) -> Plan:
        plans = [
            plan_text(
                tools,
                context,
                prompt,
                n,
                max_tokens=body.max_tokens,
                stop=stop,
                sampling=sampling,
                n_logprobs=body.logprobs,
            )
            for prompt in prompts
        ]
        choices = tuple(request for plan in plans for request in plan)
        return Plan(choices, with_tokens=body.logprobs is not None)

    plan = await context.text(request, work)
    return await context.answer(request, plan, CompletionWriter(context, body, len(prompts)), bool(body.stream))


def split_prompts(prompt: str | list[str] | list[int] | list[list[int]]) -> list[str | list[int]]:
    """The prompts of a request, each a text or token ids. Raises RequestError when there are none."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise RequestError("prompt: expected a text, texts or token ids, found an empty list")
    if isinstance(prompt[0], int):
        return [[token for token in prompt if isinstance(token, int)]]
    return [item for item in prompt if not isinstance(item, int)]


class CompletionWriter:
    """Writes text completions and their chunks, which have the same shape."""

    def __init__(self, context: AppContext, body: CompletionRequest, n_prompts: int) -> None:
        self._texts = context.token_texts
        self._head = {
            "id": new_id("cmpl-"),
            "object": "text_completion",
            "created": int(time.time()),
            "model": context.model_name,
        }
        self._n_prompts = n_prompts
        self._n_top = body.logprobs
        self._include_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
        self._ends: dict[int, End] = {}
        self._offsets: dict[int, int] = {}

    def whole(self, answers: list[Answer]) -> dict[str, Any]:
        ends = [answer.end for answer in answers]
        choices = [
            self._choice(index, answer.text, answer.end.reason, answer.tokens) for index, answer in enumerate(answers)
        ]
        return {**self._head, "choices": choices, "usage": openai_usage(ends, self._n_prompts)}

    def begin(self) -> list[bytes]:
        return []

    def frames(self, index: int, pieces: list[Piece]) -> list[bytes]:
        text = "".join(piece.text for piece in pieces if isinstance(piece, Text))
        tokens = [piece.event for piece in pieces if isinstance(piece, Token)]
        end = next((piece for piece in pieces if isinstance(piece, End)), None)
        if end is not None:
            self._ends[index] = end
        if not text and not tokens and end is None:
            return []
        return [self._chunk(self._choice(index, text, end.reason if end else None, tokens))]

    def end(self) -> list[bytes]:
        if not self._include_usage:
            return [DONE]
        ends = [self._ends[index] for index in sorted(self._ends)]
        return [frame({**self._head, "choices": [], "usage": openai_usage(ends, self._n_prompts)}), DONE]

    def failure(self, error: BaseException) -> list[bytes]:
        return openai_failure(error)

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        body: dict[str, Any] = {**self._head, "choices": [choice]}
        if self._include_usage:
            body["usage"] = None
        return frame(body)

    def _choice(self, index: int, text: str, reason: str | None, tokens: Sequence[TokenEvent]) -> dict[str, Any]:
        logprobs = self._logprobs(index, tokens) if self._n_top is not None and tokens else None
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _logprobs(self, index: int, tokens: Sequence[TokenEvent]) -> dict[str, Any]:
        """Offsets count the characters of the tokens' own texts from the beginning of the answer."""
        texts = [self._texts.text(event.token) for event in tokens]
        offsets = []
        offset = self._offsets.get(index, 0)
        for text in texts:
            offsets.append(offset)
            offset += len(text)
        self._offsets[index] = offset
        return {
            "tokens": texts,
            "token_logprobs": [finite(event.logprob) for event in tokens],
            "top_logprobs": [self._texts.top_by_text(event, self._n_top or 0) for event in tokens],
            "text_offset": offsets,
        }
