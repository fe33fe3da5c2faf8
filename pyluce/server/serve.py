"""Runs the application on a port until it is asked to stop."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import threading
from collections.abc import Callable, Generator
from types import FrameType

import uvicorn
from fastapi import FastAPI

from pyluce.server.app import create_app
from pyluce.server.context import AppContext
from pyluce.server.protocols import Service
from pyluce.server.settings import ServerSettings

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_BACKLOG = 1024
_LAST_WORDS_S = 5  # for the errors of requests that were ended


class LuceServer(uvicorn.Server):
    """An HTTP server for one application. `run` blocks until `stop`, SIGINT or SIGTERM.

    Stopping: no new connections; running requests may go on for the grace, or until a second SIGINT (`hurried`). What is left then is
    cancelled and answered with an error. A third SIGINT waits for nobody.
    """

    def __init__(self, app: FastAPI, settings: ServerSettings, on_ready: Callable[[str], None] | None = None) -> None:
        """Bind the port at once, so that a port in use is an OSError here. `on_ready` gets the server's URL when it answers."""
        self._context: AppContext = app.state.luce
        self._on_ready = on_ready
        self._grace_s = settings.shutdown_grace_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self.hurried = False
        self._socket = bind(settings.host, settings.port)
        host, port = self._socket.getsockname()[:2]
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                server_header=False,
                lifespan="off",
                ws="none",
                timeout_graceful_shutdown=round(settings.shutdown_grace_s) + _LAST_WORDS_S,
                timeout_keep_alive=75,
            )
        )

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until stopped. The socket is closed at the end."""
        try:
            super().run(sockets or [self._socket])
        finally:
            self._socket.close()

    def stop(self) -> None:
        """Ask `run` to return; safe from any thread."""
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to answer, then say so."""
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        if self._on_ready is not None:
            self._on_ready(self.url)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End the streams that never end by themselves, then wait for the others, then end those too."""
        self._context.stopping.set()
        grace_s = 0.0 if self.hurried else self._grace_s
        end = asyncio.get_running_loop().call_later(grace_s, self._context.end_running)
        try:
            await super().shutdown(sockets)
        finally:
            end.cancel()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """SIGINT and SIGTERM ask this server to stop, and nothing else: whoever called `run` closes the model afterwards."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._on_signal) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.should_exit and number == signal.SIGINT and not self.hurried and self._loop is not None:
            self.hurried = True
            self._loop.call_soon_threadsafe(self._context.end_running)
            return
        self.handle_exit(number, frame)


def serve(
    service: Service, settings: ServerSettings | None = None, on_ready: Callable[[str], None] | None = None
) -> None:
    """Serve until SIGINT or SIGTERM. Raises OSError when the port cannot be used."""
    settings = settings or ServerSettings()
    LuceServer(create_app(service, settings), settings, on_ready).run()


def bind(host: str, port: int) -> socket.socket:
    """A listening TCP socket. Raises OSError naming the address and what to do."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise OSError(
            error.errno, f"cannot listen on {host} port {port}: {error.strerror or error}; choose another with --port"
        ) from error
    return listener
