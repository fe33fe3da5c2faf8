"""From what a client asked for, whatever the API, to requests of the engine."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from pyluce.engine import GenerationRequest, RequestError, SamplingParams
from pyluce.engine.sampling import MAX_SEED
from pyluce.server.protocols import Service, TextTools
from pyluce.server.reply import Plan
from pyluce.server.settings import EFFORTS, ServerSettings
from pyluce.text import ChatTemplate

_EFFORT_ALIASES = {"xhigh": "x-high"}
_TEMPLATE_EFFORTS = {"low": "low", "medium": "medium", "x-high": "xhigh"}


class PlanContext(Protocol):
    """What planning needs of the application (`pyluce.server.context.AppContext`)."""

    @property
    def service(self) -> Service:
        """The model."""

    @property
    def settings(self) -> ServerSettings:
        """The server's settings."""


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


def plan_chat(tools: TextTools, context: PlanContext, job: ChatJob) -> Plan:
    """Render and tokenize a conversation. Runs on the vocabulary's thread; raises RequestError or TemplateError."""
    template = chat_template(tools)
    switch, variables = _template_settings(template, job)
    with renamed({"max_tokens": job.max_tokens_field, "stop": job.stop_field}):
        request = tools.prompts.build(
            messages=job.messages,
            thinking=switch,
            tools=job.usable_tools,
            template_variables=variables or None,
            max_tokens=job.max_tokens,
            stop=job.stop,
            sampling=job.sampling,
        )
        request = limit_tokens(request, context.settings, context.service.info.n_ctx)
    request = replace(request, n_logprobs=job.n_logprobs)
    return Plan(choices(request, job.n), with_tokens=job.n_logprobs is not None, one_call=not job.parallel_calls)


def render_tokens(tools: TextTools, job: ChatJob) -> tuple[int, ...]:
    """The prompt's tokens alone. Runs on the vocabulary's thread; raises RequestError or TemplateError."""
    switch, variables = _template_settings(chat_template(tools), job)
    request = tools.prompts.build(
        messages=job.messages, thinking=switch, tools=job.usable_tools, template_variables=variables or None
    )
    return request.prompt


def chat_template(tools: TextTools) -> ChatTemplate:
    """The model's template. Raises RequestError when it has none."""
    if tools.template is None:
        raise RequestError(
            "messages: this model has no chat template; use /v1/completions, or start the server with a template"
        )
    return tools.template


def plan_text(
    tools: TextTools,
    context: PlanContext,
    prompt: str | Sequence[int],
    n: int,
    *,
    max_tokens: int | None,
    stop: tuple[str, ...],
    sampling: SamplingParams,
    n_logprobs: int | None,
) -> tuple[GenerationRequest, ...]:
    """The requests that continue a text, or token ids. Runs on the vocabulary's thread; raises RequestError."""
    options: dict[str, Any] = {"max_tokens": max_tokens, "stop": stop, "sampling": sampling}
    with renamed({"tokens": "prompt"}):
        if isinstance(prompt, str):
            request = tools.prompts.build(prompt, chat=False, **options)
        else:
            request = tools.prompts.build(tokens=prompt, **options)
    request = replace(request, n_logprobs=n_logprobs)
    return choices(limit_tokens(request, context.settings, context.service.info.n_ctx), n)


@contextmanager
def renamed(names: Mapping[str, str]) -> Iterator[None]:
    """RequestErrors inside name the request's own field: `names` maps the engine's names to them."""
    try:
        yield
    except RequestError as error:
        name, separator, rest = str(error).partition(":")
        base, bracket, index = name.partition("[")
        if not separator or names.get(base, base) == base:
            raise
        raise type(error)(f"{names[base]}{bracket}{index}:{rest}") from error


def limit_tokens(request: GenerationRequest, settings: ServerSettings, n_ctx: int) -> GenerationRequest:
    """The request with the server's limit where it names none. Raises ContextLimitError when it cannot fit."""
    room = request.check_context(n_ctx)
    if request.max_tokens is not None:
        return request
    return replace(request, max_tokens=min(room, settings.default_max_tokens))


def choices(request: GenerationRequest, n: int) -> tuple[GenerationRequest, ...]:
    """`n` requests for the same prompt. Choice i draws with the seed of the first plus i, so each can be had alone."""
    sampling = request.sampling
    if sampling.is_greedy:
        return (request,) * n
    first = sampling.seed if sampling.seed is not None else secrets.randbelow(MAX_SEED + 1)
    return tuple(
        replace(request, sampling=replace(sampling, seed=(first + index) % (MAX_SEED + 1))) for index in range(n)
    )


def _template_settings(template: ChatTemplate, job: ChatJob) -> tuple[bool | None, dict[str, Any]]:
    """The thinking switch and the template's variables."""
    variables = dict(job.template_variables)
    switch = job.reasoning.switch
    named = variables.pop("enable_thinking", None)
    if named is not None and not isinstance(named, bool):
        raise RequestError(f"chat_template_kwargs.enable_thinking: expected true or false, found {named!r}")
    if named is not None and switch is not None and named != switch:
        raise RequestError("chat_template_kwargs.enable_thinking: contradicts the request's own reasoning fields")
    switch = named if switch is None else switch
    thinking_field, effort_field, budget_field = job.reasoning.fields
    if not template.has_reasoning:
        if job.reasoning.budget is not None:
            raise RequestError(f"{budget_field}: this model does not reason")
        if job.reasoning.effort not in (None, "none"):
            raise RequestError(
                f"{effort_field}: expected none, as this model does not reason, found {job.reasoning.effort!r}"
            )
        if switch is False:
            switch = None  # it does not reason anyway
    if switch is not None and not template.has_thinking_switch:
        if switch is False:
            raise RequestError(f"{thinking_field}: this model's chat template cannot switch reasoning off")
        switch = None
    effort = _TEMPLATE_EFFORTS.get(job.reasoning.effort or "")
    if effort is not None and "reasoning_effort" in template.source:
        variables.setdefault("reasoning_effort", effort)
    return switch, variables
