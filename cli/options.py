"""Flags that several commands share, each group handed to its command as one checked value."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from cli.placement import PLACEMENT_FLAGS, take_placement
from cli.profile import PROFILE_FLAG, from_profile
from pyluce.engine import RequestError, SamplingParams
from pyluce.engine.sampling import MAX_PENALTY_WINDOW, MAX_SEED, MIN_TEMPERATURE
from pyluce.options import (
    CHUNK_UNIT,
    DEFAULT_MAX_CTX,
    KV_TYPES,
    MAX_CHUNK,
    MAX_CONCURRENCY,
    MAX_CTX_LIMIT,
    MAX_QUEUE,
    MAX_THREADS,
    LoadOptions,
    OptionError,
)
from pyluce.profiles import Profile
from pyluce.spec.options import MAX_WIDTH, parse_sources

Command = Callable[..., Any]

prompts_option = click.option(
    "--prompts",
    "prompts_file",
    required=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help='JSON Lines: {"prompt": text}, {"messages": [...]} or {"tokens": [ids]} on each line.',
)

_LOAD = LoadOptions()
_SAMPLING = SamplingParams()


@dataclass(frozen=True, slots=True)
class EngineFlags:
    """Which model, how it is loaded, and whether standard error stays quiet. `one_slot`: no number of slots was asked for.

    `profile`: where some of it comes from.
    """

    model: Path | None
    load: LoadOptions
    quiet: bool
    one_slot: bool = False
    profile: Profile | None = None

    def for_one_request(self) -> EngineFlags:
        """For a command that runs a request at a time: a single slot and nothing kept, unless the user asked for more."""
        load = replace(self.load, max_concurrency=1) if self.one_slot else self.load
        return replace(self, load=replace(load, prefix_cache_mib=load.prefix_cache_mib or 0))


class ChunkRows(click.ParamType):  # type: ignore[type-arg]
    """Tokens, or `auto`, which is 0."""

    name = "auto|N"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if value == "auto":
            return 0
        try:
            rows = int(value)
        except ValueError:
            self.fail(f"expected auto or a number of tokens, found {value!r}", param, ctx)
        if not CHUNK_UNIT <= rows <= MAX_CHUNK:
            self.fail(f"expected auto or {CHUNK_UNIT} to {MAX_CHUNK}, found {rows}", param, ctx)
        return rows


class PrefixCacheSize(click.ParamType):  # type: ignore[type-arg]
    """MiB, or `auto`, which is None."""

    name = "auto|MIB"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | None:
        if value is None or value == "auto":
            return None
        try:
            return int(value)
        except ValueError:
            self.fail(f"expected auto or a number of MiB, found {value!r}", param, ctx)


class SpecSources(click.ParamType):  # type: ignore[type-arg]
    """Names separated by commas, or `off`, which is none of them."""

    name = "mtp,lookup|off"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        if isinstance(value, tuple):
            return value
        try:
            return parse_sources(value)
        except ValueError as error:
            self.fail(str(error).removeprefix("spec: "), param, ctx)


_ENGINE = (
    click.argument("model", required=False, type=click.Path(path_type=Path)),
    PROFILE_FLAG,
    click.option(
        "--max-ctx",
        type=click.IntRange(1, MAX_CTX_LIMIT),
        envvar="LUCE_MAX_CTX",
        show_envvar=True,
        help=f"Tokens of prompt and answer together.  [default: {DEFAULT_MAX_CTX}, or what the model was trained for]",
    ),
    click.option(
        "--device",
        default=_LOAD.device,
        show_default=True,
        metavar="cpu|cuda:N|hip:N",
        envvar="LUCE_DEVICE",
        show_envvar=True,
        help="Where the model runs; `luce doctor` lists what there is.",
    ),
    click.option(
        "--tune",
        default=_LOAD.tune,
        show_default=True,
        metavar="auto|off|FILE",
        envvar="LUCE_TUNE",
        show_envvar=True,
        help="Choices between a GPU's kernels that `luce tune` measured: auto takes what belongs to device and model.",
    ),
    *PLACEMENT_FLAGS,
    click.option(
        "--threads",
        type=click.IntRange(1, MAX_THREADS),
        envvar="LUCE_THREADS",
        show_envvar=True,
        help="CPU threads; not with a GPU.  [default: the CPUs that this process may use]",
    ),
    click.option(
        "--kv-type",
        type=click.Choice(KV_TYPES),
        default=_LOAD.kv_type,
        show_default=True,
        envvar="LUCE_KV_TYPE",
        show_envvar=True,
        help="Type of attention keys and values.",
    ),
    click.option(
        "--chunk",
        type=ChunkRows(),
        default=_LOAD.chunk,
        show_default=True,
        envvar="LUCE_CHUNK",
        show_envvar=True,
        help=f"Prompt tokens computed at once, a multiple of {CHUNK_UNIT}, or auto: as many as memory allows.",
    ),
    click.option(
        "--repack/--no-repack",
        default=_LOAD.repack,
        show_default=True,
        envvar="LUCE_REPACK",
        show_envvar=True,
        help="Keep a copy of matrices in the layout that this CPU multiplies fastest.",
    ),
    click.option(
        "--max-concurrency",
        type=click.IntRange(1, MAX_CONCURRENCY),
        envvar="LUCE_MAX_CONCURRENCY",
        show_envvar=True,
        help=f"Requests computed at once; memory for all is taken at the start.  [default: {_LOAD.max_concurrency}, or 1 for one prompt]",
    ),
    click.option(
        "--max-queue",
        type=click.IntRange(0, MAX_QUEUE),
        default=_LOAD.max_queue,
        show_default=True,
        envvar="LUCE_MAX_QUEUE",
        show_envvar=True,
        help="Requests that may wait; the next one is refused.",
    ),
    click.option(
        "--prefill-share",
        type=click.FloatRange(0.0, 1.0),
        default=_LOAD.prefill_share,
        show_default=True,
        envvar="LUCE_PREFILL_SHARE",
        show_envvar=True,
        help="How much of the time prompts may take while other requests decode; with 0 they wait until none does.",
    ),
    click.option(
        "--prefix-cache-mib",
        type=PrefixCacheSize(),
        default="auto",
        show_default=True,
        envvar="LUCE_PREFIX_CACHE_MIB",
        show_envvar=True,
        help="Memory for prompts that begin alike: MiB, 0 for none, or auto (three full contexts, at most a quarter of free memory).",
    ),
    click.option(
        "--idle-prefill",
        type=click.Choice(("on", "off")),
        default="on",
        show_default=True,
        envvar="LUCE_IDLE_PREFILL",
        show_envvar=True,
        help="While nobody waits, compute what the next turn of a conversation begins with.",
    ),
    click.option(
        "--spec",
        type=SpecSources(),
        metavar="mtp,lookup|off",
        envvar="LUCE_SPEC",
        show_envvar=True,
        help="Where drafts come from: the model's draft head, the text itself.  [default: mtp, if there is a head (on a CPU: if it can pay)]",
    ),
    click.option(
        "--verify-width",
        type=click.IntRange(0, MAX_WIDTH),
        default=_LOAD.verify_width,
        show_default=True,
        envvar="LUCE_VERIFY_WIDTH",
        show_envvar=True,
        help=f"Rows verified at once, the next token and its drafts: 0 adaptive, 1 no drafts, 2 to {MAX_WIDTH} fixed.",
    ),
    click.option(
        "--draft",
        type=click.Path(path_type=Path),
        envvar="LUCE_DRAFT",
        show_envvar=True,
        help="A file with the draft head.  [default: the model's own, or mtp-*.gguf beside it or in MTP/]",
    ),
    click.option(
        "--chat-template-file",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help="A chat template to use instead of the model's own.",
    ),
    click.option("-q", "--quiet", is_flag=True, help="Nothing on standard error but warnings and errors."),
)

_SAMPLERS = (
    click.option(
        "--temperature",
        type=click.FloatRange(0.0, 100.0),
        default=_SAMPLING.temperature,
        show_default=True,
        help=f"0 takes the most probable token, otherwise at least {MIN_TEMPERATURE}.",
    ),
    click.option(
        "--top-k",
        type=click.IntRange(0),
        default=_SAMPLING.top_k,
        show_default=True,
        help="Draw from the k most probable tokens; 0 is off.",
    ),
    click.option(
        "--top-p",
        type=click.FloatRange(0.0, 1.0),
        default=_SAMPLING.top_p,
        show_default=True,
        help="Draw from the smallest set with this probability.",
    ),
    click.option(
        "--min-p",
        type=click.FloatRange(0.0, 1.0),
        default=_SAMPLING.min_p,
        show_default=True,
        help="Draw from tokens at least this probable relative to the best one.",
    ),
    click.option(
        "--repeat-penalty",
        type=click.FloatRange(0.0, 100.0, min_open=True),
        default=_SAMPLING.repeat_penalty,
        show_default=True,
        help="Make tokens of the last stretch less probable; 1 is off.",
    ),
    click.option(
        "--frequency-penalty",
        type=click.FloatRange(-2.0, 2.0),
        default=_SAMPLING.frequency_penalty,
        show_default=True,
        help="Lower a token once for each time it was generated.",
    ),
    click.option(
        "--presence-penalty",
        type=click.FloatRange(-2.0, 2.0),
        default=_SAMPLING.presence_penalty,
        show_default=True,
        help="Lower a token that was generated.",
    ),
    click.option(
        "--penalty-window",
        type=click.IntRange(0, MAX_PENALTY_WINDOW),
        default=_SAMPLING.penalty_window,
        show_default=True,
        help="How many tokens the penalties look back; 0 is off.",
    ),
    click.option(
        "--seed",
        type=click.IntRange(0, MAX_SEED),
        help="Draw the same tokens again.  [default: a new one each time, shown at the end]",
    ),
)


def engine_options(command: Command) -> Command:
    """Add the MODEL argument and every flag that says how it is loaded; the command gets `engine: EngineFlags`."""

    @functools.wraps(command)
    def with_engine(
        *,
        model: Path | None,
        max_ctx: int | None,
        device: str,
        tune: str,
        threads: int | None,
        kv_type: str,
        chunk: int,
        repack: bool,
        max_concurrency: int | None,
        max_queue: int,
        prefill_share: float,
        prefix_cache_mib: int | None,
        idle_prefill: str,
        spec: tuple[str, ...] | None,
        verify_width: int,
        draft: Path | None,
        chat_template_file: Path | None,
        quiet: bool,
        profile: Profile | None,
        **rest: Any,
    ) -> Any:
        one_slot = max_concurrency is None or from_profile("max_concurrency")
        template = read_text_file(chat_template_file, "--chat-template-file") if chat_template_file else None
        try:
            load = LoadOptions(
                max_ctx=max_ctx,
                device=device,
                tune=tune,
                threads=threads,
                kv_type=kv_type,
                chunk=chunk,
                repack=repack,
                chat_template=template,
                max_concurrency=max_concurrency or _LOAD.max_concurrency,
                max_queue=max_queue,
                prefill_share=prefill_share,
                prefix_cache_mib=prefix_cache_mib,
                idle_prefill=idle_prefill == "on",
                spec=spec,
                verify_width=verify_width,
                draft=draft,
                **take_placement(rest),
            )
        except OptionError as error:
            raise click.UsageError(as_flag(error)) from error
        return command(engine=EngineFlags(model, load, quiet, one_slot, profile), **rest)

    return _with_flags(with_engine, _ENGINE)


def sampling_options(command: Command) -> Command:
    """Add the flags that say how tokens are chosen; the command gets `sampling: SamplingParams`."""

    @functools.wraps(command)
    def with_sampling(**given: Any) -> Any:
        names = [name for name in SamplingParams.__dataclass_fields__ if name in given]
        try:
            sampling = SamplingParams(**{name: given.pop(name) for name in names})
        except RequestError as error:
            raise click.UsageError(as_flag(error)) from error
        return command(sampling=sampling, **given)

    return _with_flags(with_sampling, _SAMPLERS)


def as_flag(error: Exception) -> str:
    """A message that begins with a field's name, with the flag's name instead: `max_ctx: ...` is `--max-ctx: ...`."""
    name, separator, rest = str(error).partition(":")
    return f"--{name.replace('_', '-')}:{rest}" if separator and name.isidentifier() else str(error)


def read_text_file(path: Path, flag: str) -> str:
    """The text of a UTF-8 file named by a flag."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise click.UsageError(f"{flag}: {path} cannot be read as UTF-8 text: {error}") from error


def refuse_together(**given: bool) -> None:
    """Raise a usage error naming the flags when more than one was given; keywords are flag names with underscores."""
    names = [f"--{name.replace('_', '-')}" for name, present in given.items() if present]
    if len(names) > 1:
        raise click.UsageError(f"{' and '.join(names)} contradict each other: give one of them")


def _with_flags(command: Command, flags: tuple[Callable[[Command], Command], ...]) -> Command:
    for flag in reversed(flags):
        command = flag(command)
    return command
