"""A model's own chat template: messages in, prompt text out.

Templates come with the model file, so they run in Jinja's immutable sandbox. What they may use is what `transformers` gives them:
`messages`, `tools`, `documents`, `add_generation_prompt`, the names of special tokens, `raise_exception`, `strftime_now`, a `tojson` that does not
escape for HTML, `break` and `continue`, and any further keyword.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pyluce.text.marking import SpecialTexts, choose_mark, map_strings, unmark
from pyluce.text.stream import ReasoningMarkers

Message = Mapping[str, Any]

_RESERVED = frozenset({"messages", "tools", "add_generation_prompt"})


class TemplateError(ValueError):
    """The messages cannot be rendered; the text is the template's own message where it raised one."""


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """A prompt as the template wrote it.

    `literal` are the places `(start, end)` in `text` that spell a special token but came from a supplied string: they are text.
    `starts_in_reasoning`: the prompt ends with an open reasoning block, so the answer begins inside it.
    """

    text: str
    literal: tuple[tuple[int, int], ...] = ()
    starts_in_reasoning: bool = False


class ChatTemplate:
    """A compiled chat template.

    `special` are the spellings that must not be parsed when they come from a supplied string; `names` are the template variables for
    special tokens (`bos_token`, `eos_token`). `now` is replaced in tests.
    """

    def __init__(
        self,
        source: str,
        *,
        special: SpecialTexts | None = None,
        names: Mapping[str, str] | None = None,
        reasoning: ReasoningMarkers | None = None,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        self.source = source
        self.special = special if special is not None else SpecialTexts(())
        self.reasoning = reasoning if reasoning is not None else ReasoningMarkers()
        markers = (self.reasoning.start, self.reasoning.end)
        self._special_in_replies = self.special.without(markers)
        self._names = dict(names or {})
        self._now = now
        environment = _environment()
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = self._strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(f"the chat template does not compile: line {error.lineno}: {error.message}") from error

    @property
    def has_reasoning(self) -> bool:
        """The template writes reasoning markers, so answers are split at them."""
        return self.reasoning.start in self.source or self.reasoning.end in self.source

    @property
    def has_thinking_switch(self) -> bool:
        """The template looks at `enable_thinking`."""
        return "enable_thinking" in self.source

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        enable_thinking: bool | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> RenderedPrompt:
        """Render `messages` (and `tools`); `enable_thinking` None leaves the template's own default, `kwargs` are further variables.

        Raises TemplateError for messages that are no messages, for whatever the template refuses, and for a template that fails.
        """
        plain = [plain_message(message, index) for index, message in enumerate(messages)]
        if not plain:
            raise TemplateError("messages: expected at least one message, found none")
        variables: dict[str, Any] = {"documents": None, **(kwargs or {})}
        if enable_thinking is not None:
            variables["enable_thinking"] = enable_thinking
        taken = _RESERVED.intersection(variables)
        if taken:
            raise TemplateError(
                f"template variables: {', '.join(sorted(taken))} cannot be set by hand, the request itself sets them"
            )
        try:
            mark = choose_mark(plain, tools, variables)
            variables = self._mark_all(variables, plain, tools, mark)
        except (ValueError, RecursionError) as error:
            raise TemplateError(f"messages: {error}") from error
        text, marked = unmark(
            self._run({**self._names, **variables, "add_generation_prompt": add_generation_prompt}, mark), mark
        )
        open_reasoning = add_generation_prompt and text.rstrip().endswith(self.reasoning.start)
        return RenderedPrompt(text, self._literal_places(text, marked), open_reasoning)

    def _mark_all(
        self,
        variables: Mapping[str, Any],
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        mark: str,
    ) -> dict[str, Any]:
        def mark_strings(value: Any, special: SpecialTexts) -> Any:
            return map_strings(value, lambda text: special.mark(text, mark))

        marked: dict[str, Any] = mark_strings(variables, self.special)
        marked["messages"] = [
            mark_strings(message, self._special_in_replies if message["role"] == "assistant" else self.special)
            for message in messages
        ]
        marked["tools"] = mark_strings(list(tools), self.special) if tools else None
        return marked

    def _literal_places(self, text: str, marked: Sequence[int]) -> tuple[tuple[int, int], ...]:
        """The special spellings in `text` that contain one of the `marked` characters (ascending indices)."""
        places = []
        for start, end in self.special.find(text) if marked else ():
            nearest = bisect_left(marked, start)
            if nearest < len(marked) and marked[nearest] < end:
                places.append((start, end))
        return tuple(places)

    def _run(self, variables: Mapping[str, Any], mark: str) -> str:
        try:
            return self._template.render(variables)
        except TemplateError as error:
            raise TemplateError(str(error).replace(mark, "")) from None
        except Exception as error:
            # a template is a program from the model file: whatever it does wrong with these messages is one kind of failure here
            raise TemplateError(
                f"the chat template failed: {type(error).__name__}: {error}".replace(mark, "")
            ) from error

    def _strftime_now(self, format: str) -> str:
        return self._now().strftime(format)


def plain_message(message: Message, index: int) -> dict[str, Any]:
    """A message as templates expect it: a role, and the content, if there is any, as one string or None.

    Content may be given as a list of text parts; they are joined. Raises TemplateError naming the message and the field.
    """
    where = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise TemplateError(f"{where}: expected a mapping with role and content, found {type(message).__name__}")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise TemplateError(f"{where}.role: expected a string such as 'user', found {role!r}")
    if "content" not in message:
        return dict(message)
    content = message["content"]
    if isinstance(content, (list, tuple)):
        content = "".join(_text_of_part(part, f"{where}.content[{number}]") for number, part in enumerate(content))
    if content is not None and not isinstance(content, str):
        raise TemplateError(
            f"{where}.content: expected a string or a list of text parts, found {type(content).__name__}"
        )
    return {**message, "content": content}


def _text_of_part(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise TemplateError(f"{where}: expected a text part, found {type(part).__name__}")
    kind, text = part.get("type"), part.get("text")
    if kind not in ("text", "input_text", "output_text"):
        raise TemplateError(f"{where}.type: expected 'text' (this model reads text only), found {kind!r}")
    if not isinstance(text, str):
        raise TemplateError(f"{where}.text: expected a string, found {type(text).__name__}")
    return text


class _GenerationTag(Extension):
    """`{% generation %}` marks an assistant's tokens for training; here its body is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012 (the base class declares it so)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[LoopControlExtension, _GenerationTag]
    )
    environment.filters["tojson"] = _to_json
    return environment


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
