"""From a job to requests of the engine: template, tokens, tools, constraints. All of it runs on the vocabulary's thread."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Final, NamedTuple, Protocol

from pyluce.engine import GenerationRequest, IdlePrompt, RequestError, SamplingParams
from pyluce.engine.constraint import ConstraintFactory
from pyluce.engine.sampling import MAX_SEED
from pyluce.server.jobs import ChatJob
from pyluce.server.protocols import Service, TextTools
from pyluce.server.reply import Answer, Plan
from pyluce.server.settings import ServerSettings
from pyluce.text import ChatTemplate
from pyluce.text.tools import Function, ToolFormat, ToolStream, detect_format, read_functions

DEFAULT_EFFORT: Final = "x-high"
SHORTEST_DIVIDED_ANSWER: Final = 64

_TEMPLATE_EFFORTS = {"low": "low", "medium": "medium", "x-high": "xhigh"}


class PlanContext(Protocol):
    """What planning needs of the application (`pyluce.server.context.AppContext`)."""

    @property
    def service(self) -> Service:
        """The model."""

    @property
    def settings(self) -> ServerSettings:
        """The server's settings."""


class CallableTools(NamedTuple):
    """The functions that an answer may call, and how it writes that."""

    format: ToolFormat
    functions: Mapping[str, Function]

    def new_stream(self) -> ToolStream:
        """A stream for one answer."""
        return ToolStream(self.format, self.functions)


def plan_chat(tools: TextTools, context: PlanContext, job: ChatJob) -> Plan:
    """Render and tokenize a conversation, and say what its answer must keep to. Raises RequestError or TemplateError."""
    template = chat_template(tools)
    callable_tools = find_tools(template, job)
    names = {"max_tokens": job.max_tokens_field, "stop": job.stop_field, "thinking_budget": job.reasoning.fields[2]}
    with renamed(names):
        request = tools.prompts.build(
            **_template_options(template, job),
            max_tokens=job.max_tokens,
            stop=job.stop,
            sampling=job.sampling,
            n_logprobs=job.n_logprobs,
            constraint=_constraint(tools, callable_tools, job),
        )
        request = limit_tokens(request, context.settings, context.service.info.n_ctx)
        request = replace(request, thinking_budget=_thinking_budget(request, context, job))
        request.check_context(context.service.info.n_ctx)
    return Plan(
        choices(request, job.n),
        new_tool_stream=callable_tools.new_stream if callable_tools is not None else None,
        with_tokens=job.n_logprobs is not None,
        one_call=not job.parallel_calls,
        follow_up=partial(next_prompts, job=job) if job.n == 1 else None,
    )


def next_prompts(tools: TextTools, answer: Answer, *, job: ChatJob) -> tuple[IdlePrompt, ...]:
    """What the next turn's prompt begins with: the conversation and this answer, rendered as a client sends it back.

    Clients send an answer back with its reasoning or without it. What the conversation's earlier answers show is expected again; where
    they show nothing, both are prepared if the template writes them differently, the one without, which is usual, last: it is computed first.
    """
    with_reasoning = [bool(said.get("reasoning_content")) for said in job.messages if said["role"] == "assistant"]
    if not answer.reasoning:
        ways: tuple[bool, ...] = (False,)
    else:
        ways = (any(with_reasoning),) if with_reasoning else (True, False)
    prompts = [_next_prompt(tools, answer, job, with_reasoning=way) for way in ways]
    return tuple(dict.fromkeys(prompt for prompt in prompts if prompt is not None))


def _next_prompt(tools: TextTools, answer: Answer, job: ChatJob, *, with_reasoning: bool) -> IdlePrompt | None:
    """A message that stands for the client's next one is rendered behind the answer and cut off again, so that the template treats the
    answer as history. None when the template has no place that can be recognised.
    """
    options = _template_options(chat_template(tools), job)
    said: dict[str, Any] = {"role": "assistant", "content": answer.text}
    if with_reasoning:
        said["reasoning_content"] = answer.reasoning
    following: dict[str, Any] = {"role": "user", "content": "x"}
    if answer.calls:
        said["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.text}}
            for call in answer.calls
        ]
        following = {"role": "tool", "content": "x", "tool_call_id": answer.calls[0].id}
    messages = _with_arguments(chat_template(tools), [*job.messages, said, following])
    request = tools.prompts.build(**{**options, "messages": messages})
    if len(request.cuts) < 2:
        return None
    end = request.cuts[-2]
    return IdlePrompt(request.prompt[:end], tuple(cut for cut in request.cuts if cut < end))


def render_tokens(tools: TextTools, job: ChatJob) -> tuple[int, ...]:
    """The prompt's tokens alone. Raises RequestError or TemplateError."""
    template = chat_template(tools)
    find_tools(template, job)
    return tools.prompts.build(**_template_options(template, job)).prompt


def chat_template(tools: TextTools) -> ChatTemplate:
    """The model's template. Raises RequestError when it has none."""
    if tools.template is None:
        raise RequestError(
            "messages: this model has no chat template; use /v1/completions, or start the server with a template"
        )
    return tools.template


def find_tools(template: ChatTemplate, job: ChatJob) -> CallableTools | None:
    """The tools that the answer may call. Raises RequestError when the model cannot be told of them, or the choice names none of them."""
    choice = job.tool_choice
    if not job.tools:
        if choice.mode in ("required", "named"):
            raise RequestError("tool_choice: expected tools to choose from, found none")
        return None
    format = detect_format(template.source)
    if format is None or not writes_tools(template):
        raise RequestError("tools: this model's chat template does not say how it calls tools")
    try:
        functions = read_functions(job.tools)
    except ValueError as error:
        raise RequestError(str(error)) from error
    if choice.name is not None and choice.name not in functions:
        raise RequestError(f"tool_choice: expected one of {', '.join(functions)}, found {choice.name!r}")
    if choice.mode == "none":
        return None
    return CallableTools(format, functions)


def writes_tools(template: ChatTemplate) -> bool:
    """The template writes tool definitions, and shows a format of calls that is known."""
    return "tools" in template.source and detect_format(template.source) is not None


def _constraint(tools: TextTools, callable_tools: CallableTools | None, job: ChatJob) -> ConstraintFactory | None:
    choice = job.tool_choice
    if choice.mode in ("required", "named") and callable_tools is not None:
        if job.json_format is not None:
            raise RequestError(f"{job.json_format.field}: expected text when a tool must be called, found a format")
        named = {name: function for name, function in callable_tools.functions.items() if choice.name in (None, name)}
        return tools.constraints.tool_calls(callable_tools.format, named, many=job.parallel_calls)
    if job.json_format is None:
        return None
    if callable_tools is not None:
        raise RequestError(
            f"{job.json_format.field}: expected text when tools may be called, found a format; tool_choice 'none' allows it"
        )
    if job.json_format.schema is None:
        return tools.constraints.json_object(job.json_format.field)
    return tools.constraints.json_schema(job.json_format.schema, job.json_format.field)


def _thinking_budget(request: GenerationRequest, context: PlanContext, job: ChatJob) -> int | None:
    """Reasoning tokens at most: the request's own number, or its effort's. One that names neither gets the default effort's, unless its
    answer is too short to be divided."""
    if request.reasoning is None:
        return None
    if job.reasoning.budget is not None:
        return job.reasoning.budget
    short = request.max_tokens is not None and request.max_tokens < SHORTEST_DIVIDED_ANSWER
    if short and job.reasoning.effort is None:
        return None
    limit = context.settings.efforts.limit(job.reasoning.effort or DEFAULT_EFFORT)
    return context.service.info.n_ctx if limit is None else limit


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
    """The requests that continue a text, or token ids. Raises RequestError."""
    options: dict[str, Any] = {
        "max_tokens": max_tokens,
        "stop": stop,
        "sampling": sampling,
        "n_logprobs": n_logprobs,
    }
    with renamed({"tokens": "prompt"}):
        if isinstance(prompt, str):
            request = tools.prompts.build(prompt, chat=False, **options)
        else:
            request = tools.prompts.build(tokens=prompt, **options)
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
    """The request with the server's limits where it names none. Raises ContextLimitError when it cannot fit."""
    room = request.check_context(n_ctx)
    max_tokens = min(room, settings.default_max_tokens) if request.max_tokens is None else request.max_tokens
    return replace(request, max_tokens=max_tokens, deadline_s=settings.deadline_s)


def choices(request: GenerationRequest, n: int) -> tuple[GenerationRequest, ...]:
    """`n` requests for the same prompt. Choice i draws with the seed of the first plus i, so each can be had alone."""
    sampling = request.sampling
    if sampling.is_greedy:
        return (request,) * n
    first = sampling.seed if sampling.seed is not None else secrets.randbelow(MAX_SEED + 1)
    return tuple(
        replace(request, sampling=replace(sampling, seed=(first + index) % (MAX_SEED + 1))) for index in range(n)
    )


def _template_options(template: ChatTemplate, job: ChatJob) -> dict[str, Any]:
    """What the prompt builder needs to render the conversation."""
    switch, variables = _template_settings(template, job)
    return {
        "messages": _with_arguments(template, job.messages),
        "thinking": switch,
        "tools": job.usable_tools,
        "template_variables": variables or None,
    }


def _with_arguments(template: ChatTemplate, messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The messages with the arguments of earlier calls, JSON text, as this template expects them."""
    format = detect_format(template.source)
    convert = json.loads if format is None else format.history_arguments
    changed: list[Mapping[str, Any]] = []
    for message in messages:
        calls = message.get("tool_calls")
        if calls:
            calls = [
                {**call, "function": {**call["function"], "arguments": convert(call["function"]["arguments"])}}
                for call in calls
            ]
            message = {**message, "tool_calls": calls}
        changed.append(message)
    return changed


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
