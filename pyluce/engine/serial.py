"""One request at a time, in the order of arrival."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from typing import Generic, TypeVar

from pyluce.engine.events import Event
from pyluce.engine.generate import Resources, generate
from pyluce.engine.protocols import SequenceLike
from pyluce.engine.thread import Ticket

S = TypeVar("S", bound=SequenceLike)


class SerialCore(Generic[S]):
    """Runs requests first come, first served; a step is one prompt chunk or one token. `close` is called last, with nothing running."""

    def __init__(self, resources: Resources[S], close: Callable[[], None]) -> None:
        self.resources = resources
        self._close = close
        self._waiting: deque[Ticket] = deque()
        self._ticket: Ticket | None = None
        self._events: Generator[Event, None, None] | None = None

    def admit(self, ticket: Ticket) -> None:
        """Queue a request."""
        self._waiting.append(ticket)

    def step(self) -> bool:
        """Advance the running request by one event, or begin the next one. A failed or cancelled request frees its sequence here."""
        if self._ticket is None and not self._begin():
            return False
        ticket, events = self._ticket, self._events
        assert ticket is not None and events is not None
        try:
            if ticket.cancelled:
                self._end()
            else:
                ticket.put(next(events))
        except StopIteration:
            self._end()
            ticket.finish()
        except Exception as error:
            self._end()
            ticket.fail(error)
        return True

    def drop_all(self, error: BaseException) -> None:
        """End the running and the waiting requests with `error`."""
        tickets = [ticket for ticket in (self._ticket, *self._waiting) if ticket is not None]
        self._waiting.clear()
        try:
            self._end()
        finally:
            for ticket in tickets:
                ticket.fail(error)

    def close(self) -> None:
        """Free the runner and what belongs to it."""
        self._close()

    def _begin(self) -> bool:
        while self._waiting:
            ticket = self._waiting.popleft()
            if not ticket.cancelled:
                self._ticket = ticket
                self._events = generate(self.resources, ticket.request, ticket.submitted_at)
                return True
        return False

    def _end(self) -> None:
        events, self._ticket, self._events = self._events, None, None
        if events is not None:
            events.close()
