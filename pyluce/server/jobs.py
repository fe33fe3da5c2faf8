"""What a client asked for, whatever the API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pyluce.engine import RequestError, SamplingParams
from pyluce.server.settings import EFFORTS

_EFFORT_ALIASES = {"xhigh": "x-high"}


@dataclass(frozen=True, slots=True)
class Reasoning:
    """How much an answer may reason. `fields` are the request's names of the three settings, for messages."""

    thinking: bool | None = None
    effort: str | None = None
    budget: int | None = None
    fields: tuple[str, str, str] = ("enable_thinking", "reasoning_effort", "thinking_budget")

    def __post_init__(self) -> None:
        thinking_field, effort_field, budget_field = self.fields
        effort = _EFFORT_ALIASES.get(self.effort, self.effort) if self.effort is not None else None
        if effort is not None and effort not in ("none", *EFFORTS):
            raise RequestError(f"{effort_field}: expected none, {', '.join(EFFORTS)}, found {self.effort!r}")
        object.__setattr__(self, "effort", effort)
        if effort is None:
            if self.budget is not None and self.thinking is False:
                raise RequestError(f"{budget_field}: expected with reasoning only, found {thinking_field} false")
            return
        switch = effort != "none"
        if self.thinking is not None and self.thinking != switch:
            found = f"{thinking_field} {str(self.thinking).lower()} and {effort_field} {effort!r}"
            raise RequestError(f"{effort_field}: expected the same as {thinking_field}, found {found}")

    @property
    def switch(self) -> bool | None:
        """Reasoning on, off, or as the template has it."""
        return self.thinking if self.effort is None else self.effort != "none"


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether the answer may or must call tools: "auto", "none", "required", or "named" with the tool's name."""

    mode: str = "auto"
    name: str | None = None


@dataclass(frozen=True, slots=True)
class JsonFormat:
    """The answer must be JSON, of this schema unless it is None. `field` is the request's name of it."""

    schema: Mapping[str, Any] | None
    field: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatJob:
    """A conversation to continue."""

    messages: Sequence[Mapping[str, Any]]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    n: int = 1
    max_tokens: int | None = None
    max_tokens_field: str = "max_tokens"
    stop: tuple[str, ...] = ()
    stop_field: str = "stop"
    n_logprobs: int | None = None
    reasoning: Reasoning = field(default_factory=Reasoning)
    template_variables: Mapping[str, Any] = field(default_factory=dict)
    tools: Sequence[Mapping[str, Any]] | None = None
    tool_choice: ToolChoice = field(default_factory=ToolChoice)
    parallel_calls: bool = True
    json_format: JsonFormat | None = None

    @property
    def usable_tools(self) -> Sequence[Mapping[str, Any]] | None:
        """The tools that the answer may call."""
        return None if self.tool_choice.mode == "none" else self.tools
