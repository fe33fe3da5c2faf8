"""`luce run` without a prompt: serve the model over HTTP until Ctrl-C."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from cli.loading import Failure, loaded_model
from cli.options import EngineFlags, as_flag
from pyluce.engine import SamplingParams
from pyluce.options import DEFAULT_CACHE_DIR_MIB, LoadOptions, OptionError

if TYPE_CHECKING:
    from pyluce.server import ServerSettings

Command = Callable[..., Any]

EXIT_FORCED = 130
_MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class ServeFlags:
    """How a server is set up; `given` are the flags that the command line names, for refusing them elsewhere."""

    host: str
    port: int
    model_name: str | None
    api_key: str | None
    cors_origin: tuple[str, ...]
    max_body_mib: int
    default_max_tokens: int
    shutdown_grace: float
    cache_dir: Path | None
    cache_dir_mib: int | None
    park_after: float | None
    unpark_on_request: bool
    park_reset: str
    given: tuple[str, ...]


_FLAGS = (
    click.option("--host", default="127.0.0.1", show_default=True, envvar="LUCE_HOST", show_envvar=True,
                 help="Serve: address to listen on; 0.0.0.0 lets other machines in."),
    click.option("--port", type=click.IntRange(0, 65535), default=8080, show_default=True, envvar="LUCE_PORT", show_envvar=True,
                 help="Serve: port to listen on; 0 takes a free one."),
    click.option("--model-name", envvar="LUCE_MODEL_NAME", show_envvar=True,
                 help="Serve: the model's name in answers.  [default: the one in the file]"),
    click.option("--api-key", envvar="LUCE_API_KEY", show_envvar=True,
                 help="Serve: what clients must send as `Authorization: Bearer KEY`."),
    click.option("--cors-origin", multiple=True, metavar="ORIGIN", envvar="LUCE_CORS_ORIGIN", show_envvar=True,
                 help="Serve: a web origin whose pages may read answers; can be repeated; * is all."),
    click.option("--max-body-mib", type=click.IntRange(1, 4096), default=32, show_default=True, envvar="LUCE_MAX_BODY_MIB",
                 show_envvar=True, help="Serve: larger request bodies are refused."),
    click.option("--default-max-tokens", type=click.IntRange(1), default=16000, show_default=True,
                 help="Serve: tokens of an answer whose request names no limit, or what fits."),
    click.option("--shutdown-grace", type=click.FloatRange(0.0), default=10.0, show_default=True, metavar="SECONDS",
                 help="Serve: how long running requests may go on after Ctrl-C."),
    click.option("--cache-dir", type=click.Path(file_okay=False, path_type=Path), envvar="LUCE_CACHE_DIR", show_envvar=True,
                 help="Serve: a folder where kept prompts survive a restart and a park."),
    click.option("--cache-dir-mib", type=click.IntRange(1), envvar="LUCE_CACHE_DIR_MIB", show_envvar=True,
                 help=f"Serve: size of the files in it at most.  [default: {DEFAULT_CACHE_DIR_MIB}]"),
    click.option("--park-after", type=click.FloatRange(0.0, min_open=True), metavar="SECONDS", envvar="LUCE_PARK_AFTER",
                 show_envvar=True, help="Serve: release the model's memory when nothing was to do for so long."),
    click.option("--unpark-on-request", is_flag=True, envvar="LUCE_UNPARK_ON_REQUEST", show_envvar=True,
                 help="Serve: a request loads a parked model again, instead of being refused."),
    click.option("--park-reset", type=click.Choice(("auto", "on", "off")), default="auto", show_default=True, envvar="LUCE_PARK_RESET",
                 show_envvar=True, help="Serve: a park destroys the GPU's context too, so that all its memory is free; auto: with cuda."),
)  # fmt: skip

_NAMES = tuple(name for name in ServeFlags.__dataclass_fields__ if name != "given")


def serve_options(command: Command) -> Command:
    """Add the flags of a server; the command gets `serving: ServeFlags`."""

    @functools.wraps(command)
    def with_serving(**given: Any) -> Any:
        values = {name: given.pop(name) for name in _NAMES}
        return command(serving=ServeFlags(**values, given=named_flags(_NAMES)), **given)

    for flag in reversed(_FLAGS):
        with_serving = flag(with_serving)
    return with_serving


def named_flags(names: tuple[str, ...]) -> tuple[str, ...]:
    """Those parameters that the command line itself names, as flags: a variable of the environment may be there for other runs."""
    context = click.get_current_context()
    return tuple(
        _spelling(parameter, context.params.get(parameter.name or ""))
        for parameter in context.command.params
        if parameter.name in names and context.get_parameter_source(parameter.name) is ParameterSource.COMMANDLINE
    )


def _spelling(parameter: click.Parameter, value: object) -> str:
    return (parameter.secondary_opts if value is False and parameter.secondary_opts else parameter.opts)[-1]


def served(engine: EngineFlags, flags: ServeFlags, sampling: SamplingParams) -> tuple[LoadOptions, ServerSettings]:
    """What is loaded and how it is served. A usage error for what does not go together."""
    from pyluce.server.settings import ServerSettings, SettingError

    try:
        load = replace(
            engine.load,
            cache_dir=flags.cache_dir,
            cache_dir_mib=flags.cache_dir_mib,
            park_after=flags.park_after,
            unpark_on_request=flags.unpark_on_request,
            park_reset=flags.park_reset == "on"
            or (flags.park_reset == "auto" and engine.load.device.startswith("cuda")),
        )
        settings = ServerSettings(
            host=flags.host,
            port=flags.port,
            model_alias=flags.model_name,
            api_key=flags.api_key,
            cors_origins=flags.cors_origin,
            max_body_bytes=flags.max_body_mib * _MIB,
            default_max_tokens=flags.default_max_tokens,
            shutdown_grace_s=flags.shutdown_grace,
            sampling=sampling,
        )
    except (SettingError, OptionError) as error:
        raise click.UsageError(as_flag(error)) from error
    return load, settings


def serve_model(engine: EngineFlags, flags: ServeFlags, sampling: SamplingParams) -> int:
    """Load the model and serve it. Returns the exit code: 0 after Ctrl-C or SIGTERM, 130 after a second Ctrl-C, which ends running requests."""
    from cli.status_view import watching
    from pyluce.server import LuceServer, create_app
    from pyluce.service import LuceService

    load, settings = served(engine, flags, sampling)
    _check_port(flags.host, flags.port)
    with loaded_model(replace(engine, load=load)) as luce, LuceService(luce, load) as service:
        app = create_app(service, settings)
        with _usable_address():
            server = LuceServer(app, settings)
        with watching(server, app.state.luce, quiet=engine.quiet):
            server.run()
    return EXIT_FORCED if server.hurried else 0


def _check_port(host: str, port: int) -> None:
    """Fail now, not after minutes of loading, when the port is taken. Nobody is answered before the model is there."""
    from pyluce.server.serve import bind

    with _usable_address():
        bind(host, port).close()


@contextmanager
def _usable_address() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise Failure(error.strerror or str(error)) from error
