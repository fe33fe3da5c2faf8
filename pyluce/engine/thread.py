"""The engine thread: the one thread that owns a runner. Everybody else hands it work and gets events back."""

from __future__ import annotations

import atexit
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from pyluce.engine.errors import EngineClosedError, EngineError, EngineForkedError
from pyluce.engine.events import Event
from pyluce.engine.generate import GenerationRequest

T = TypeVar("T")


class Ticket:
    """A request on its way: its events for the caller, a flag to cancel it."""

    def __init__(self, request: GenerationRequest, engine: Engine) -> None:
        self.request = request
        self.submitted_at = time.perf_counter()
        self._engine = engine
        self._messages: queue.SimpleQueue[Event | BaseException | None] = queue.SimpleQueue()
        self._cancelled = threading.Event()

    @property
    def cancelled(self) -> bool:
        """Nobody waits for this request any more."""
        return self._cancelled.is_set()

    def cancel(self) -> None:
        """The engine drops the request before its next step; a finished one is left as it is."""
        if not self._engine.forked:
            self._cancelled.set()

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

    def put(self, event: Event) -> None:
        """Engine side: report an event."""
        self._messages.put(event)

    def finish(self) -> None:
        """Engine side: there are no more events."""
        self._messages.put(None)

    def fail(self, error: BaseException) -> None:
        """Engine side: the request ended with an error."""
        self._messages.put(error)


class Core(Protocol):
    """What runs on the engine thread, a step at a time."""

    def admit(self, ticket: Ticket) -> None:
        """Take a request; it is answered through its ticket, whatever happens to it."""

    def step(self) -> bool:
        """Do one step of work; return False when there is nothing to do. A request's failure goes to its ticket, not to the caller."""

    def drop_all(self, error: BaseException) -> None:
        """End every request with `error` and free what it holds."""

    def close(self) -> None:
        """Free everything."""


class Engine:
    """Owns a thread, on which `open_core` is called, all steps run, and everything is closed.

    Calls are safe from any thread. In a forked child every call raises EngineForkedError, except `close`, which does nothing there.
    """

    def __init__(self, open_core: Callable[[Callable[[], None]], Core], name: str = "luce-engine") -> None:
        """Start the thread and wait until `open_core` has returned; its exception is raised here.

        `open_core` gets a function to call now and then, which raises KeyboardInterrupt after the caller of this constructor was interrupted.
        """
        self._process = os.getpid()
        self._inbox: queue.SimpleQueue[Ticket | Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closing = False
        self._failure: BaseException | None = None
        self._interrupted = threading.Event()
        opened: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(open_core, opened), name=name, daemon=True)
        self._thread.start()
        try:
            opened.result()
        except BaseException:
            self._interrupted.set()
            self.close()
            raise
        atexit.register(self.close)

    @property
    def forked(self) -> bool:
        """This process is a fork of the one that started the engine."""
        return os.getpid() != self._process

    def check_process(self) -> None:
        """Raise EngineForkedError in a forked child."""
        if self.forked:
            raise EngineForkedError(
                f"this model was loaded by process {self._process}, and process {os.getpid()} is a fork of it, without its threads; "
                "load the model in the child, or start it with multiprocessing's 'spawn'"
            )

    def submit(self, request: GenerationRequest) -> Ticket:
        """Queue a request. Raises EngineClosedError, EngineForkedError, or EngineError when the engine has failed."""
        ticket = Ticket(request, self)
        self._post(ticket)
        return ticket

    def call(self, function: Callable[[], T]) -> T:
        """Run `function` on the engine thread between two steps, and return its result or raise its exception."""
        if threading.current_thread() is self._thread:
            return function()
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

        self._post(run)
        return future.result()

    def close(self) -> None:
        """End all requests with EngineClosedError, free everything, wait for the thread. Closing twice is fine."""
        if self.forked:
            return
        with self._lock:
            first, self._closing = not self._closing, True
        if first:
            self._inbox.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def close_soon(self) -> None:
        """As `close`, without waiting; for owners that are dropped without being closed."""
        if self.forked:
            return
        with self._lock:
            first, self._closing = not self._closing, True
        if first:
            self._inbox.put(None)

    def _post(self, item: Ticket | Callable[[], None]) -> None:
        self.check_process()
        with self._lock:  # so that nothing is queued behind the last item, which nobody would answer
            if self._failure is not None:
                raise EngineError(f"the engine has failed: {self._failure}") from self._failure
            if self._closing:
                raise EngineClosedError("the model was closed; load it again")
            self._inbox.put(item)

    def _run(self, open_core: Callable[[Callable[[], None]], Core], opened: Future[None]) -> None:
        try:
            core = open_core(self._check_interrupted)
        except BaseException as error:
            opened.set_exception(error)
            return
        opened.set_result(None)
        reason: EngineError = EngineClosedError("the model was closed while the request was running")
        try:
            self._serve(core)
        except BaseException as failure:
            with self._lock:
                self._failure = failure
            reason = EngineError(f"the engine has failed: {type(failure).__name__}: {failure}")
            reason.__cause__ = failure
        try:
            core.drop_all(reason)
        finally:
            self._refuse_queued(reason)
            core.close()
            atexit.unregister(self.close)

    def _serve(self, core: Core) -> None:
        busy = False
        while True:
            try:
                item = self._inbox.get(block=not busy)
            except queue.Empty:
                busy = core.step()
                continue
            if item is None:
                return
            if isinstance(item, Ticket):
                core.admit(item)
                busy = True
            else:
                item()

    def _refuse_queued(self, error: BaseException) -> None:
        while True:
            try:
                item = self._inbox.get_nowait()
            except queue.Empty:
                return
            if isinstance(item, Ticket):
                item.fail(error)
            elif item is not None:
                item()

    def _check_interrupted(self) -> None:
        if self._interrupted.is_set():
            raise KeyboardInterrupt


def attach_finalizer(owner: Any, engine: Engine) -> None:
    """Let the engine end when `owner` is dropped without `close`."""
    weakref.finalize(owner, engine.close_soon).atexit = False
