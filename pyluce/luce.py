"""The library's front door: load a model, generate, stream, close."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from pyluce.engine import (
    Engine,
    EngineStats,
    Event,
    FinishEvent,
    GenerationRequest,
    IdlePrompt,
    ParkError,
    Ticket,
    Timings,
    TokenEvent,
    hash_tokens,
)
from pyluce.engine.thread import attach_finalizer
from pyluce.options import DEFAULT_MODEL, LoadOptions
from pyluce.prompts import PromptBuilder
from pyluce.speculation import NO_SPECULATION, Speculation
from pyluce.text import ChatTemplate, Tokenizer
from pyluce.tuning import NO_TUNING, Tuning

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What was loaded. `warnings` are for the user: what in the file is odd or not used. `chunk`: prompt tokens computed at once."""

    name: str
    path: Path
    n_ctx: int
    n_ctx_train: int
    n_vocab: int
    n_layer: int
    size_bytes: int
    threads: int
    warnings: tuple[str, ...] = ()
    chunk: int | None = None
    speculation: Speculation = NO_SPECULATION
    tuning: Tuning = NO_TUNING


class Parking(Protocol):
    """A core that can be parked (`pyluce.engine.ParkingCore`); both run on the engine's thread."""

    def park(self, *, discard: bool = False) -> bool:
        """Release the model; False when it is already."""

    def unpark(self) -> bool:
        """Load it again; False when it is not parked."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that an engine serves. `memory_report` runs on the engine's thread. `parking` None: it cannot be parked."""

    info: ModelInfo
    tokenizer: Tokenizer
    template: ChatTemplate | None
    memory_report: Callable[[], dict[str, Any]]
    parking: Parking | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished answer.

    `tokens` include the end token, if there is one. `seed` repeats the draw (None: greedy). `logits_sha256` and `step_sha256` are there with
    `hash_logits=True`; `pyluce.engine.hashing` documents their format.
    """

    text: str
    reasoning: str
    prompt_tokens: tuple[int, ...]
    tokens: tuple[int, ...]
    finish_reason: str
    stop_string: str | None
    seed: int | None
    timings: Timings
    logits_sha256: str | None = None
    step_sha256: tuple[bytes, ...] = ()

    @property
    def tokens_sha256(self) -> str:
        """The hash of `tokens`, hexadecimal."""
        return hash_tokens(self.tokens).hex()

    @classmethod
    def collect(cls, request: GenerationRequest, events: Iterable[Event]) -> Completion:
        """Add up the events of a whole answer."""
        events = list(events)
        tokens = [event for event in events if isinstance(event, TokenEvent)]
        finish = events[-1]
        if not isinstance(finish, FinishEvent):
            raise ValueError("the events of an unfinished answer make no completion")
        return cls(
            text="".join(event.content for event in events),
            reasoning="".join(event.reasoning for event in events),
            prompt_tokens=request.prompt,
            tokens=tuple(event.token for event in tokens),
            finish_reason=finish.reason.value,
            stop_string=finish.stop_string,
            seed=request.sampling.seed if not request.sampling.is_greedy else None,
            timings=finish.timings,
            logits_sha256=finish.logits_sha256.hex() if finish.logits_sha256 else None,
            step_sha256=tuple(event.logits_sha256 for event in tokens if event.logits_sha256),
        )


class Luce:
    """A loaded model. Use it as a context manager, or call `close()`.

    Every method is safe from any thread: one engine thread owns the native handles and serves up to `max_concurrency` requests at
    once, each with the tokens and logits that it would get alone. In a forked child process every use raises EngineForkedError.
    """

    def __init__(self, engine: Engine, model: LoadedModel) -> None:
        """Take over an engine; `load` is the usual way here."""
        self.info = model.info
        self.template = model.template
        self.tokenizer = model.tokenizer
        self._engine = engine
        self._memory_report = model.memory_report
        self._parking = model.parking
        self._prompts = PromptBuilder(model.tokenizer, model.template, engine.call)
        attach_finalizer(self, engine)

    @classmethod
    def load(
        cls, path: str | os.PathLike[str] | None = None, *, progress: Progress | None = None, **options: Any
    ) -> Luce:
        """Load the model at `path` (a GGUF file, or any shard of one); without a path, the small model of this package.

        `options` are the fields of `LoadOptions`. `progress(stage, done, total)` is called on the engine's thread.
        Raises OptionError, ModelError (the file), NativeError (the libraries).
        """
        return cls.load_with(path, LoadOptions(**options), progress)

    @classmethod
    def load_with(
        cls, path: str | os.PathLike[str] | None, options: LoadOptions, progress: Progress | None = None
    ) -> Luce:
        """As `load`, with the options as one value."""
        from pyluce.loading import load_engine

        engine, model = load_engine(DEFAULT_MODEL if path is None else Path(path), options, progress)
        return cls(engine, model)

    def request(self, prompt: str | None = None, **options: Any) -> GenerationRequest:
        """Check `prompt` and `options`, which `PromptBuilder.build` describes, and that the answer fits into the context."""
        request = self._prompts.build(prompt, **options)
        request.check_context(self.info.n_ctx)
        return request

    def submit(self, request: GenerationRequest) -> Ticket:
        """Queue a request and return at once; see `Engine.submit` for what it refuses."""
        return self._engine.submit(request)

    def stats(self) -> EngineStats:
        """What the engine does and has done, as of its last step; never waits for it."""
        return self._engine.stats()

    @property
    def failed(self) -> bool:
        """The engine has ended by a failure of its own; nothing can be served any more."""
        return self._engine.failure is not None

    def run(self, request: GenerationRequest) -> Generator[Event, None, None]:
        """The events of a request as they happen; the last is a `FinishEvent`. Closing the iterator cancels the request."""
        yield from self.submit(request).events()

    def warm(self, prompt: IdlePrompt) -> None:
        """Have a prompt computed while the engine is idle, because a request that begins with it is expected. Returns at once."""
        self._engine.warm(prompt)

    def generate(self, prompt: str | None = None, **options: Any) -> Completion:
        """Answer a prompt (`luce.generate("Hi")`, `luce.generate(messages=[...], temperature=0.7)`); see `request` for the options."""
        request = self.request(prompt, **options)
        return Completion.collect(request, self.run(request))

    def stream(self, prompt: str | None = None, **options: Any) -> Generator[Event, None, None]:
        """As `generate`, an event at a time: `for event in luce.stream("Hi"): print(event.content, end="")`.

        Bad options are refused here, not at the first event.
        """
        return self.run(self.request(prompt, **options))

    def tokenize(self, text: str, *, add_special: bool = True) -> list[int]:
        """Token ids of plain text."""
        return self._engine.call(lambda: self.tokenizer.encode_text(text, add_special=add_special))

    def detokenize(self, tokens: Iterable[int]) -> str:
        """The text of token ids, without control tokens."""
        ids = list(tokens)
        self.tokenizer.check_tokens(ids)
        return self._engine.call(lambda: self.tokenizer.decode(ids))

    def memory_report(self) -> dict[str, Any]:
        """Bytes by place, from the buffers that exist."""
        return self._engine.call(self._memory_report)

    def park(self, *, discard: bool = False) -> bool:
        """Release weights, state and caches until `unpark`; False when they are already. Requests get ParkedError meanwhile.

        Running requests wait, and the prefix cache is kept, in the cache_dir that the model was loaded with. Raises ParkError, with nothing
        changed, when something would be lost without one; `discard` lets the prefix cache go (running requests never).
        """
        parking = self._parking
        if parking is None:
            raise ParkError("this model cannot be parked")
        return self._engine.call(lambda: parking.park(discard=discard))

    def unpark(self) -> bool:
        """Load a parked model again, sized for the memory that is free now; False when it is not parked.

        Raises UnparkError with what went wrong; everything stays released then.
        """
        parking = self._parking
        return parking is not None and self._engine.call(parking.unpark)

    def close(self) -> None:
        """End running requests and free everything. Closing twice is fine."""
        self._engine.close()

    def __enter__(self) -> Luce:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
