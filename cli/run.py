"""`luce run`: answer one prompt, printed as it is generated; without a prompt, serve."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from cli.console import AnswerPrinter
from cli.dry_run import dry_run as show_dry_run
from cli.loading import loaded_model
from cli.options import EngineFlags, engine_options, read_text_file, refuse_together, sampling_options
from cli.serve import ServeFlags, named_flags, serve_model, serve_options, served
from pyluce.engine import Event, GenerationRequest, SamplingParams
from pyluce.luce import Completion, Luce

DEFAULT_MAX_TOKENS = 512
_PROMPT_ONLY = ("max_tokens", "stop", "chat", "system", "thinking", "show_thinking", "as_json")


@click.command()
@engine_options
@click.option("-p", "--prompt", help="The prompt; - reads standard input.")
@click.option(
    "-f",
    "--prompt-file",
    type=click.Path(allow_dash=True, path_type=Path),
    help="A file that holds the prompt; - is standard input.",
)
@click.option(
    "-n",
    "--max-tokens",
    type=click.IntRange(1),
    help=f"Tokens to generate at most.  [default: {DEFAULT_MAX_TOKENS}, or what fits]",
)
@sampling_options
@click.option("--stop", multiple=True, metavar="TEXT", help="End the answer before this text; can be repeated.")
@click.option("--chat/--raw", default=True, help="Use the model's chat template (default), or continue the plain text.")
@click.option("--system", help="A system message before the prompt.")
@click.option("--thinking/--no-thinking", default=None, help="Reason before the answer.  [default: the template's]")
@click.option("--show-thinking/--hide-thinking", default=None, help="Print the reasoning.  [default: on a terminal]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object: text, token ids, timings, hashes.")
@click.option(
    "--collect-routing",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Count the experts that are picked into this table, going on with one that is there.",
)
@click.option(
    "--dry-run", is_flag=True, help="Print every setting and where it comes from, and the plan; load nothing."
)
@click.option(
    "--like", metavar="NAME", help="With --dry-run: a published quant without its file: ud-q4_k_xl, iq4_nl or gsq-rco."
)
@serve_options
def run(
    engine: EngineFlags,
    sampling: SamplingParams,
    prompt: str | None,
    prompt_file: Path | None,
    max_tokens: int | None,
    stop: tuple[str, ...],
    chat: bool,
    system: str | None,
    thinking: bool | None,
    show_thinking: bool | None,
    as_json: bool,
    collect_routing: Path | None,
    dry_run: bool,
    like: str | None,
    serving: ServeFlags,
) -> int | None:
    """Serve MODEL over HTTP, or answer one prompt with it.

    MODEL is a GGUF file, or any shard of one; without it: luce-tiny, which is part of luce. With --prompt or --prompt-file the answer is
    printed as it is generated. Without, the model is served until Ctrl-C: OpenAI's and Anthropic's APIs, and a status page at the URL.
    """
    engine = replace(engine, load=replace(engine.load, collect_routing=collect_routing))
    if dry_run:
        refuse_together(model=engine.model is not None, like=like is not None)
        alone = prompt is not None or prompt_file is not None
        if not alone:
            engine = replace(engine, load=served(engine, serving, sampling)[0])
        show_dry_run(engine.for_one_request() if alone else engine, like, as_json)
        return None
    if like is not None:
        raise click.UsageError("--like: expected with --dry-run, as there is no file to load, found none")
    if prompt is None and prompt_file is None:
        refuse_named(
            named_flags(_PROMPT_ONLY), "with --prompt or --prompt-file only: without a prompt this command serves"
        )
        return serve_model(engine, serving, sampling)
    refuse_together(prompt=prompt is not None, prompt_file=prompt_file is not None)
    refuse_together(raw=not chat, system=system is not None)
    refuse_together(raw=not chat, **{_thinking_flag(thinking): thinking is not None})
    refuse_together(raw=not chat, chat_template_file=engine.load.chat_template is not None)
    refuse_together(json=as_json, **{"show_thinking" if show_thinking else "hide_thinking": show_thinking is not None})
    refuse_named(serving.given, "without a prompt only: it is about serving")
    text = read_prompt(prompt, prompt_file)
    with loaded_model(engine.for_one_request()) as luce:
        if thinking is not None and luce.template is not None and not luce.template.has_thinking_switch:
            flag = _thinking_flag(thinking).replace("_", "-")
            click.echo(f"warning: --{flag} ignored: this model's chat template has no such switch", err=True)
            thinking = None
        request = luce.request(
            text,
            system=system,
            chat=chat,
            thinking=thinking,
            max_tokens=max_tokens,
            stop=stop,
            hash_logits=as_json,
            sampling=sampling,
        )
        if max_tokens is None:
            request = replace(request, max_tokens=min(DEFAULT_MAX_TOKENS, request.check_context(luce.info.n_ctx)))
        show = sys.stdout.isatty() if show_thinking is None else show_thinking
        completion = answer(luce, request, None if as_json else AnswerPrinter(show))
        if as_json:
            click.echo(json.dumps(as_document(luce, completion), ensure_ascii=False))
        if not engine.quiet:
            click.echo(summary(completion), err=True)
    return None


def read_prompt(prompt: str | None, prompt_file: Path | None) -> str:
    """The prompt's text. A file's last line end is not part of it."""
    if prompt is not None and prompt != "-":
        flag, text = "--prompt", prompt
    elif prompt == "-" or str(prompt_file) == "-":
        flag, text = "standard input", _read_standard_input()
    else:
        assert prompt_file is not None
        flag, text = "--prompt-file", read_text_file(prompt_file, "--prompt-file")
    if flag != "--prompt":
        text = text.removesuffix("\n").removesuffix("\r")
    if not text:
        raise click.UsageError(f"{flag}: expected a prompt, found no text")
    return text


def answer(luce: Luce, request: GenerationRequest, printer: AnswerPrinter | None) -> Completion:
    """Generate, and show each piece of text when it is certain."""
    events: list[Event] = []
    stream = luce.run(request)
    try:
        for event in stream:
            events.append(event)
            if printer is not None:
                printer.write(event.content, event.reasoning)
    finally:
        stream.close()
        if printer is not None:
            printer.end()
    return Completion.collect(request, events)


def as_document(luce: Luce, completion: Completion) -> dict[str, Any]:
    """What `--json` prints."""
    return {
        "model": luce.info.name,
        "model_path": str(luce.info.path),
        "text": completion.text,
        "reasoning": completion.reasoning,
        "finish_reason": completion.finish_reason,
        "stop_string": completion.stop_string,
        "seed": completion.seed,
        "prompt_tokens": list(completion.prompt_tokens),
        "tokens": list(completion.tokens),
        "tokens_sha256": completion.tokens_sha256,
        "logits_sha256": completion.logits_sha256,
        "timings": completion.timings.as_dict(),
    }


def summary(completion: Completion) -> str:
    """One line about what it took."""
    timings = completion.timings
    parts = [
        f"prompt {timings.prompt_tokens} tokens, {timings.prefill_tokens_per_second:.1f} a second",
        f"answer {timings.completion_tokens} tokens, {timings.decode_tokens_per_second:.1f} a second",
        f"ended by {'its limit' if completion.finish_reason == 'length' else 'the model'}"
        if completion.stop_string is None
        else f"ended before {completion.stop_string!r}",
    ]
    if completion.seed is not None:
        parts.append(f"seed {completion.seed}")
    return "; ".join(parts)


def refuse_named(flags: tuple[str, ...], where: str) -> None:
    """Raise a usage error for flags that this use of the command has not."""
    if flags:
        raise click.UsageError(f"{', '.join(flags)}: expected {where}")


def _thinking_flag(thinking: bool | None) -> str:
    return "no_thinking" if thinking is False else "thinking"


def _read_standard_input() -> str:
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise click.UsageError(f"standard input: expected UTF-8 text, found {error}") from error
