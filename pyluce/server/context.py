"""What the routes share, and the one way in which a generation is answered: whole, or as a stream."""

from __future__ import annotations

import asyncio
import logging
import time
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar

from fastapi import Request
from starlette.responses import Response

from pyluce.engine import EngineError, IdlePrompt
from pyluce.server.bridge import Running, run_text, unless_gone
from pyluce.server.errors import as_api_error
from pyluce.server.jsontext import JsonResponse
from pyluce.server.metrics import HttpCounters
from pyluce.server.prepare import writes_tools
from pyluce.server.protocols import Service, TextTools
from pyluce.server.reply import Answer, Piece, Plan, collect, read_pieces
from pyluce.server.settings import ServerSettings
from pyluce.server.sse import EventStreamResponse, frame
from pyluce.server.token_texts import TokenTexts

T = TypeVar("T")

log = logging.getLogger(__name__)

STOPPED = "the server was stopped"

Pieces = AsyncIterator[tuple[int, list[Piece]]]


class Writer(Protocol):
    """One API's way to write an answer down. A writer serves one HTTP request."""

    def whole(self, answers: list[Answer]) -> dict[str, Any]:
        """The complete answer."""

    def begin(self) -> list[bytes]:
        """The frames before the first piece."""

    def frames(self, index: int, pieces: list[Piece]) -> list[bytes]:
        """The frames of what one event brought for choice `index`."""

    def end(self) -> list[bytes]:
        """The frames after the last piece."""

    def failure(self, error: BaseException) -> list[bytes]:
        """The frames that tell of an error after the stream began."""


@dataclass(slots=True)
class AppContext:
    """One application: its model, its settings, and what all requests share. Lives in `app.state.luce`."""

    service: Service
    settings: ServerSettings
    counters: HttpCounters
    endpoints: tuple[str, ...]
    started_at: float = field(default_factory=time.time)
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    token_texts: TokenTexts = field(init=False)
    ended: bool = False
    _running: weakref.WeakSet[Running] = field(default_factory=weakref.WeakSet)

    def __post_init__(self) -> None:
        self.token_texts = TokenTexts(self.service)

    @property
    def model_name(self) -> str:
        """The model's name in answers."""
        return self.settings.model_alias or self.service.info.name

    @property
    def tools_supported(self) -> bool:
        """The chat template writes tool definitions, and calls in a format that is known."""
        template = self.service.template
        return template is not None and writes_tools(template)

    async def text(self, request: Request, work: Callable[[TextTools], T]) -> T:
        """Run `work` on the vocabulary's thread. Raises ClientGone when nobody waits for it any more."""
        try:
            return await unless_gone(request, run_text(self.service, work))
        except Exception as error:
            raise as_api_error(error) from error

    async def answer(self, request: Request, plan: Plan, writer: Writer, stream: bool) -> Response:
        """Generate what `plan` says and answer with it. Whatever is refused is refused before a stream begins."""
        try:
            if self.ended:
                raise EngineError(STOPPED)
            running = Running(self.service, plan.choices, live=stream)
        except Exception as error:
            raise as_api_error(error) from error
        self._running.add(running)
        pieces = self._remembered(plan, self._with_texts(plan, read_pieces(plan, running.events())))
        if stream:
            return EventStreamResponse(_frames(writer, pieces), self.settings.keep_alive_s, running.close)
        try:
            return JsonResponse(writer.whole(await unless_gone(request, collect(plan, pieces))))
        except Exception as error:
            raise as_api_error(error) from error
        finally:
            running.close()

    def end_running(self) -> None:
        """On the loop: every running request ends now with an error, and none begins any more."""
        self.ended = True
        for running in list(self._running):
            running.end(EngineError(STOPPED))

    async def _with_texts(self, plan: Plan, pieces: Pieces) -> Pieces:
        """The same pieces; the texts of the tokens in them are known when they are passed on."""
        async for index, some in pieces:
            if plan.with_tokens:
                await self.token_texts.learn(some)
            yield index, some

    async def _remembered(self, plan: Plan, pieces: Pieces) -> Pieces:
        """The same pieces; when a conversation's answer is complete, its next prompt is prepared."""
        answer = Answer()
        async for index, some in pieces:
            if plan.follow_up is not None:
                for piece in some:
                    answer.add(piece)
            yield index, some
        if plan.follow_up is not None and self.service.options.idle_prefill:
            self.service.text(partial(self._prepare_next, plan.follow_up, answer))

    def _prepare_next(
        self, follow_up: Callable[[TextTools, Answer], tuple[IdlePrompt, ...]], answer: Answer, tools: TextTools
    ) -> None:
        """On the vocabulary's thread. The answer was given; a failure here costs time later, and nothing else."""
        try:
            for prompt in follow_up(tools, answer):
                self.service.warm(prompt)
        except Exception as error:
            log.info("the next turn cannot be prepared: %s: %s", type(error).__name__, error)


def get_context(request: Request) -> AppContext:
    """The application's context."""
    context: AppContext = request.app.state.luce
    return context


async def _frames(writer: Writer, pieces: Pieces) -> AsyncGenerator[bytes, None]:
    for data in writer.begin():
        yield data
    try:
        async for index, some in pieces:
            for data in writer.frames(index, some):
                yield data
    except Exception as error:
        for data in writer.failure(error):
            yield data
        return
    for data in writer.end():
        yield data


def openai_failure(error: BaseException) -> list[bytes]:
    """An error inside an OpenAI-like stream, which ends without `[DONE]`."""
    return [frame(as_api_error(error).openai())]
