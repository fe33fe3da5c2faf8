"""`luce chat`: talk to a running server, answer after answer."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import click

from cli.client import RefusedError, ServerClient, server_options
from cli.console import AnswerPrinter
from cli.loading import Failure

HELP = """\
/reset          forget the conversation
/system TEXT    a system message for it, without TEXT none; begins anew
/help           this
/quit, Ctrl-D   end
Ctrl-C          stop an answer
A line that ends with \\ goes on in the next one."""


@dataclass(slots=True)
class Conversation:
    """The messages so far."""

    system: str | None = None
    messages: list[dict[str, str]] = field(default_factory=list)

    def with_question(self, text: str) -> list[dict[str, str]]:
        """What the server is sent."""
        head = [{"role": "system", "content": self.system}] if self.system else []
        return [*head, *self.messages, {"role": "user", "content": text}]

    def add(self, question: str, answer: str, reasoning: str) -> None:
        """Keep a turn. The template decides what becomes of the reasoning."""
        reply = {"role": "assistant", "content": answer}
        if reasoning:
            reply["reasoning_content"] = reasoning
        self.messages += [{"role": "user", "content": question}, reply]


@click.command()
@server_options
@click.option("--system", help="A system message.")
@click.option(
    "-n", "--max-tokens", type=click.IntRange(1), help="Tokens of an answer at most.  [default: the server's]"
)
@click.option("--temperature", type=click.FloatRange(0.0, 100.0), help="[default: the server's]")
@click.option("--seed", type=click.IntRange(0), help="Draw the same tokens again.")
@click.option("--thinking/--no-thinking", default=None, help="Reason before the answer.  [default: the template's]")
@click.option("--show-thinking/--hide-thinking", default=None, help="Print the reasoning.  [default: on a terminal]")
def chat(
    url: str,
    api_key: str | None,
    system: str | None,
    max_tokens: int | None,
    temperature: float | None,
    seed: int | None,
    thinking: bool | None,
    show_thinking: bool | None,
) -> None:
    """Talk to a running server. Each line is a message; /help says what else there is. Lines can also come from a pipe."""
    client = ServerClient(url, api_key)
    options = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed, "enable_thinking": thinking}
    options = {name: value for name, value in options.items() if value is not None}
    interactive = sys.stdin.isatty()
    show = sys.stdout.isatty() if show_thinking is None else show_thinking
    if interactive:
        click.echo(_greeting(client), err=True)
    conversation = Conversation(system)
    for line in _lines(interactive):
        if line.startswith("/"):
            if not _command(line, conversation):
                return
            continue
        try:
            _answer(client, conversation, line, options, show)
        except RefusedError as error:
            if not interactive:
                raise Failure(str(error)) from error
            click.echo(f"error: {error}", err=True)


def _greeting(client: ServerClient) -> str:
    try:
        model = client.get("/v1/models")["data"][0]["id"]
    except RefusedError as error:
        raise Failure(f"{client.url}: {error}") from error
    except (KeyError, IndexError, TypeError) as error:
        raise Failure(
            f"{client.url}: expected a list of models, found something else; is this a luce server?"
        ) from error
    return f"{model} at {client.url}; /help says what there is, Ctrl-D ends"


def _lines(interactive: bool) -> Iterator[str]:
    """Messages from standard input, without empty ones."""
    if interactive:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  # arrow keys and history in input()
    while True:
        parts: list[str] = []
        try:
            while True:
                part = _read_line(("> " if not parts else "… ") if interactive else None)
                parts.append(part.removesuffix("\\"))
                if not part.endswith("\\"):
                    break
        except KeyboardInterrupt:
            click.echo("\n(Ctrl-D ends)", err=True)
            continue
        except EOFError:
            if interactive:
                click.echo("", err=True)
            if not parts:
                return
        if text := "\n".join(parts).strip():
            yield text


def _read_line(prompt: str | None) -> str:
    if prompt is not None:
        return input(prompt)
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.rstrip("\r\n")


def _command(line: str, conversation: Conversation) -> bool:
    """Carry out a line that begins with a slash; False ends the chat."""
    name, _, rest = line.partition(" ")
    if name == "/quit":
        return False
    if name == "/reset":
        conversation.messages.clear()
        click.echo("forgotten", err=True)
    elif name == "/system":
        conversation.system = rest.strip() or None
        conversation.messages.clear()
        click.echo("system message set" if conversation.system else "no system message", err=True)
    elif name == "/help":
        click.echo(HELP, err=True)
    else:
        click.echo(f"{name}: no such command; /help lists them", err=True)
    return True


def _answer(
    client: ServerClient, conversation: Conversation, question: str, options: dict[str, Any], show_thinking: bool
) -> None:
    """Stream one answer. What came before Ctrl-C stays part of the conversation."""
    printer = AnswerPrinter(show_thinking)
    answer, reasoning = "", ""
    stream = client.chat({"messages": conversation.with_question(question), **options})
    try:
        for chunk in stream:
            for choice in chunk["choices"]:
                delta = choice["delta"]
                content, thought = delta.get("content") or "", delta.get("reasoning_content") or ""
                answer, reasoning = answer + content, reasoning + thought
                printer.write(content, thought)
    except KeyboardInterrupt:
        printer.end()
        click.echo("(stopped)", err=True)
    finally:
        stream.close()
        printer.end()
    if answer or reasoning:
        conversation.add(question, answer, reasoning)
