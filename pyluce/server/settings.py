"""How the server is set up: one frozen value, checked before anything starts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from pyluce.engine import SamplingParams

MAX_CHOICES: Final = 16
EFFORTS: Final = ("low", "medium", "high", "x-high", "max")


class SettingError(ValueError):
    """A setting cannot be used; the message names it."""


@dataclass(frozen=True, slots=True)
class EffortBudgets:
    """Reasoning tokens that each `reasoning_effort` allows at most; `max` is what the answer's own limit leaves."""

    low: int = 1024
    medium: int = 4096
    high: int = 8192
    x_high: int = 15488

    def limit(self, effort: str) -> int | None:
        """The budget of a tier of EFFORTS, None for no limit of its own."""
        return {"low": self.low, "medium": self.medium, "high": self.high, "x-high": self.x_high}.get(effort)


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Everything about the server that is not about the model.

    * host, port: where to listen; port 0 takes a free one.
    * model_alias: the model's name in answers; None is the name in the file.
    * api_key: clients must send it as `Authorization: Bearer KEY` or `x-api-key: KEY`; None lets everybody in.
    * cors_origins: web origins that may read answers in a browser; `*` is all of them, none is none.
    * max_body_bytes: larger request bodies are refused.
    * keep_alive_s: a silent stream gets a comment line this often.
    * heartbeat_limit_s: an engine that works, but has finished no step for this long, is reported as stalled.
    * shutdown_grace_s: running requests may end in this time when the server is asked to stop.
    * deadline_s: a request that takes longer, waiting included, ends with an error; None for no limit.
    * default_max_tokens: tokens of an answer whose request names no limit, or what fits into the context.
    * sampling: what a request that says nothing about sampling gets.
    * efforts: reasoning tokens by `reasoning_effort`.
    * status_interval_s: how often the status stream reports at most.

    Raises SettingError.
    """

    host: str = "127.0.0.1"
    port: int = 8080
    model_alias: str | None = None
    api_key: str | None = None
    cors_origins: tuple[str, ...] = ()
    max_body_bytes: int = 32 * 1024 * 1024
    keep_alive_s: float = 15.0
    heartbeat_limit_s: float = 120.0
    shutdown_grace_s: float = 30.0
    deadline_s: float | None = None
    default_max_tokens: int = 16000
    sampling: SamplingParams = field(default_factory=SamplingParams)
    efforts: EffortBudgets = field(default_factory=EffortBudgets)
    status_interval_s: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise SettingError(f"port: expected 0 to 65535, found {self.port}")
        if self.api_key is not None and not (self.api_key and self.api_key.isascii() and self.api_key.isprintable()):
            raise SettingError("api_key: expected printable ASCII characters, found an empty key or others")
        for name in ("max_body_bytes", "default_max_tokens"):
            if getattr(self, name) < 1:
                raise SettingError(f"{name}: expected at least 1, found {getattr(self, name)}")
        for name in ("keep_alive_s", "heartbeat_limit_s", "status_interval_s"):
            if not getattr(self, name) > 0:
                raise SettingError(f"{name}: expected more than 0 seconds, found {getattr(self, name)}")
        if self.deadline_s is not None and not 0 < self.deadline_s < float("inf"):
            raise SettingError(f"deadline_s: expected a positive number of seconds, found {self.deadline_s}")
        if self.shutdown_grace_s < 0:
            raise SettingError(f"shutdown_grace_s: expected 0 or more, found {self.shutdown_grace_s}")
