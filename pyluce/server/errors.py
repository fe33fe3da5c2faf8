"""What goes wrong with a request, in the shapes that clients expect: OpenAI's, and Anthropic's below /v1/messages."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from pyluce.engine import ContextLimitError, EngineError, LogitsError, RequestError
from pyluce.engine.errors import ConstraintError, DeadlineError, ParkedError, ParkError, QueueFullError, UnparkError
from pyluce.server.bridge import ClientGone
from pyluce.server.jsontext import JsonResponse
from pyluce.server.validation import describe
from pyluce.text import TemplateError
from pyluce.weights.errors import ModelError

log = logging.getLogger("pyluce.server")

ANTHROPIC_PREFIX = "/v1/messages"
CLIENT_CLOSED_REQUEST = 499
"""A status for the log: the client is not there to see it."""

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class ApiError(Exception):
    """An error with a status; `param` names the field, `code` is for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    @property
    def type(self) -> str:
        """OpenAI's name for this kind of error."""
        if self.status >= 500:
            return "server_error"
        return "rate_limit_error" if self.status == 429 else "invalid_request_error"

    def openai(self) -> dict[str, Any]:
        """The body in OpenAI's shape."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def anthropic(self) -> dict[str, Any]:
        """The body in Anthropic's shape."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": self.message}}

    def response(self, path: str) -> Response:
        """The response to a request for `path`."""
        body = self.anthropic() if path.startswith(ANTHROPIC_PREFIX) else self.openai()
        return JsonResponse(body, status_code=self.status, headers=self.headers)


def unsupported(field: str, expected: str, found: object) -> ApiError:
    """A 400 for a field or a value that this server does not implement."""
    return ApiError(400, f"{field}: expected {expected}, found {found}", param=field, code="unsupported_value")


def as_api_error(error: BaseException) -> ApiError:
    """The answer to an exception of any part of pyluce; one that nobody foresaw is logged and says nothing about the inside."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ContextLimitError):
        return ApiError(400, str(error), param=_field(str(error)), code="context_length_exceeded")
    if isinstance(error, RequestError):
        return ApiError(400, str(error), param=_field(str(error)), code="invalid_value")
    if isinstance(error, TemplateError):
        return ApiError(400, str(error), param="messages", code="invalid_messages")
    if isinstance(error, QueueFullError):
        seconds = max(1, math.ceil(error.retry_after_s))
        return ApiError(429, str(error), code="queue_full", headers={"Retry-After": str(seconds)})
    if isinstance(error, DeadlineError):
        return ApiError(504, str(error), code="deadline")
    if isinstance(error, ClientGone):
        return ApiError(CLIENT_CLOSED_REQUEST, "the client closed the request", code="client_gone")
    if isinstance(error, ParkedError):
        return ApiError(503, str(error), code="model_parked", headers={"Retry-After": f"{error.retry_after_s:.0f}"})
    if isinstance(error, UnparkError):
        return ApiError(503, str(error), code="unpark_failed")
    if isinstance(error, ParkError):
        return ApiError(409, str(error), code="cannot_park")
    if isinstance(error, EngineError):
        return ApiError(503, str(error), code="engine_unavailable")
    if isinstance(error, ModelError):
        log.error("a request failed: %s", error)
        return ApiError(503, str(error), code="model_file")
    if isinstance(error, (LogitsError, ConstraintError)):
        log.error("a request failed: %s", error)
        return ApiError(500, str(error), code="generation_failed")
    log.error("a request failed: %s", error, exc_info=error)
    return ApiError(500, f"the request failed inside the server: {type(error).__name__}", code="internal_error")


def install_handlers(app: FastAPI) -> None:
    """Answer every failure of a route in the right shape."""

    async def on_error(request: Request, error: Exception) -> Response:
        return as_api_error(error).response(request.url.path)

    async def on_validation(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        message, field = describe(error.errors(), error.body)
        return ApiError(400, message, param=field, code="invalid_value").response(request.url.path)

    async def on_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return _from_http(error, request).response(request.url.path)

    app.add_exception_handler(RequestValidationError, on_validation)
    app.add_exception_handler(HTTPException, on_http)
    for kind in (ApiError, RequestError, TemplateError, EngineError, QueueFullError, ClientGone, Exception):
        app.add_exception_handler(kind, on_error)


def _from_http(error: HTTPException, request: Request) -> ApiError:
    where = f"{request.method} {request.url.path}"
    if error.status_code == 404:
        return ApiError(404, f"{where}: there is no such endpoint; /openapi.json lists them", code="not_found")
    if error.status_code == 405:
        allowed = (error.headers or {}).get("allow", "")
        message = f"{where}: expected the method {allowed or 'that /openapi.json lists'}, found {request.method}"
        return ApiError(405, message, code="method_not_allowed", headers=error.headers)
    if error.status_code == 400:
        return ApiError(400, "body: expected a JSON object in UTF-8, it cannot be read", code="invalid_json")
    text = str(error.detail) or HTTPStatus(error.status_code).phrase
    return ApiError(error.status_code, text, headers=error.headers)


def _field(message: str) -> str | None:
    """The field that a message of the form `field: expected ...` names."""
    name, separator, _ = message.partition(":")
    return name if separator and name and " " not in name else None
