"""`luce park` and `luce unpark`: a running server gives its model's memory back, and loads it again."""

from __future__ import annotations

from typing import Any

import click

from cli.client import RefusedError, ServerClient, server_options
from cli.loading import Failure


@click.command()
@server_options
@click.option(
    "--discard", is_flag=True, help="Let the prefix cache go where the server has no --cache-dir to keep it in."
)
def park(url: str, api_key: str | None, discard: bool) -> None:
    """Release the memory of a running server's model: weights, state, caches.

    Running requests wait and kept prompts stay, in the server's --cache-dir; new requests are refused until `luce unpark`.
    """
    answer = _post(url, api_key, "/park", {"discard": discard})
    click.echo("parked" if answer["changed"] else "parked already")


@click.command()
@server_options
def unpark(url: str, api_key: str | None) -> None:
    """Load a parked server's model again. Returns when it is there."""
    answer = _post(url, api_key, "/unpark", {})
    click.echo("loaded" if answer["changed"] else "loaded already")


def _post(url: str, api_key: str | None, path: str, body: dict[str, Any]) -> Any:
    try:
        return ServerClient(url, api_key).post(path, body)
    except RefusedError as error:
        raise Failure(f"{url}: {error}") from error
