"""One request from its prompt's tokens to its last one.

`Generation` is the part that is the request's own: what a row of logits means for it. It computes nothing on a device, so `BatchCore`
keeps many of them. `generate` is the loop that drives one alone, the reference for every schedule.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from pyluce.engine.chooser import TokenChooser
from pyluce.engine.constraint import ConstraintFactory
from pyluce.engine.errors import ContextLimitError, EngineError, RequestError
from pyluce.engine.events import Event, FinishEvent, FinishReason, PrefillEvent, Timings, TokenEvent
from pyluce.engine.hashing import StepHasher
from pyluce.engine.logprobs import token_logprobs
from pyluce.engine.protocols import Chain, Logits, Row, Runner, Sampler, SequenceLike, TokenTable
from pyluce.engine.sampling import MAX_SEED, SamplingParams, check_logits, make_sampler
from pyluce.engine.thinking import check_budget
from pyluce.text.stream import ReasoningMarkers, TextStream, check_stop_string

S = TypeVar("S", bound=SequenceLike)

MAX_STOP_STRINGS = 16
MAX_LOGPROBS = 64


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """What to generate. Plain data, valid by construction (RequestError names the field).

    `max_tokens` None: until the model ends or the context is full. `cuts`: prompt positions where a chunk must end. `ignore_end`: end
    tokens do not end the answer. `reasoning` None: all text is content. `deadline_s`: seconds from submission to the last token;
    a request that takes longer ends with DeadlineError. `n_logprobs`: how many of the most probable tokens each token event names
    with their log-probabilities; 0 gives the chosen token's only, None nothing.

    `constraint`: makes what the answer must keep to; the reasoning is free, and goes on until it ends. `reasoning_start`: the token that an
    answer may begin its reasoning with, where the prompt has not. `thinking_budget`: tokens of the reasoning after which `thinking_end`,
    the tokens that end it, are given (`pyluce.engine.thinking` has the rule).
    """

    prompt: tuple[int, ...]
    max_tokens: int | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop: tuple[str, ...] = ()
    reasoning: ReasoningMarkers | None = None
    starts_in_reasoning: bool = False
    hash_logits: bool = False
    ignore_end: bool = False
    cuts: tuple[int, ...] = ()
    deadline_s: float | None = field(default=None, kw_only=True)
    n_logprobs: int | None = field(default=None, kw_only=True)
    constraint: ConstraintFactory | None = field(default=None, kw_only=True)
    thinking_budget: int | None = field(default=None, kw_only=True)
    thinking_end: tuple[int, ...] = field(default=(), kw_only=True)
    reasoning_start: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if not self.prompt:
            raise RequestError("prompt: expected at least one token, found none")
        if self.max_tokens is not None:
            if isinstance(self.max_tokens, bool) or not isinstance(self.max_tokens, int):
                raise RequestError(f"max_tokens: expected an integer, found {type(self.max_tokens).__name__}")
            if self.max_tokens < 1:
                raise RequestError(f"max_tokens: expected at least 1, found {self.max_tokens}")
        if self.deadline_s is not None and not 0.0 < self.deadline_s < float("inf"):
            raise RequestError(f"deadline_s: expected a positive number of seconds, found {self.deadline_s}")
        if self.n_logprobs is not None and not 0 <= self.n_logprobs <= MAX_LOGPROBS:
            raise RequestError(f"n_logprobs: expected 0 to {MAX_LOGPROBS}, found {self.n_logprobs}")
        if self.constraint is not None and self.ignore_end:
            raise RequestError("ignore_end: a constrained answer ends where its grammar does")
        if self.thinking_budget is not None:
            check_budget(self.thinking_budget, self.thinking_end, self.reasoning)
        if len(self.stop) > MAX_STOP_STRINGS:
            raise RequestError(f"stop: expected at most {MAX_STOP_STRINGS} strings, found {len(self.stop)}")
        for index, text in enumerate(self.stop):
            try:
                check_stop_string(text, index)
            except ValueError as error:
                raise RequestError(str(error)) from error

    def check_context(self, n_ctx: int) -> int:
        """The number of tokens to generate at most in a context of `n_ctx`. Raises ContextLimitError with the numbers.

        The last token of an answer is never fed back, so `prompt + max_tokens - 1` positions are needed.
        """
        room = n_ctx - len(self.prompt) + 1
        if room < 1:
            raise ContextLimitError(
                f"prompt: {len(self.prompt)} tokens do not fit into the context of {n_ctx}; raise max_ctx or shorten it"
            )
        if self.max_tokens is not None and self.max_tokens > room:
            raise ContextLimitError(
                f"max_tokens: {len(self.prompt)} prompt tokens leave room for {room} in the context of {n_ctx}, "
                f"found {self.max_tokens}; raise max_ctx or ask for fewer"
            )
        limit = room if self.max_tokens is None else self.max_tokens
        if self.thinking_budget is not None and self.starts_in_reasoning and limit <= len(self.thinking_end):
            raise ContextLimitError(
                f"thinking_budget: ending the reasoning takes {len(self.thinking_end)} tokens and an answer at least one, "
                f"found room for {limit}"
            )
        return limit

    def check_tokens(self, vocab_size: int) -> None:
        """Raise RequestError for a token that the vocabulary does not have."""
        start = () if self.reasoning_start is None else (self.reasoning_start,)
        for name, tokens in (("prompt", self.prompt), ("thinking_end", self.thinking_end), ("reasoning_start", start)):
            for outside in (min(tokens), max(tokens)) if tokens else ():
                if not 0 <= outside < vocab_size:
                    raise RequestError(f"{name}: expected token ids from 0 to {vocab_size - 1}, found {outside}")


@dataclass(frozen=True, slots=True)
class Resources(Generic[S]):
    """What a generation works with: the trunk, its context size and chunk grid in tokens, the vocabulary, new sampler chains.

    prompt_streams: chunks of a prompt that the trunk computes at once.
    """

    runner: Runner[S]
    tokens: TokenTable
    new_chain: Callable[[], Chain]
    n_ctx: int
    chunk_tokens: int
    prompt_streams: int = 1

    def check(self, request: GenerationRequest) -> int:
        """The number of tokens to generate at most. Raises RequestError for a request that can never be served."""
        request.check_tokens(self.runner.vocab_size)
        request.sampling.check_vocabulary(self.runner.vocab_size)
        return request.check_context(self.n_ctx)


class Generation:
    """The state of one answer: sampler, text, hashes, clock. `commit` takes the logits of each step in turn; `close` ends it."""

    def __init__(
        self,
        request: GenerationRequest,
        max_tokens: int,
        sampler: Sampler,
        tokens: TokenTable,
        queued_at: float | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.request = request
        self._max_tokens = max_tokens
        self._chooser = TokenChooser(request, max_tokens, sampler)
        self._tokens = tokens
        self._text = TextStream(
            stop=request.stop,
            reasoning=request.reasoning,
            in_reasoning=request.starts_in_reasoning and request.reasoning is not None,
        )
        self._hasher = StepHasher() if request.hash_logits else None
        self.wants_logits = request.hash_logits or request.n_logprobs is not None or self._chooser.wants_logits
        """`commit` needs a step's row of logits; otherwise the id of the largest will do."""
        self._clock = clock
        self._started = clock()
        self._queued_at = self._started if queued_at is None else queued_at
        self._first_logits_at: float | None = None
        self._count = 0
        self._reason: FinishReason | None = None
        self.cached_tokens = 0  # of the prompt, set by who starts the sequence from a cache

    @classmethod
    def begin(
        cls,
        resources: Resources[S],
        request: GenerationRequest,
        queued_at: float | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> Generation:
        """A new answer with a sampler of its own. Raises RequestError for a request that can never be served."""
        max_tokens = resources.check(request)
        seed = request.sampling.seed if request.sampling.seed is not None else secrets.randbelow(MAX_SEED + 1)
        vocab_size = resources.runner.vocab_size
        sampler = make_sampler(request.sampling, request.prompt, seed, vocab_size, resources.new_chain)
        try:
            return cls(request, max_tokens, sampler, resources.tokens, queued_at, clock)
        except BaseException:
            sampler.close()
            raise

    def close(self) -> None:
        """Free the sampler and the constraint; to be called once."""
        self._chooser.close()

    @property
    def count(self) -> int:
        """Tokens chosen so far."""
        return self._count

    @property
    def remaining(self) -> int:
        """Tokens that may still be chosen."""
        return self._max_tokens - self._count

    def tokens_per_second(self, now: float) -> float:
        """Tokens a second since the first one, which belongs to the prefill."""
        if self._first_logits_at is None or self._count < 2 or now <= self._first_logits_at:
            return 0.0
        return (self._count - 1) / (now - self._first_logits_at)

    @property
    def finished(self) -> bool:
        """The last token was chosen; `finish` gives the last event."""
        return self._reason is not None

    def commit(self, row: Row) -> TokenEvent:
        """The next token, chosen from its row. Raises LogitsError or ConstraintError when that is impossible."""
        if self._reason is not None:
            raise RuntimeError("the answer is complete, no further logits are expected")
        if self._first_logits_at is None:
            self._first_logits_at = self._clock()
        index = self._count
        logits = None if isinstance(row, int) else row
        if logits is not None:
            check_logits(logits, index)
        elif self.wants_logits:
            raise EngineError(f"step {index}: expected logits, found the token {row} only")
        digest = self._hasher.add(logits) if self._hasher and logits is not None else None
        token = self._chooser.choose(row, self._text.in_reasoning)
        self._count += 1
        ended = self._tokens.is_end(token) and not self.request.ignore_end
        data = b"" if ended else self._tokens.token_bytes(token)
        deltas = self._text.step(data)
        self._chooser.note(data, self._text.in_reasoning)
        if ended or self._text.stop_string is not None or self._chooser.complete:
            self._reason = FinishReason.STOP
        elif self._count >= self._max_tokens:
            self._reason = FinishReason.LENGTH
        logprob: float | None = None
        top: tuple[tuple[int, float], ...] = ()
        if self.request.n_logprobs is not None and logits is not None:
            logprob, top = token_logprobs(logits, token, self.request.n_logprobs)
        return TokenEvent(tuple(deltas), token, index, digest, logprob, top)

    def finish(self) -> FinishEvent:
        """The last event, with the text that was held back. An answer cut off at `max_tokens` may still meet a stop string in it."""
        if self._reason is None or self._first_logits_at is None:
            raise RuntimeError("the answer is not complete yet")
        deltas = tuple(self._text.flush())
        reason = FinishReason.STOP if self._text.stop_string is not None else self._reason
        timings = Timings(
            queue_ms=1000 * (self._started - self._queued_at),
            prompt_tokens=len(self.request.prompt),
            prefill_ms=1000 * (self._first_logits_at - self._started),
            completion_tokens=self._count,
            decode_ms=1000 * (self._clock() - self._first_logits_at),
            cached_tokens=self.cached_tokens,
        )
        digest = self._hasher.digest() if self._hasher else None
        return FinishEvent(
            deltas,
            reason=reason,
            stop_string=self._text.stop_string,
            timings=timings,
            logits_sha256=digest,
            reasoning_tokens=self._chooser.reasoning_tokens,
        )


def generate(
    resources: Resources[S], request: GenerationRequest, queued_at: float | None = None
) -> Generator[Event, None, None]:
    """Run one request alone, an event at a time: what every schedule must equal. Closing the iterator frees its sequence."""
    generation = Generation.begin(resources, request, queued_at)
    try:
        state = resources.runner.new_sequence()
        try:
            logits: Logits | None = None
            for begin, end in chunk_bounds(len(request.prompt), resources.chunk_tokens, request.cuts):
                last = end == len(request.prompt)
                logits = resources.runner.prefill(state, request.prompt[begin:end], want="last" if last else "none")
                yield PrefillEvent(done=end, total=len(request.prompt))
            while True:
                if logits is None:
                    raise EngineError("the runner returned no logits for the last chunk of a prompt")
                event = generation.commit(logits)
                yield event
                if generation.finished:
                    break
                logits = resources.runner.decode([(state, event.token)])[0]
            yield generation.finish()
        finally:
            state.free()
    finally:
        generation.close()


def chunk_bounds(length: int, chunk_tokens: int, cuts: Sequence[int] = ()) -> list[tuple[int, int]]:
    """The chunks `(begin, end)` of a prompt: the grid of `chunk_tokens`, and `cuts` inside the prompt."""
    inner = {*range(chunk_tokens, length, chunk_tokens), *(cut for cut in cuts if 0 < cut < length)}
    ends = [*sorted(inner), length]
    return list(zip([0, *ends[:-1]], ends, strict=True))
