"""Server-sent events: frames, keep-alive comments, and a response that notices when its client has gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import suppress
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pyluce.server.jsontext import to_json

KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"


def frame(data: Any, event: str | None = None) -> bytes:
    """One event; `data` is sent as one line of JSON."""
    head = f"event: {event}\n" if event else ""
    return f"{head}data: {to_json(data)}\n\n".encode("ascii")


class EventStreamResponse(Response):
    """Sends the frames of an async generator.

    The generator is closed and `on_close` called when it ends, when the client disconnects, and when the server stops the request,
    even before the first frame. A comment is sent after each `keep_alive_s` of silence.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        frames: AsyncGenerator[bytes, None],
        keep_alive_s: float,
        on_close: Callable[[], None] = lambda: None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self._frames = frames
        self._on_close = on_close
        self._keep_alive_s = keep_alive_s
        self._last_sent = 0.0
        self.status_code = 200
        self.background = None
        self.init_headers({"Cache-Control": "no-store", "X-Accel-Buffering": "no", **(headers or {})})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self._send_all(send))
        gone = asyncio.ensure_future(wait_for_disconnect(receive))
        try:
            await asyncio.wait((sending, gone), return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                with suppress(OSError):  # the client went while a frame was being sent
                    sending.result()
        finally:
            self._on_close()
            await cancel_and_wait(sending, gone)
            await self._frames.aclose()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        loop = asyncio.get_running_loop()
        self._last_sent = loop.time()
        comments = asyncio.ensure_future(self._send_comments(send))
        try:
            async for data in self._frames:
                await _send_body(send, data)
                self._last_sent = loop.time()
        finally:
            await cancel_and_wait(comments)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_comments(self, send: Send) -> None:
        """A frame is sent as one message, so a comment can only come between two of them."""
        loop = asyncio.get_running_loop()
        while True:
            silent_until = self._last_sent + self._keep_alive_s
            await asyncio.sleep(max(0.0, silent_until - loop.time()))
            if self._last_sent + self._keep_alive_s <= loop.time():
                await _send_body(send, KEEP_ALIVE)
                self._last_sent = loop.time()


async def wait_for_disconnect(receive: Receive) -> None:
    """Return when the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def cancel_and_wait(*tasks: asyncio.Future[Any]) -> None:
    """Cancel tasks and let them finish their clean-up; their exceptions are not raised here."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _send_body(send: Send, data: bytes) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": True})
