"""POST /park and /unpark: give the model's memory back, and load it again."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from pyluce.server.context import get_context
from pyluce.server.errors import as_api_error
from pyluce.server.jsontext import JsonResponse
from pyluce.server.schemas.common import Strict

router = APIRouter()


class ParkRequest(Strict):
    """The body of /park; it may be left out."""

    discard: bool = Field(False, description="Let the prefix cache go where there is no cache folder to keep it in.")


@router.post("/park", tags=["server"])
async def park(request: Request, body: ParkRequest | None = None) -> Response:
    """Release weights, state and caches. 409 when something would be lost; `changed` is false when it is parked already."""
    service = get_context(request).service
    discard = body is not None and body.discard
    try:
        changed = await asyncio.to_thread(service.park, discard=discard)
    except Exception as error:
        raise as_api_error(error) from error
    return JsonResponse(_answer("parked", changed))


@router.post("/unpark", tags=["server"])
async def unpark(request: Request) -> Response:
    """Load a parked model again and answer when it is there; `changed` is false when it was not parked. 503 when it cannot be loaded."""
    service = get_context(request).service
    try:
        changed = await asyncio.to_thread(service.unpark)
    except Exception as error:
        raise as_api_error(error) from error
    return JsonResponse(_answer("loaded", changed))


def _answer(status: str, changed: bool) -> dict[str, Any]:
    return {"status": status, "changed": changed}
