"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API, which coding agents speak."""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter, Request
from starlette.responses import Response

from pyluce.server.anthropic_input import anthropic_job
from pyluce.server.anthropic_output import MessageWriter
from pyluce.server.context import get_context
from pyluce.server.jsontext import JsonResponse
from pyluce.server.prepare import plan_chat, render_tokens
from pyluce.server.schemas.anthropic import CountTokensRequest, MessagesRequest

router = APIRouter()


@router.post("/v1/messages", tags=["generation"])
async def create_message(body: MessagesRequest, request: Request) -> Response:
    """Answer a conversation."""
    context = get_context(request)
    job = anthropic_job(body, context.settings)
    plan = await context.text(request, partial(plan_chat, context=context, job=job))
    return await context.answer(request, plan, MessageWriter(context, plan), bool(body.stream))


@router.post("/v1/messages/count_tokens", tags=["text"])
async def count_tokens(body: CountTokensRequest, request: Request) -> Response:
    """The tokens that the conversation would be as a prompt."""
    context = get_context(request)
    job = anthropic_job(body, context.settings)
    tokens = await context.text(request, partial(render_tokens, job=job))
    return JsonResponse({"input_tokens": len(tokens)})
