"""Endpoints about the server: health, props, metrics, status, models, the page. None of them asks the engine thread anything."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from pyluce import __version__
from pyluce.server.context import AppContext, get_context
from pyluce.server.errors import ApiError
from pyluce.server.health import judge
from pyluce.server.jsontext import JsonResponse
from pyluce.server.memory import to_plain
from pyluce.server.metrics import CONTENT_TYPE
from pyluce.server.page import page_response
from pyluce.server.props import props
from pyluce.server.schemas.props import Props
from pyluce.server.sse import EventStreamResponse, frame

router = APIRouter()

OPEN_PATHS = ("/", "/health", "/health/live", "/props", "/openapi.json")
"""What needs no API key: what a watchdog, a client's set-up and the page's own text ask for."""


@router.get("/health", tags=["server"])
async def get_health(request: Request) -> Response:
    """200 when requests can be served (idle or busy), 503 when the engine is stalled or gone."""
    context = get_context(request)
    stats = context.service.stats()
    health = judge(stats, context.settings.heartbeat_limit_s)
    return JsonResponse(health.as_dict(stats), status_code=200 if health.ready else 503)


@router.get("/health/live", tags=["server"])
async def get_liveness() -> Response:
    """200 as long as this process answers at all."""
    return JsonResponse({"status": "ok"})


@router.get("/props", tags=["server"], response_model=Props)
async def get_props(request: Request) -> Response:
    """How the server runs."""
    return JsonResponse(props(get_context(request)))


@router.get("/metrics", tags=["server"])
async def get_metrics(request: Request) -> Response:
    """Numbers for Prometheus."""
    return Response(get_context(request).counters.text(), media_type=CONTENT_TYPE)


@router.get("/v1/models", tags=["server"])
async def list_models(request: Request) -> Response:
    """The one model."""
    context = get_context(request)
    return JsonResponse({"object": "list", "data": [_model(context)]})


@router.get("/v1/models/{model_id:path}", tags=["server"])
async def get_model(model_id: str, request: Request) -> Response:
    """The one model, by its name."""
    context = get_context(request)
    if model_id != context.model_name:
        message = f"model: expected {context.model_name!r}, found {model_id!r}"
        raise ApiError(404, message, param="model", code="model_not_found")
    return JsonResponse(_model(context))


@router.get("/status/json", tags=["server"])
async def get_status(request: Request) -> Response:
    """What the status page shows, once."""
    return JsonResponse(status(get_context(request)))


@router.get("/status/events", tags=["server"])
async def stream_status(request: Request) -> Response:
    """What the status page shows, as server-sent events, several times a second."""
    context = get_context(request)
    return EventStreamResponse(_status_frames(context), context.settings.keep_alive_s)


@router.get("/", tags=["server"])
async def get_page() -> Response:
    """The status page."""
    return page_response()


def status(context: AppContext) -> dict[str, Any]:
    """One snapshot of the engine for people to look at."""
    stats = context.service.stats()
    health = judge(stats, context.settings.heartbeat_limit_s)
    now = time.perf_counter()
    return {
        "model": context.model_name,
        "version": __version__,
        "n_ctx": context.service.info.n_ctx,
        "uptime_s": round(now - stats.started_at, 1),
        "health": health.as_dict(stats),
        "activity": stats.activity.value,
        "slots": [
            {
                "slot": index,
                "state": slot.state.value,
                "request_id": slot.request_id,
                "prompt_done": slot.prompt_done,
                "prompt_total": slot.prompt_total,
                "generated": slot.generated,
                "tokens_per_second": round(slot.tokens_per_second, 1),
            }
            for index, slot in enumerate(stats.slots)
        ],
        "queue": {"length": stats.queue_length, "limit": stats.max_queue},
        "rates": {
            "prompt_tokens_per_second": round(stats.prompt_tokens_per_second, 1),
            "generated_tokens_per_second": round(stats.generated_tokens_per_second, 1),
        },
        "totals": {
            "requests": {outcome.value: count for outcome, count in stats.requests.items()},
            "refused": stats.refused,
            "prompt_tokens": stats.prompt_tokens_total,
            "cached_prompt_tokens": stats.cached_tokens_total,
            "generated_tokens": stats.generated_tokens_total,
            "decode_steps": stats.decode_steps,
            "decode_rows": stats.decode_rows,
            "prefill_chunks": stats.prefill_chunks,
            "invariant_violations": stats.invariant_violations,
        },
        "memory": to_plain(stats.memory),
        "experts": None,
    }


def _model(context: AppContext) -> dict[str, Any]:
    info = context.service.info
    return {
        "id": context.model_name,
        "object": "model",
        "created": int(context.started_at),
        "owned_by": "luce",
        "context_length": info.n_ctx,
        "max_context_length": info.n_ctx_train or info.n_ctx,
    }


async def _status_frames(context: AppContext) -> AsyncGenerator[bytes, None]:
    interval = context.settings.status_interval_s
    while not context.stopping.is_set():
        yield frame(status(context), "status")
        try:
            await asyncio.wait_for(context.stopping.wait(), interval)
        except asyncio.TimeoutError:
            continue
