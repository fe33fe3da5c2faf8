"""POST /tokenize and /detokenize."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from pyluce.engine import RequestError
from pyluce.server.context import get_context
from pyluce.server.conversation import chat_messages, chat_tools
from pyluce.server.jobs import ChatJob
from pyluce.server.jsontext import JsonResponse
from pyluce.server.prepare import render_tokens
from pyluce.server.protocols import TextTools
from pyluce.server.schemas.completions import DetokenizeRequest, TokenizeRequest

router = APIRouter()


@router.post("/tokenize", tags=["text"])
async def tokenize(body: TokenizeRequest, request: Request) -> Response:
    """Token ids of a text, in which nothing is a special token, or of a conversation."""
    if (body.content is None) == (body.messages is None):
        raise RequestError(
            "content: expected either content or messages, found " + ("none" if body.content is None else "both")
        )
    if body.messages is None and (body.tools or body.chat_template_kwargs):
        raise RequestError("tools: expected tools and chat_template_kwargs with messages only, found content")
    if body.messages is not None and body.add_special:
        raise RequestError(
            "add_special: expected with content only, found messages, whose template writes the special tokens"
        )

    def work(tools: TextTools) -> dict[str, Any]:
        if body.messages is not None:
            job = ChatJob(
                messages=chat_messages(body.messages),
                tools=chat_tools(body.tools),
                template_variables=body.chat_template_kwargs or {},
            )
            tokens = list(render_tokens(tools, job))
        else:
            try:
                tokens = tools.tokenizer.encode_text(body.content or "", add_special=body.add_special)
            except ValueError as error:
                raise RequestError(f"content: {error}") from error
        answer: dict[str, Any] = {"tokens": tokens, "count": len(tokens)}
        if body.with_pieces:
            answer["pieces"] = [tools.tokenizer.token_bytes(token).decode("utf-8", "replace") for token in tokens]
        return answer

    return JsonResponse(await get_context(request).text(request, work))


@router.post("/detokenize", tags=["text"])
async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
    """The text of token ids, without control tokens."""

    def work(tools: TextTools) -> str:
        try:
            tools.tokenizer.check_tokens(body.tokens)
        except ValueError as error:
            raise RequestError(str(error)) from error
        return tools.tokenizer.decode(body.tokens)

    return JsonResponse({"content": await get_context(request).text(request, work)})
