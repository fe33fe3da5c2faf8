"""`luce top`: a running server, live: slots, rates, memory by device, what is kept. Reads /status/json and /props, nothing else."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import click
from rich.console import Console, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from cli.client import RefusedError, ServerClient, server_options
from cli.loading import Failure
from cli.panel import StatusPanel, rate, size_text

_SIZES = ("weights", "cache", "snapshots", "workspaces")


@click.command()
@server_options
@click.option(
    "--interval",
    type=click.FloatRange(0.1, 3600.0),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="Between looks.",
)
@click.option("--once", is_flag=True, help="Print one look as plain lines and end.")
def top(url: str, api_key: str | None, interval: float, once: bool) -> None:
    """Watch a running server: slots, tokens a second, memory by device, kept prompts. Ctrl-C ends it, not the server."""
    client = ServerClient(url, api_key)
    try:
        if once:
            for line in plain_lines(*look(client)):
                click.echo(line)
            return
        watch(client, interval, Console())
    except RefusedError as error:
        raise Failure(f"{url}: {error}") from error


def look(client: ServerClient) -> tuple[dict[str, Any], dict[str, Any]]:
    """(status, the memory section of props) of one moment."""
    return client.get("/status/json"), client.get("/props")["memory"]


def watch(client: ServerClient, interval_s: float, console: Console, looks: int | None = None) -> None:
    """Draw until interrupted, or `looks` times; in a pipe, plain lines."""
    if not console.is_terminal:
        _tell(client, interval_s, looks)
        return
    panel = StatusPanel(client.url)
    history: deque[float] = deque(maxlen=240)
    with Live(console=console, auto_refresh=False, screen=True, vertical_overflow="crop") as live:
        while looks is None or looks > 0:
            status, memory = look(client)
            history.append(status["rates"]["generated_tokens_per_second"])
            shown = panel.render(
                status,
                history,
                console.size,
                memory=memory_table(memory),
                footer="Ctrl-C ends this view, not the server",
            )
            live.update(shown, refresh=True)
            if looks is not None:
                looks -= 1
                if looks == 0:
                    return
            time.sleep(interval_s)


def _tell(client: ServerClient, interval_s: float, looks: int | None) -> None:
    while True:
        for line in plain_lines(*look(client)):
            click.echo(line)
        if looks is not None:
            looks -= 1
            if looks == 0:
                return
        click.echo()
        time.sleep(interval_s)


def memory_table(memory: Mapping[str, Any]) -> list[RenderableType]:
    """Memory by device, and a line about what is kept and about the process."""
    table = Table.grid(padding=(0, 2))
    table.add_row(*(Text(name, style="dim") for name in ("memory", *_SIZES, "free")))
    for device in memory["devices"]:
        sizes = [Text(size_text(device[f"{name}_bytes"])) for name in _SIZES]
        free = device["free_bytes"]
        table.add_row(Text(device["name"]), *sizes, Text("" if free is None else size_text(free)))
    lines: list[RenderableType] = [table] if memory["devices"] else [Text("memory released, or not known", style="dim")]
    kept = _kept(memory)
    if kept:
        lines.append(Text.assemble(("kept ", "dim"), kept))
    lines.append(Text.assemble(("process ", "dim"), _process(memory["process"])))
    return lines


def plain_lines(status: Mapping[str, Any], memory: Mapping[str, Any]) -> Iterator[str]:
    """The same facts, a line each, for scripts and pipes."""
    rates, totals = status["rates"], status["totals"]
    busy = sum(slot["state"] != "free" for slot in status["slots"])
    yield f"model: {status['model']}, {status['health']['status']}, up {status['uptime_s']:.0f} s"
    yield f"slots: {busy} of {len(status['slots'])} busy; queue {status['queue']['length']} of {status['queue']['limit']}"
    for slot in status["slots"]:
        if slot["state"] != "free":
            yield (
                f"slot {slot['slot']}: {slot['state']}, prompt {slot['prompt_done']} of {slot['prompt_total']}, "
                f"{slot['generated']} generated, {rate(slot['tokens_per_second'])} a second"
            )
    yield (
        f"rates: {rate(rates['generated_tokens_per_second'])} generated, {rate(rates['prompt_tokens_per_second'])} prompt "
        "tokens a second"
    )
    yield (
        f"tokens: {totals['prompt_tokens']} in, {totals['cached_prompt_tokens']} from the cache, "
        f"{totals['generated_tokens']} out"
    )
    for device in memory["devices"]:
        sizes = ", ".join(f"{name} {size_text(device[f'{name}_bytes'])}" for name in _SIZES)
        free = "" if device["free_bytes"] is None else f", free {size_text(device['free_bytes'])}"
        yield f"memory: {device['name']}: {sizes}{free}"
    if not memory["available"]:
        yield "memory: released, or not known"
    kept = _kept(memory)
    if kept:
        yield f"kept: {kept}"
    yield f"process: {_process(memory['process'])}"


def _kept(memory: Mapping[str, Any]) -> str:
    snapshots = memory["snapshots"]
    if snapshots is None:
        return ""
    used = size_text(snapshots["device_bytes"] + snapshots["host_bytes"])
    longest = max((entry["tokens"] for entry in snapshots["entries"]), default=0)
    more = f", the longest of {longest:,} tokens" if longest else ""
    return f"{snapshots['count']} prompts in {used} of {size_text(snapshots['budget_bytes'])}{more}"


def _process(process: Mapping[str, Any]) -> str:
    peak = process["peak_rss_bytes"]
    return f"{size_text(process['rss_bytes'])} resident" + ("" if peak is None else f", at most {size_text(peak)}")
