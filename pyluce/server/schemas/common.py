"""What the request schemas share: strict models, text parts, and the sampling fields of the OpenAI-like APIs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from pyluce.engine import RequestError, SamplingParams


class Strict(BaseModel):
    """Unknown fields and values of another type are errors; nothing is converted in silence."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class TextPart(Strict):
    """A part of a message's content. This model reads text only."""

    type: Literal["text"]
    text: str


class StreamOptions(Strict):
    """`stream_options`."""

    include_usage: bool | None = None


class SamplingFields(Strict):
    """How tokens are chosen. Absent and null mean the server's default, which is greedy unless it was started with another."""

    temperature: float | None = Field(None, description="0 takes the most probable token.")
    top_p: float | None = None
    top_k: int | None = Field(None, description="0 keeps all tokens.")
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = Field(None, description="1 is off.")
    repeat_penalty: float | None = Field(None, description="Another name of repetition_penalty.")
    rep_pen: float | None = Field(None, description="Another name of repetition_penalty.")
    penalty_window: int | None = Field(None, description="How many tokens the penalties look back.")
    rep_window: int | None = Field(None, description="Another name of penalty_window.")
    seed: int | None = None
    logit_bias: dict[str, float] | None = Field(None, description="Added to the logits of token ids, -100 to 100.")

    def sampling(self, default: SamplingParams) -> SamplingParams:
        """The sampling parameters. Raises RequestError naming the request's own field."""
        repetition = ("repetition_penalty", "repeat_penalty", "rep_pen")
        window = ("penalty_window", "rep_window")
        given: dict[str, Any] = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "frequency_penalty": self.frequency_penalty,
            "presence_penalty": self.presence_penalty,
            "repeat_penalty": self.one_of(*repetition),
            "penalty_window": self.one_of(*window),
            "seed": self.seed,
            "logit_bias": _token_biases(self.logit_bias),
        }
        fields = {name: getattr(default, name) for name in SamplingParams.__dataclass_fields__}
        fields.update({name: value for name, value in given.items() if value is not None})
        spelled = {"repeat_penalty": self.spelling(*repetition), "penalty_window": self.spelling(*window)}
        return make_sampling(fields, spelled)

    def one_of(self, *names: str) -> Any:
        """The value of a field that has several names. Raises RequestError when two of them were given."""
        given = [name for name in names if getattr(self, name) is not None]
        if len(given) > 1:
            raise RequestError(
                f"{given[1]}: {' and '.join(given)} are the same setting, expected one of them, found both"
            )
        return getattr(self, given[0]) if given else None

    def spelling(self, *names: str) -> str:
        """The name that the request used, of several for one field; the first when it used none."""
        return next((name for name in names if getattr(self, name) is not None), names[0])


def make_sampling(fields: Mapping[str, Any], spelled: Mapping[str, str]) -> SamplingParams:
    """SamplingParams; an error names the field as `spelled` in the request."""
    try:
        return SamplingParams(**fields)
    except RequestError as error:
        name, separator, rest = str(error).partition(":")
        raise RequestError(f"{spelled.get(name, name)}{separator}{rest}") from error


def stop_strings(stop: str | list[str] | None) -> tuple[str, ...]:
    """`stop` as a tuple."""
    if stop is None:
        return ()
    return (stop,) if isinstance(stop, str) else tuple(stop)


def join_parts(content: str | list[TextPart] | None) -> str | None:
    """A message's content as one string."""
    if content is None or isinstance(content, str):
        return content
    return "".join(part.text for part in content)


def _token_biases(given: Mapping[str, float] | None) -> dict[int, float] | None:
    if given is None:
        return None
    biases: dict[int, float] = {}
    for key, bias in given.items():
        if not (key.isascii() and key.isdigit()) or len(key) > 10:
            raise RequestError(f"logit_bias: expected token ids as keys, found {key[:40]!r}")
        biases[int(key)] = bias
    return biases
