"""What happens around every route: request ids, the API key, the size of a body. Plain ASGI, so that streams pass untouched."""

from __future__ import annotations

import hmac
import re
import uuid
from collections.abc import Iterable

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pyluce.server.errors import ApiError

REQUEST_ID_HEADER = "x-request-id"
_CLIENT_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class RequestIds:
    """Gives every request an id (the client's own `X-Request-Id` where it sent a plain one) and returns it in a header."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(REQUEST_ID_HEADER, "")
        request_id = given if _CLIENT_ID.fullmatch(given) else f"req_{uuid.uuid4().hex}"
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[REQUEST_ID_HEADER] = request_id
            await send(message)

        await self._app(scope, receive, send_with_id)


class ApiKey:
    """Refuses requests without the key, except for the `open_paths`."""

    def __init__(self, app: ASGIApp, key: str, open_paths: Iterable[str]) -> None:
        self._app = app
        self._key = key.encode()
        self._open = frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in self._open or scope["method"] == "OPTIONS":
            await self._app(scope, receive, send)
            return
        found = _sent_key(Headers(scope=scope))
        if found is not None and hmac.compare_digest(found.encode("latin-1"), self._key):
            await self._app(scope, receive, send)
            return
        what = "none" if found is None else "another"
        message = f"API key: expected the server's key as 'Authorization: Bearer KEY' or 'x-api-key: KEY', found {what}"
        error = ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        await error.response(scope["path"])(scope, receive, send)


class BodyLimit:
    """Reads a body whole before its route runs; a body over the limit gets 413 and a body that is not JSON 415."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] not in ("POST", "PUT", "PATCH"):
            await self._app(scope, receive, send)
            return
        try:
            body = await self._read(Headers(scope=scope), receive)
        except ApiError as error:
            await error.response(scope["path"])(scope, receive, send)
            return
        if body is None:
            return
        await self._app(scope, _replay(body, receive), send)

    async def _read(self, headers: Headers, receive: Receive) -> bytes | None:
        """The body; None when the client went away before its end."""
        declared = headers.get("content-length", "")
        if declared.isdigit() and int(declared) > self._max_bytes:
            raise self._too_large(f"{declared} bytes")
        parts: list[bytes] = []
        size = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > self._max_bytes:
                raise self._too_large("more")
            if not message.get("more_body", False):
                break
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if size and kind != "application/json":
            found = f"Content-Type: expected application/json, found {kind or 'none'}"
            raise ApiError(415, found, code="unsupported_media_type")
        return b"".join(parts)

    def _too_large(self, found: str) -> ApiError:
        message = f"body: expected at most {self._max_bytes} bytes, found {found}"
        return ApiError(413, message, code="body_too_large", headers={"Connection": "close"})


def _replay(body: bytes, receive: Receive) -> Receive:
    sent = False

    async def replay() -> Message:
        nonlocal sent
        if sent:
            return await receive()
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


def _sent_key(headers: Headers) -> str | None:
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        return key.strip()
    return headers.get("x-api-key")
