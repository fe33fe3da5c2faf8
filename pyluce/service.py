"""A loaded model as the server uses it: the engine for generation, a thread of its own for text."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import TypeVar

from pyluce.engine import GenerationRequest, IdlePrompt, Ticket
from pyluce.engine.constraint import ConstraintCompiler
from pyluce.engine.stats import EngineStats
from pyluce.luce import Luce, ModelInfo
from pyluce.options import LoadOptions
from pyluce.prompts import PromptBuilder
from pyluce.server.protocols import TextTools
from pyluce.text import ChatTemplate, Tokenizer, VocabularyLike

T = TypeVar("T")


class LuceService:
    """Serves a `Luce`, which it does not own. Use it as a context manager, or call `close()`.

    The vocabulary is opened a second time, on a thread that does nothing else, so that prompts are rendered and text is tokenized
    while the engine computes.
    """

    def __init__(
        self, luce: Luce, options: LoadOptions, open_vocabulary: Callable[[], VocabularyLike] | None = None
    ) -> None:
        """`options`: how `luce` was loaded. `open_vocabulary` is replaced in tests. Raises NativeError."""
        self._luce = luce
        self.options = options
        self._closed = False
        self._process = os.getpid()
        self._vocabulary: VocabularyLike | None = None
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="luce-text")
        try:
            self._tools = self._executor.submit(self._open, open_vocabulary or self._open_file).result()
        except BaseException:
            self._executor.shutdown()
            raise

    @property
    def info(self) -> ModelInfo:
        """What was loaded."""
        return self._luce.info

    @property
    def template(self) -> ChatTemplate | None:
        """The chat template, None when there is none."""
        return self._luce.template

    def submit(self, request: GenerationRequest) -> Ticket:
        """Queue a request. Raises RequestError, QueueFullError or EngineError before any work."""
        return self._luce.submit(request)

    def warm(self, prompt: IdlePrompt) -> None:
        """Have a prompt computed while the engine is idle. Returns at once; nobody is told how it went."""
        self._luce.warm(prompt)

    def stats(self) -> EngineStats:
        """What the engine published last."""
        return self._luce.stats()

    def park(self, *, discard: bool = False) -> bool:
        """Release the model's memory; see `Luce.park`."""
        return self._luce.park(discard=discard)

    def unpark(self) -> bool:
        """Load it again; see `Luce.unpark`."""
        return self._luce.unpark()

    def text(self, work: Callable[[TextTools], T]) -> Future[T]:
        """Run `work` on the text thread."""
        return self._executor.submit(work, self._tools)

    def close(self) -> None:
        """Free the second vocabulary and end its thread; the model stays loaded. Closing twice is fine."""
        if self._closed or os.getpid() != self._process:
            return
        self._closed = True
        self._executor.submit(self._close_vocabulary).result()
        self._executor.shutdown()

    def __enter__(self) -> LuceService:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open(self, open_vocabulary: Callable[[], VocabularyLike]) -> TextTools:
        self._vocabulary = open_vocabulary()
        tokenizer = Tokenizer(self._vocabulary)
        template = self._luce.template
        return TextTools(
            tokenizer, template, PromptBuilder(tokenizer, template, lambda work: work()), ConstraintCompiler(tokenizer)
        )

    def _open_file(self) -> VocabularyLike:
        from pyluce.native.vocabulary import Vocabulary

        return Vocabulary(self._luce.info.path)

    def _close_vocabulary(self) -> None:
        close = getattr(self._vocabulary, "close", None)
        if close is not None:
            close()
