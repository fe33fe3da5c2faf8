"""`luce props`: how a running server runs."""

from __future__ import annotations

import json
import sys

import click
from rich.console import Console

from cli.client import RefusedError, ServerClient, server_options
from cli.loading import Failure


@click.command()
@server_options
def props(url: str, api_key: str | None) -> None:
    """Print what a running server says about itself, as JSON."""
    try:
        text = json.dumps(ServerClient(url, api_key).get("/props"), indent=2, ensure_ascii=False)
    except RefusedError as error:
        raise Failure(f"{url}: {error}") from error
    if sys.stdout.isatty():
        Console().print_json(text)
    else:
        click.echo(text)
