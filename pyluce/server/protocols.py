"""What the server needs of a loaded model. `pyluce.service.LuceService` has it; tests have smaller ones."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol, TypeVar

from pyluce.engine import GenerationRequest, IdlePrompt
from pyluce.engine.constraint import ConstraintCompiler
from pyluce.engine.stats import EngineStats
from pyluce.engine.ticket import Message
from pyluce.luce import ModelInfo
from pyluce.options import LoadOptions
from pyluce.prompts import PromptBuilder
from pyluce.text import ChatTemplate, Tokenizer

T = TypeVar("T")


class TicketLike(Protocol):
    """A submitted request (`pyluce.engine.Ticket`)."""

    def cancel(self) -> None:
        """Nobody waits for it any more; its slot becomes free within one step. Safe from any thread, at any time."""

    def on_event(self, callback: Callable[[Message], None]) -> None:
        """Call `callback` with every message in order, those that came before this call included, from any thread."""


@dataclass(frozen=True, slots=True)
class TextTools:
    """Vocabulary and template, for work on the thread that owns them."""

    tokenizer: Tokenizer
    template: ChatTemplate | None
    prompts: PromptBuilder
    constraints: ConstraintCompiler


class Service(Protocol):
    """A loaded model, as the server sees it. Every method is safe from any thread, and none but `park` and `unpark` waits for the engine."""

    @property
    def info(self) -> ModelInfo:
        """What was loaded."""

    @property
    def options(self) -> LoadOptions:
        """How it was loaded."""

    @property
    def template(self) -> ChatTemplate | None:
        """The model's chat template, None when it has none."""

    def submit(self, request: GenerationRequest) -> TicketLike:
        """Queue a request. Raises RequestError, QueueFullError or EngineError before any work."""

    def warm(self, prompt: IdlePrompt) -> None:
        """Have a prompt computed while the engine is idle."""

    def stats(self) -> EngineStats:
        """What the engine published last."""

    def park(self, *, discard: bool = False) -> bool:
        """Release the model's memory; False when it is released already. Raises ParkError when something would be lost."""

    def unpark(self) -> bool:
        """Load it again; False when it is loaded. Raises UnparkError."""

    def text(self, work: Callable[[TextTools], T]) -> Future[T]:
        """Run `work` on the thread that owns the vocabulary."""
