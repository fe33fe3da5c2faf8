"""A running server, as `luce chat` and `luce props` talk to it."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterator
from typing import Any

import click
import requests

from cli.loading import Failure

DEFAULT_URL = "http://127.0.0.1:8080"
CONNECT_S = 10.0
READ_S = 120.0  # a waiting stream gets a comment every few seconds


class RefusedError(Exception):
    """The server answered, but not with what was asked for; the message is its own."""


class ServerClient:
    """One server and the key for it. Raises Failure when it cannot be reached and RefusedError with what it says."""

    def __init__(self, url: str, api_key: str | None) -> None:
        self.url = url.rstrip("/")
        self._session = requests.Session()
        self._session.trust_env = False  # a proxy for the web is none for this machine's own server
        if api_key:
            self._session.headers["Authorization"] = f"Bearer {api_key}"

    def get(self, path: str) -> Any:
        """The JSON at `path`."""
        with self._send("GET", path) as response:
            try:
                return response.json()
            except ValueError as error:
                raise Failure(
                    f"{self.url}{path}: expected JSON, found something else; is this a luce server?"
                ) from error

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """The JSON that answers `body`, however long that takes."""
        with self._send("POST", path, body, read_s=None) as response:
            return response.json()

    def chat(self, body: dict[str, Any]) -> Generator[dict[str, Any], None, None]:
        """The chunks of a streamed answer to `body`. Closing the iterator ends the request."""
        with self._send("POST", "/v1/chat/completions", {**body, "stream": True}) as response:
            try:
                yield from _chunks(response)
            except requests.RequestException as error:
                raise Failure(f"{self.url}: the connection ended before the answer did: {error}") from error

    def _send(
        self, method: str, path: str, body: dict[str, Any] | None = None, read_s: float | None = READ_S
    ) -> requests.Response:
        try:
            response = self._session.request(
                method, self.url + path, json=body, stream=True, timeout=(CONNECT_S, read_s), allow_redirects=False
            )
        except requests.ConnectionError as error:
            raise Failure(
                f"{self.url}: no server answers there; start one with `luce run`, or name it with --url"
            ) from error
        except (requests.RequestException, ValueError) as error:
            raise Failure(f"{self.url}: {error}") from error
        if response.status_code == 200:
            return response
        with response:
            raise RefusedError(_refusal(response))


def server_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add --url and --api-key."""
    url = click.option(
        "--url", default=DEFAULT_URL, show_default=True, envvar="LUCE_URL", show_envvar=True, help="The server."
    )
    key = click.option("--api-key", envvar="LUCE_API_KEY", show_envvar=True, help="The server's API key.")
    return url(key(command))


def _chunks(response: requests.Response) -> Iterator[dict[str, Any]]:
    """The data of server-sent events as JSON, until `[DONE]`."""
    held = b""
    for piece in response.iter_content(chunk_size=None):
        *blocks, held = (held + piece).split(b"\n\n")
        for block in blocks:
            data = b"".join(line[5:].strip() for line in block.split(b"\n") if line.startswith(b"data:"))
            if data == b"[DONE]":
                return
            if not data:
                continue
            chunk = json.loads(data)
            if "error" in chunk:
                raise RefusedError(str(chunk["error"].get("message", chunk["error"])))
            yield chunk
    raise RefusedError("the server ended the answer early")


def _refusal(response: requests.Response) -> str:
    try:
        message = str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = f"expected an answer of a luce server, found status {response.status_code}"
    after = response.headers.get("Retry-After")
    return f"{message} (try again in {after} s)" if after else message
