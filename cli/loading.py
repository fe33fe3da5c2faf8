"""Loads a model for a command, and turns what can go wrong into messages and exit codes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import click

from cli.console import LoadProgress
from cli.options import EngineFlags, as_flag
from cli.profile import from_profile
from pyluce.engine import RequestError
from pyluce.luce import Luce
from pyluce.memory.link import link_of_report, link_text
from pyluce.memory.text import streams_text
from pyluce.native import NativeError
from pyluce.native.devices import find_device, list_devices
from pyluce.options import OptionError
from pyluce.text import TemplateError


class Failure(click.ClickException):
    """The command line was fine, but loading or running failed: exit code 1."""

    exit_code = 1


@contextmanager
def loaded_model(engine: EngineFlags) -> Iterator[Luce]:
    """A loaded model, closed at the end. A load or run that fails exits with 1, a request that cannot be used with 2."""
    luce = _load(engine)
    try:
        for warning in luce.info.warnings:
            click.echo(f"warning: {warning}", err=True)
        if engine.load.expert_device is not None and not engine.quiet:
            _show_link(luce)
        yield luce
    except (click.exceptions.Exit, click.Abort, BrokenPipeError):
        raise
    except (RequestError, TemplateError) as error:
        raise click.UsageError(as_flag(error)) from error
    except (RuntimeError, MemoryError, OSError) as error:
        raise Failure(str(error) or type(error).__name__) from error
    finally:
        luce.close()


def _show_link(luce: Luce) -> None:
    """What was measured between two devices when the model was loaded."""
    experts = luce.memory_report().get("experts")
    if isinstance(experts, Mapping) and "link" in experts:
        streams = streams_text(experts["prompt_streams"])
        click.echo(f"link to {experts['device']}: {link_text(link_of_report(experts['link']))}; {streams}", err=True)


def check_devices(engine: EngineFlags) -> None:
    """Fail, saying who asks for it and what there is, unless the devices of the flags are in this machine."""
    for name, device in (("device", engine.load.device), ("expert_device", engine.load.expert_device)):
        if device is None or device == "cpu":
            continue
        try:
            find_device(device)
        except (NativeError, ValueError) as error:
            asks = f"--{name.replace('_', '-')}"
            if engine.profile is not None and from_profile(name):
                asks = f"{engine.profile.where(name)}: {name}"
            raise Failure(
                f"{asks}: expected {device}, found {', '.join(_devices_here())} in this machine; {error}"
            ) from error


def _devices_here() -> list[str]:
    try:
        return [info.device for info in list_devices() if info.device is not None] or ["none"]
    except NativeError:
        return ["no libraries that could look"]


def _load(engine: EngineFlags) -> Luce:
    check_devices(engine)
    with LoadProgress(engine.quiet) as progress:
        try:
            return Luce.load_with(engine.model, engine.load, progress)
        except OptionError as error:
            raise Failure(as_flag(error)) from error
        except (ValueError, RuntimeError, MemoryError, OSError) as error:
            raise Failure(f"cannot load the model: {error or type(error).__name__}") from error
