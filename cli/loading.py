"""Loads a model for a command, and turns what can go wrong into messages and exit codes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import click

from cli.console import LoadProgress
from cli.options import EngineFlags, as_flag
from pyluce.engine import RequestError
from pyluce.luce import Luce
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
        yield luce
    except (click.exceptions.Exit, click.Abort, BrokenPipeError):
        raise
    except (RequestError, TemplateError) as error:
        raise click.UsageError(as_flag(error)) from error
    except (RuntimeError, MemoryError, OSError) as error:
        raise Failure(str(error) or type(error).__name__) from error
    finally:
        luce.close()


def _load(engine: EngineFlags) -> Luce:
    with LoadProgress(engine.quiet) as progress:
        try:
            return Luce.load_with(engine.model, engine.load, progress)
        except OptionError as error:
            raise Failure(as_flag(error)) from error
        except (ValueError, RuntimeError, MemoryError, OSError) as error:
            raise Failure(f"cannot load the model: {error or type(error).__name__}") from error
