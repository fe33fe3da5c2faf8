"""How a token is chosen from a row of logits.

The order is: logit bias, repetition penalty, frequency and presence penalties, top-k, temperature, top-p, min-p, draw. Each step is libllama's;
this module decides which steps a request needs and in what order. At temperature 0 without penalties the token with the largest
logit, biases added, is taken directly, of equal ones the lowest id, which is what the chain does too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from pyluce.engine.errors import LogitsError, RequestError
from pyluce.engine.protocols import Chain, Logits, Sampler

MAX_SEED = 2**32 - 2  # the next value means "random" to libllama
MIN_TEMPERATURE = 1e-3
MAX_PENALTY_WINDOW = 1 << 20


class ChainStep(NamedTuple):
    """One step of libllama's chain: `logit_bias`, `penalties`, `top_k`, `temperature`, `top_p`, `min_p`, `draw` or `greedy`."""

    name: str
    arguments: tuple[object, ...]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens. The defaults choose the most probable one.

    * temperature: 0 is greedy; otherwise logits are divided by it.
    * top_k: keep the k most probable tokens, 0 keeps all. top_p: keep the smallest set with this probability mass, 1 keeps all.
      min_p: keep tokens at least this probable relative to the most probable one, 0 keeps all.
    * repeat_penalty: divide positive and multiply negative logits of tokens among the last `penalty_window` of prompt and answer; 1 is off.
    * frequency_penalty, presence_penalty: subtract, per occurrence and once, for tokens among the last `penalty_window` of the
      answer; 0 is off. penalty_window 0 switches all three off.
    * seed: the same seed draws the same tokens; None draws a new one for each request.
    * logit_bias: added to the logit of a token id, -100 to 100.

    Raises RequestError naming the field.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repeat_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    penalty_window: int = 256
    seed: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_number("temperature", self.temperature, 0.0, 100.0)
        if 0.0 < self.temperature < MIN_TEMPERATURE:
            raise RequestError(
                f"temperature: expected 0 (greedy) or at least {MIN_TEMPERATURE}, found {self.temperature}"
            )
        _check_integer("top_k", self.top_k, 0, 2**31 - 1)
        _check_number("top_p", self.top_p, 0.0, 1.0)
        _check_number("min_p", self.min_p, 0.0, 1.0)
        _check_number("repeat_penalty", self.repeat_penalty, 0.0, 100.0)
        if self.repeat_penalty <= 0.0:
            raise RequestError(f"repeat_penalty: expected more than 0 (1 is off), found {self.repeat_penalty}")
        _check_number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_integer("penalty_window", self.penalty_window, 0, MAX_PENALTY_WINDOW)
        if self.seed is not None:
            _check_integer("seed", self.seed, 0, MAX_SEED)
        for token, bias in self.logit_bias.items():
            _check_integer("logit_bias: token id", token, 0, 2**31 - 1)
            _check_number(f"logit_bias[{token}]", bias, -100.0, 100.0)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise RequestError for a biased token that the vocabulary does not have."""
        for token in self.logit_bias:
            if token >= vocab_size:
                raise RequestError(f"logit_bias: expected token ids below {vocab_size}, found {token}")

    @property
    def is_greedy(self) -> bool:
        """No random draw is needed."""
        return self.temperature == 0.0

    @property
    def penalises(self) -> bool:
        """The choice depends on the tokens before."""
        return self._repeats or self._counts

    @property
    def _repeats(self) -> bool:
        return self.penalty_window > 0 and self.repeat_penalty != 1.0

    @property
    def _counts(self) -> bool:
        return self.penalty_window > 0 and (self.frequency_penalty != 0.0 or self.presence_penalty != 0.0)

    def steps_over_prompt(self) -> Iterator[ChainStep]:
        """The steps that count the prompt's tokens as well as the answer's."""
        if self.logit_bias:
            yield ChainStep("logit_bias", (dict(self.logit_bias),))
        if self._repeats:
            yield ChainStep("penalties", (self.penalty_window, self.repeat_penalty, 0.0, 0.0))

    def steps_over_answer(self, seed: int) -> Iterator[ChainStep]:
        """The steps that see the answer's tokens only, and the choice."""
        if self._counts:
            yield ChainStep("penalties", (self.penalty_window, 1.0, self.frequency_penalty, self.presence_penalty))
        if self.is_greedy:
            yield ChainStep("greedy", ())
            return
        if self.top_k > 0:
            yield ChainStep("top_k", (self.top_k,))
        yield ChainStep("temperature", (self.temperature,))
        if self.top_p < 1.0:
            yield ChainStep("top_p", (self.top_p,))
        if self.min_p > 0.0:
            yield ChainStep("min_p", (self.min_p,))
        yield ChainStep("draw", (seed,))


class GreedySampler:
    """The largest logit, after the biases were added; of equal ones the lowest id. What libllama's chain of the two steps chooses."""

    def __init__(self, biases: Mapping[int, float] | None = None) -> None:
        biases = biases or {}
        self._biased = np.array(list(biases), np.intp)
        self._biases = np.array(list(biases.values()), np.float32)

    @property
    def is_plain(self) -> bool:
        """The largest logit decides alone."""
        return not self._biased.size

    def sample(self, logits: Logits) -> int:
        if self._biased.size:
            logits = logits.copy()
            logits[self._biased] += self._biases
        return int(logits.argmax())

    def accept(self, token: int) -> None:
        pass

    def close(self) -> None:
        pass


def make_sampler(
    params: SamplingParams, prompt: Sequence[int], seed: int, vocab_size: int, new_chain: Callable[[], Chain]
) -> Sampler:
    """The sampler of one request. Raises RequestError for a biased token that the vocabulary does not have."""
    params.check_vocabulary(vocab_size)
    if params.is_greedy and not params.penalises:
        return GreedySampler(params.logit_bias)
    chain = new_chain()
    try:
        for step in params.steps_over_prompt():
            chain.add(step.name, *step.arguments)
        for token in prompt[-params.penalty_window :] if params.penalty_window else ():
            chain.accept(token)
        for step in params.steps_over_answer(seed):
            chain.add(step.name, *step.arguments)
    except BaseException:
        chain.close()
        raise
    return chain


def check_logits(logits: Logits, step: int) -> None:
    """Raise LogitsError when no token can be chosen from the row [n_vocab]."""
    largest = logits[logits.argmax()]  # of a row with NaN, the first of them
    if math.isfinite(largest):
        return
    if np.isnan(largest):
        count = int(np.isnan(logits).sum())
        raise LogitsError(
            f"step {step}: {count} of {logits.size} logits are NaN; the model's weights or its state are damaged"
        )
    raise LogitsError(
        f"step {step}: the largest of {logits.size} logits is {largest}; the model's weights or its state are damaged"
    )


def _check_number(name: str, value: object, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise RequestError(f"{name}: expected a number, found {type(value).__name__}")
    if not math.isfinite(value) or not low <= value <= high:
        raise RequestError(f"{name}: expected a number from {low:g} to {high:g}, found {value}")


def _check_integer(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name}: expected an integer, found {type(value).__name__}")
    if not low <= value <= high:
        raise RequestError(f"{name}: expected an integer from {low} to {high}, found {value}")
