"""The HTTP application: routes, middleware, error shapes."""

from __future__ import annotations

from functools import partial
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from starlette.middleware.cors import CORSMiddleware

from pyluce import __version__
from pyluce.server.context import AppContext
from pyluce.server.errors import install_handlers
from pyluce.server.metrics import CountRequests, HttpCounters
from pyluce.server.middleware import REQUEST_ID_HEADER, ApiKey, BodyLimit, RequestIds
from pyluce.server.protocols import Service
from pyluce.server.routes import chat, completions, messages, parking, responses, server_state, tokens
from pyluce.server.settings import ServerSettings

_ROUTERS = (
    chat.router,
    completions.router,
    responses.router,
    messages.router,
    tokens.router,
    parking.router,
    server_state.router,
)


def create_app(service: Service, settings: ServerSettings | None = None) -> FastAPI:
    """The application that serves `service`, which it does not close."""
    settings = settings or ServerSettings()
    app = FastAPI(
        title="luce",
        version=__version__,
        description="Exact inference of Qwen4-Exp models, over the APIs that clients already speak.",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    counters = HttpCounters(service)
    paths = sorted({route.path for router in _ROUTERS for route in router.routes if isinstance(route, APIRoute)})
    app.state.luce = AppContext(service, settings, counters, tuple(paths))
    for router in _ROUTERS:
        app.include_router(router)
    install_handlers(app)
    # the last one added is the outermost
    app.add_middleware(BodyLimit, max_bytes=settings.max_body_bytes)
    if settings.api_key is not None:
        app.add_middleware(ApiKey, key=settings.api_key, open_paths=server_state.OPEN_PATHS)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=[REQUEST_ID_HEADER],
        )
    app.add_middleware(CountRequests, counters=counters, paths=paths)
    app.add_middleware(RequestIds)
    app.openapi = partial(_describe, app)  # type: ignore[method-assign]
    return app


def _describe(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI document with the errors that are really sent, in place of FastAPI's own."""
    if app.openapi_schema is not None:
        return app.openapi_schema
    document = get_openapi(
        title=app.title, version=app.version, description=app.description, routes=app.routes, tags=app.openapi_tags
    )
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    schemas["Error"] = _ERROR_SCHEMA
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    for operations in document["paths"].values():
        for operation in operations.values():
            operation["responses"].pop("422", None)
            operation["responses"]["default"] = {
                "description": "The request was refused, or failed.",
                "content": content,
            }
    app.openapi_schema = document
    return document


_ERROR_SCHEMA: dict[str, Any] = {
    "type": "object",
    "description": "OpenAI's shape; below /v1/messages Anthropic's, with a type at the top.",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
            "required": ["message", "type"],
        },
    },
    "required": ["error"],
}
