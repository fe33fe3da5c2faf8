"""What a generation reports while it runs."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TypeAlias

from pyluce.text.stream import Channel, TextDelta


class FinishReason(enum.Enum):
    """Why an answer ended."""

    STOP = "stop"  # an end token, or a stop string
    LENGTH = "length"  # max_tokens, or the context is full


@dataclass(frozen=True, slots=True)
class Timings:
    """Where the time of a request went. `prefill_ms` ends with the first logits, `decode_ms` begins there.

    `cached_tokens` of the prompt came from the prefix cache and were not computed.
    """

    queue_ms: float
    prompt_tokens: int
    prefill_ms: float
    completion_tokens: int
    decode_ms: float
    cached_tokens: int = 0

    @property
    def prefill_tokens_per_second(self) -> float:
        """Computed prompt tokens a second."""
        return _rate(self.prompt_tokens - self.cached_tokens, self.prefill_ms)

    @property
    def decode_tokens_per_second(self) -> float:
        """Tokens a second of the steps after the first token, which belongs to the prefill."""
        return _rate(self.completion_tokens - 1, self.decode_ms)

    def as_dict(self) -> dict[str, float | int]:
        """For JSON."""
        return {
            "queue_ms": round(self.queue_ms, 3),
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "prefill_ms": round(self.prefill_ms, 3),
            "prefill_tokens_per_second": round(self.prefill_tokens_per_second, 1),
            "completion_tokens": self.completion_tokens,
            "decode_ms": round(self.decode_ms, 3),
            "decode_tokens_per_second": round(self.decode_tokens_per_second, 1),
        }


@dataclass(frozen=True, slots=True)
class _WithText:
    """Text that became certain with this event; `content` and `reasoning` are its two channels."""

    deltas: tuple[TextDelta, ...] = ()

    @property
    def content(self) -> str:
        """New text of the answer."""
        return self._channel(Channel.CONTENT)

    @property
    def reasoning(self) -> str:
        """New text of the reasoning."""
        return self._channel(Channel.REASONING)

    def _channel(self, channel: Channel) -> str:
        return "".join(delta.text for delta in self.deltas if delta.channel is channel)


@dataclass(frozen=True, slots=True)
class PrefillEvent(_WithText):
    """`done` of `total` prompt tokens are computed."""

    done: int = 0
    total: int = 0


@dataclass(frozen=True, slots=True)
class TokenEvent(_WithText):
    """A token was chosen. `index` counts from 0; `logits_sha256` is the digest of the row it was chosen from, where asked for.

    `logprob`, and `top_logprobs` as (token, logprob) from the most probable on, where asked for (`GenerationRequest.n_logprobs`).
    """

    token: int = -1
    index: int = 0
    logits_sha256: bytes | None = None
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishEvent(_WithText):
    """The answer is complete; the last event. `logits_sha256` covers all steps, where asked for.

    `reasoning_tokens`: how many of the answer's tokens were reasoning, its end marker included.
    """

    reason: FinishReason
    stop_string: str | None
    timings: Timings
    logits_sha256: bytes | None = None
    reasoning_tokens: int = 0


Event: TypeAlias = PrefillEvent | TokenEvent | FinishEvent


def _rate(count: int, milliseconds: float) -> float:
    return 1000.0 * count / milliseconds if count > 0 and milliseconds > 0 else 0.0
