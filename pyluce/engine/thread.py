"""The engine thread: the one thread that owns a runner. Everybody else hands it work and gets events back."""

from __future__ import annotations

import atexit
import itertools
import os
import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final, Protocol, TypeVar

from pyluce.engine.errors import EngineClosedError, EngineError, EngineForkedError
from pyluce.engine.generate import GenerationRequest
from pyluce.engine.idle import IdlePrompt
from pyluce.engine.stats import EngineStats
from pyluce.engine.ticket import Ticket

T = TypeVar("T")

HEARTBEAT_S: Final = 1.0


class Core(Protocol):
    """What runs on the engine thread, a step at a time. `reserve` and `stats` are called from any thread."""

    def reserve(self, request: GenerationRequest) -> Callable[[], None]:
        """Keep a place for a request and return the function that gives it back, to be called once, when the request is answered.

        Raises RequestError for a request that can never be served, QueueFullError when there is no place.
        """

    def stats(self) -> EngineStats:
        """What the core shows of itself; never waits."""

    def admit(self, ticket: Ticket) -> None:
        """Take a request; it is answered through its ticket, whatever happens to it."""

    def warm(self, prompt: IdlePrompt) -> None:
        """Compute a prompt that is expected, when there is nothing else to do."""

    def step(self) -> bool:
        """Do one step of work; return False when there is nothing to do. A request's failure goes to its ticket, not to the caller."""

    def idle(self) -> None:
        """There is nothing to do: called when work runs out, and once a second from then on."""

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
        self._numbers = itertools.count(1)
        opened: Future[Core] = Future()
        self._thread = threading.Thread(target=self._run, args=(open_core, opened), name=name, daemon=True)
        self._thread.start()
        try:
            self._core = opened.result()
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

    @property
    def failure(self) -> BaseException | None:
        """What ended the engine, if it failed."""
        return self._failure

    def submit(self, request: GenerationRequest) -> Ticket:
        """Queue a request. Raises, before any work, RequestError (it can never be served), QueueFullError, EngineClosedError,
        EngineForkedError, or EngineError when the engine has failed."""
        self._check_open()
        give_back = self._core.reserve(request)
        try:
            with self._lock:  # ids in the order of the inbox
                self._check_open()
                ticket = Ticket(request, self, next(self._numbers), on_answer=give_back)
                self._inbox.put(ticket)
        except BaseException:
            give_back()
            raise
        return ticket

    def stats(self) -> EngineStats:
        """What the engine does and has done; never waits for it."""
        self.check_process()
        return self._core.stats()

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

    def warm(self, prompt: IdlePrompt) -> None:
        """Have a prompt computed while the engine is idle, because a request that begins with it is expected. Returns at once."""
        self._post(lambda: self._core.warm(prompt))

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

    def _post(self, item: Callable[[], None]) -> None:
        with self._lock:  # so that nothing is queued behind the last item, which nobody would answer
            self._check_open()
            self._inbox.put(item)

    def _check_open(self) -> None:
        self.check_process()
        if self._failure is not None:
            raise EngineError(f"the engine has failed: {self._failure}") from self._failure
        if self._closing:
            raise EngineClosedError("the model was closed; load it again")

    def _run(self, open_core: Callable[[Callable[[], None]], Core], opened: Future[Core]) -> None:
        try:
            core = open_core(self._check_interrupted)
        except BaseException as error:
            opened.set_exception(error)
            return
        opened.set_result(core)
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
                item = self._inbox.get(block=not busy, timeout=None if busy else HEARTBEAT_S)
            except queue.Empty:
                if busy:
                    busy = core.step()
                if not busy:
                    core.idle()
                continue
            if item is None:
                return
            if isinstance(item, Ticket):
                core.admit(item)
                busy = True
            else:
                item()
                busy = True  # it may have left work behind

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
