"""POST /v1/responses: OpenAI's Responses API. The server remembers nothing between two requests."""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter, Request
from starlette.responses import Response

from pyluce.server.context import get_context
from pyluce.server.prepare import plan_chat
from pyluce.server.responses_input import responses_job
from pyluce.server.responses_output import ResponseWriter
from pyluce.server.schemas.responses import ResponsesRequest

router = APIRouter()


@router.post("/v1/responses", tags=["generation"])
async def create_response(body: ResponsesRequest, request: Request) -> Response:
    """Answer a conversation."""
    context = get_context(request)
    job = responses_job(body, context.settings)
    plan = await context.text(request, partial(plan_chat, context=context, job=job))
    return await context.answer(request, plan, ResponseWriter(context, body), bool(body.stream))
