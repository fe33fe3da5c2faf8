"""`luce hash`: what a set of prompts computes, as hashes to write down or to compare with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from cli.loading import Failure, loaded_model
from cli.options import EngineFlags, engine_options, prompts_option, refuse_together
from pyluce.engine import GenerationRequest, RequestError
from pyluce.luce import Completion, Luce
from pyluce.run_hashes import HashFileError, HashReport, PromptHash, PromptLine, first_difference, read_prompts
from pyluce.text import TemplateError

DEFAULT_TOKENS = 32


@click.command("hash")
@engine_options
@prompts_option
@click.option(
    "-n",
    "--max-tokens",
    type=click.IntRange(1),
    help=f"Tokens per prompt.  [default: {DEFAULT_TOKENS}, or as EXPECTED]",
)
@click.option("--write", type=click.Path(dir_okay=False, path_type=Path), help="Write the hashes to this JSON file.")
@click.option(
    "--check",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Compare with the hashes in this JSON file; exit 1 naming the first difference.",
)
@click.option(
    "--chat/--raw", default=True, help="Put a prompt into the chat template (default), or take it as plain text."
)
@click.option(
    "--ignore-end", is_flag=True, help="Go on after the model's end token, so that every prompt runs -n steps."
)
def hash_command(
    engine: EngineFlags,
    prompts_file: Path,
    max_tokens: int | None,
    write: Path | None,
    check: Path | None,
    chat: bool,
    ignore_end: bool,
) -> None:
    """Answer every prompt greedily with MODEL and print a SHA-256 of its token ids and of its logits, and one total."""
    refuse_together(write=write is not None, check=check is not None)
    try:
        prompts = read_prompts(prompts_file)
        expected = HashReport.read(check) if check is not None else None
    except HashFileError as error:
        raise click.UsageError(str(error)) from error
    n = max_tokens if max_tokens is not None else expected.n if expected is not None else DEFAULT_TOKENS
    if expected is not None and (expected.n, len(expected.prompts)) != (n, len(prompts)):
        raise click.UsageError(
            f"--check: {check} holds {len(expected.prompts)} prompts of {expected.n} tokens, found {len(prompts)} of {n}"
        )
    with loaded_model(engine.for_one_request()) as luce:
        requests = [make_request(luce, line, n, chat, ignore_end) for line in prompts]
        report = HashReport(n, luce.info.name, settings(engine, luce), tuple(run_all(luce, requests)))
    show(report)
    if write is not None:
        try:
            report.write(write)
        except OSError as error:
            raise Failure(f"--write: {write} cannot be written: {error.strerror or error}") from error
    if expected is not None:
        difference = first_difference(expected, report)
        if difference is not None:
            raise Failure(f"{difference} (expected {check})")
        click.echo(f"equal to {check}")


def make_request(luce: Luce, line: PromptLine, n: int, chat: bool, ignore_end: bool) -> GenerationRequest:
    """The request of one line; what is wrong with it is said with its place."""
    try:
        options = {**line.options, "chat": chat} if "prompt" in line.options else line.options
        return luce.request(**options, max_tokens=n, hash_logits=True, ignore_end=ignore_end)
    except (RequestError, TemplateError) as error:
        raise click.UsageError(f"{line.where}: {error}") from error


def run_all(luce: Luce, requests: list[GenerationRequest]) -> list[PromptHash]:
    """Answer every request, with the progress on standard error when that is a terminal."""
    hashes = []
    with Console(stderr=True).status("") as status:
        for index, request in enumerate(requests):
            status.update(f"prompt {index + 1} of {len(requests)}")
            hashes.append(PromptHash.of(Completion.collect(request, luce.run(request))))
    return hashes


def settings(engine: EngineFlags, luce: Luce) -> dict[str, Any]:
    """What was run, for the reader of the file."""
    load = engine.load
    return {
        "max_ctx": luce.info.n_ctx,
        "device": load.device,
        "threads": luce.info.threads,
        "kv_type": load.kv_type,
        "chunk": load.chunk,
        "repack": load.repack,
    }


def show(report: HashReport) -> None:
    """Print the hashes: a table on a terminal, lines with whole hashes in a pipe."""
    console = Console()
    if not console.is_terminal:
        for index, prompt in enumerate(report.prompts):
            click.echo(
                f"prompt {index}: tokens {prompt.tokens_sha256} logits {prompt.logits_sha256} n {len(prompt.tokens)}"
            )
    else:
        table = Table("prompt", "tokens", "SHA-256 of token ids", "SHA-256 of logits", title=report.model)
        for index, prompt in enumerate(report.prompts):
            table.add_row(str(index), str(len(prompt.tokens)), prompt.tokens_sha256[:24], prompt.logits_sha256[:24])
        console.print(table)
    click.echo(f"total: {report.total_sha256}")
