"""A submitted request, seen from both sides: the caller's, who waits for events, and the engine's, which reports them."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Protocol, TypeAlias

from pyluce.engine.events import Event
from pyluce.engine.generate import GenerationRequest

Message: TypeAlias = "Event | BaseException | None"
"""An event; the exception that ended the request; or None after the last event."""


class Process(Protocol):
    """What a ticket asks of its engine."""

    @property
    def forked(self) -> bool:
        """This process is a fork of the one that started the engine."""

    def check_process(self) -> None:
        """Raise EngineForkedError in a forked child."""


class Ticket:
    """A request on its way: its events for the caller, a flag to cancel it.

    `id` grows with the order of submission. Exactly one of `finish` and `fail` is called by the engine, once; `answered` says that it was.
    """

    def __init__(
        self,
        request: GenerationRequest,
        engine: Process,
        id: int = 0,
        *,
        submitted_at: float | None = None,
        on_answer: Callable[[], None] | None = None,
    ) -> None:
        """`submitted_at`: `time.perf_counter` seconds, now by default. `on_answer` is called when the request is answered."""
        self.id = id
        self.request = request
        self.submitted_at = time.perf_counter() if submitted_at is None else submitted_at
        self._engine = engine
        self._on_answer = on_answer
        self._answered = False
        self._cancelled = False
        self._messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._callback: Callable[[Message], None] | None = None
        self._lock = threading.Lock()

    @property
    def cancelled(self) -> bool:
        """Nobody waits for this request any more."""
        return self._cancelled

    @property
    def answered(self) -> bool:
        """There are no more events."""
        return self._answered

    @property
    def deadline_at(self) -> float | None:
        """When the request's time is over, `time.perf_counter` seconds."""
        seconds = self.request.deadline_s
        return None if seconds is None else self.submitted_at + seconds

    def cancel(self) -> None:
        """The engine drops the request within one chunk, and `events` raises RequestCancelledError; a finished one is left as it is."""
        if not self._engine.forked:
            self._cancelled = True

    def events(self) -> Iterator[Event]:
        """The request's events until it is finished; raises what ended it otherwise. Closing the iterator cancels the request."""
        try:
            while True:
                self._engine.check_process()
                message = self._messages.get()
                if message is None:
                    return
                if isinstance(message, BaseException):
                    raise message
                yield message
        finally:
            self.cancel()

    def on_event(self, callback: Callable[[Message], None]) -> None:
        """Give messages to `callback` instead of `events`, on the engine's thread; it must be quick.

        What was reported before is given to it at once, on the calling thread. A callback that raises cancels the request.
        """
        with self._lock:
            self._callback = callback
            while not self._messages.empty():
                self._call(callback, self._messages.get_nowait())

    def put(self, event: Event) -> None:
        """Engine side: report an event."""
        self._send(event)

    def finish(self) -> None:
        """Engine side: there are no more events."""
        self._answer(None)

    def fail(self, error: BaseException) -> None:
        """Engine side: the request ended with an error."""
        self._answer(error)

    def _answer(self, message: BaseException | None) -> None:
        if self._answered:
            raise RuntimeError(f"request {self.id} was answered twice")
        self._answered = True
        if self._on_answer is not None:
            self._on_answer()
        self._send(message)

    def _send(self, message: Message) -> None:
        with self._lock:
            if self._callback is None:
                self._messages.put(message)
            else:
                self._call(self._callback, message)

    def _call(self, callback: Callable[[Message], None], message: Message) -> None:
        try:
            callback(message)
        except Exception:
            self.cancel()
