"""From the engine's threads to asyncio: submitted requests as one async stream of events."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TypeVar

from starlette.requests import Request

from pyluce.engine import Event, GenerationRequest
from pyluce.engine.ticket import Message
from pyluce.server.protocols import Service, TextTools, TicketLike
from pyluce.server.sse import cancel_and_wait, wait_for_disconnect

T = TypeVar("T")


class ClientGone(Exception):  # noqa: N818  (not a failure: nobody is left to tell)
    """The client has disconnected, so nobody waits for the answer."""


class Running:
    """Requests that were submitted together: all of them, or none when the queue has no room for all.

    `close` cancels what still runs; call it always.
    """

    def __init__(self, service: Service, requests: Sequence[GenerationRequest], *, live: bool) -> None:
        """`live`: the loop is woken for each event; otherwise only when a request ends, as nobody looks earlier."""
        self._loop = asyncio.get_running_loop()
        self._live = live
        self._messages: deque[tuple[int, Message]] = deque()
        self._arrived = asyncio.Event()
        self._waking = False
        self._tickets: list[TicketLike] = []
        try:
            for request in requests:
                self._tickets.append(service.submit(request))
        except BaseException:
            self.close()
            raise
        for index, ticket in enumerate(self._tickets):
            ticket.on_event(self._callback(index))

    async def events(self) -> AsyncIterator[tuple[int, Event]]:
        """The events of all requests as they happen, with the request's index; raises what ended one of them."""
        unfinished = len(self._tickets)
        while unfinished:
            await self._arrived.wait()
            self._arrived.clear()
            while self._messages:
                index, message = self._messages.popleft()
                if isinstance(message, BaseException):
                    raise message
                if message is None:
                    unfinished -= 1
                else:
                    yield index, message

    def close(self) -> None:
        """Cancel what is not finished."""
        for ticket in self._tickets:
            ticket.cancel()

    def end(self, error: BaseException) -> None:
        """On the loop: cancel what is not finished, and let `events` raise `error` in its place."""
        self.close()
        self._messages.append((0, error))
        self._arrived.set()

    def _callback(self, index: int) -> Callable[[Message], None]:
        def forward(message: Message) -> None:
            self._messages.append((index, message))
            ended = message is None or isinstance(message, BaseException)
            if self._waking or not (self._live or ended):
                return
            self._waking = True
            try:
                self._loop.call_soon_threadsafe(self._wake)
            except RuntimeError:
                pass  # the server's loop is closed: nobody listens, and the engine must not notice

        return forward

    def _wake(self) -> None:
        """On the loop. A message that is appended from here on wakes again; one appended before is found by `events`."""
        self._waking = False
        self._arrived.set()


async def run_text(service: Service, work: Callable[[TextTools], T]) -> T:
    """Run `work` on the vocabulary's thread without blocking the loop."""
    return await asyncio.wrap_future(service.text(work))


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """The result of `work`; when the client disconnects first, `work` is cancelled and ClientGone raised."""
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(wait_for_disconnect(request.receive))
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        await cancel_and_wait(working, gone)
