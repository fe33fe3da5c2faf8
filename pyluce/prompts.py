"""Makes a valid `GenerationRequest` out of what a caller gives: text, messages or token ids, and options."""

from __future__ import annotations

import operator
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pyluce.engine import ConstraintFactory, GenerationRequest, RequestError, SamplingParams
from pyluce.engine.sampling import MAX_SEED
from pyluce.text import ChatTemplate, RenderedPrompt, Tokenizer
from pyluce.text.turns import reply_marker, turn_starts


@dataclass(frozen=True, slots=True)
class PromptBuilder:
    """Renders and tokenizes. `call` runs a function on the thread that owns the vocabulary."""

    tokenizer: Tokenizer
    template: ChatTemplate | None
    call: Callable[[Callable[[], Any]], Any]
    _markers: dict[str, tuple[int, ...]] = field(default_factory=dict, init=False, compare=False, repr=False)

    def build(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Mapping[str, Any]] | None = None,
        tokens: Sequence[int] | None = None,
        system: str | None = None,
        chat: bool = True,
        thinking: bool | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_variables: Mapping[str, Any] | None = None,
        max_tokens: int | None = None,
        stop: str | Sequence[str] = (),
        hash_logits: bool = False,
        ignore_end: bool = False,
        n_logprobs: int | None = None,
        thinking_budget: int | None = None,
        constraint: ConstraintFactory | None = None,
        sampling: SamplingParams | None = None,
        **sampling_fields: Any,
    ) -> GenerationRequest:
        """Check everything and make the request. Raises RequestError or TemplateError naming what is wrong.

        * Exactly one of: `prompt` (one user message, or plain text with `chat=False`), `messages`, `tokens`.
        * `system`: a system message before `prompt`. `thinking`: switch the template's reasoning on or off.
        * `tools`, `template_variables`: passed to the template.
        * `max_tokens` None: until the model ends or the context is full. `stop`: a string or several.
        * `n_logprobs`, `thinking_budget`, `constraint`: see `GenerationRequest`.
        * `sampling`, or its fields (`temperature`, `top_p`, `seed`, ...) by keyword.
        """
        given = [
            name
            for name, value in (("prompt", prompt), ("messages", messages), ("tokens", tokens))
            if value is not None
        ]
        if len(given) != 1:
            found = " and ".join(given) if given else "none"
            raise RequestError(f"expected one of prompt, messages or tokens, found {found}")
        if prompt is not None and not isinstance(prompt, str):
            raise RequestError(f"prompt: expected a string, found {type(prompt).__name__}")
        chat = chat and tokens is None
        self._check_chat_only(
            chat,
            system=system,
            thinking=thinking,
            tools=tools,
            template_variables=template_variables,
            messages=messages,
            thinking_budget=thinking_budget,
        )
        if system is not None and messages is not None:
            raise RequestError("system and messages: put the system message into messages, or give a prompt")
        base = GenerationRequest(
            prompt=(0,),
            max_tokens=max_tokens,
            sampling=_resolve_sampling(sampling, sampling_fields),
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            hash_logits=hash_logits,
            ignore_end=ignore_end,
            n_logprobs=n_logprobs,
            constraint=constraint,
        )
        if tokens is not None:
            return replace(base, prompt=self._check_tokens(tokens))
        if not chat:
            text = prompt or ""
            return replace(base, prompt=self._encode(lambda: self.tokenizer.encode_text(text)))
        if messages is None:
            messages = [{"role": "user", "content": prompt}]
            if system is not None:
                messages.insert(0, {"role": "system", "content": system})
        request = self._render(base, messages, thinking, tools, template_variables)
        return request if thinking_budget is None else replace(request, thinking_budget=thinking_budget)

    def _render(
        self,
        base: GenerationRequest,
        messages: Sequence[Mapping[str, Any]],
        thinking: bool | None,
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any] | None,
    ) -> GenerationRequest:
        template = self.template if self.template is not None else self.tokenizer.chat_template()
        if thinking is not None and not template.has_thinking_switch:
            raise RequestError("thinking: this model's chat template has no such switch (enable_thinking)")
        rendered = template.render(messages, tools=tools, enable_thinking=thinking, kwargs=variables)
        prompt = self._encode(lambda: self.tokenizer.encode_prompt(rendered))
        return replace(
            base,
            prompt=prompt,
            cuts=turn_starts(prompt, self._marker(template)),
            reasoning=template.reasoning if template.has_reasoning else None,
            starts_in_reasoning=rendered.starts_in_reasoning,
            thinking_end=self._thinking_end(template) if template.has_reasoning else (),
            reasoning_start=self._reasoning_start(template, rendered),
        )

    def _marker(self, template: ChatTemplate) -> tuple[int, ...]:
        """How a reply opens in this template; found out once."""
        if template.source not in self._markers:
            self._markers[template.source] = reply_marker(
                template, lambda r: self._encode(lambda: self.tokenizer.encode_prompt(r))
            )
        return self._markers[template.source]

    def _reasoning_start(self, template: ChatTemplate, rendered: RenderedPrompt) -> int | None:
        """The token that may begin the answer's reasoning; None where the prompt has begun or ended it, or the model has no such token."""
        decided = rendered.starts_in_reasoning or rendered.text.rstrip().endswith(template.reasoning.end)
        if decided or not template.has_reasoning:
            return None
        tokens = self._encode(lambda: self.tokenizer.encode_prompt(RenderedPrompt(template.reasoning.start)))
        return tokens[0] if len(tokens) == 1 else None

    def _thinking_end(self, template: ChatTemplate) -> tuple[int, ...]:
        """The tokens that end the reasoning: the end marker, with the line breaks that templates write around it."""
        return self._encode(lambda: self.tokenizer.encode_prompt(RenderedPrompt(f"\n{template.reasoning.end}\n\n")))

    def _encode(self, encode: Callable[[], list[int]]) -> tuple[int, ...]:
        try:
            return tuple(self.call(encode))
        except ValueError as error:
            raise RequestError(f"prompt: {error}") from error

    def _check_tokens(self, tokens: Sequence[int]) -> tuple[int, ...]:
        try:
            ids = tuple(operator.index(token) for token in tokens)
            self.tokenizer.check_tokens(ids)
        except (TypeError, ValueError) as error:
            raise RequestError(f"tokens: {error}") from error
        return ids

    @staticmethod
    def _check_chat_only(chat: bool, **options: Any) -> None:
        given = [name for name, value in options.items() if value is not None]
        if given and not chat:
            raise RequestError(f"{', '.join(given)}: expected with a chat prompt only, found chat=False or tokens")


def _resolve_sampling(sampling: SamplingParams | None, fields: Mapping[str, Any]) -> SamplingParams:
    """The sampling parameters with a seed, drawn now where none is given, so that the caller can repeat the request."""
    if sampling is not None and fields:
        raise RequestError(f"sampling and {', '.join(fields)}: give the one or the others")
    if sampling is None:
        unknown = set(fields).difference(SamplingParams.__dataclass_fields__)
        if unknown:
            known = ", ".join(SamplingParams.__dataclass_fields__)
            raise RequestError(f"unknown option {', '.join(sorted(unknown))}; sampling options are {known}")
        sampling = SamplingParams(**fields)
    if sampling.seed is None and not sampling.is_greedy:
        sampling = replace(sampling, seed=secrets.randbelow(MAX_SEED + 1))
    return sampling
