"""`luce doctor --selftest`: run every op on a device and show how far each is from float64."""

from __future__ import annotations

import json
from dataclasses import asdict

import click
from rich.console import Console
from rich.table import Table

from pyluce.native import NativeError
from pyluce.native.devices import list_devices
from pyluce.selftest.run import Result, run


def selftest(device: str, as_json: bool, quick: bool) -> int:
    """Run the self-test and print it: 1 when a test failed, else 0. Raises ClickException when there is no such device."""
    console = Console(stderr=True)
    results: list[Result] = []
    try:
        with console.status("") as status:
            for result in run(device, model_sizes=not quick):
                results.append(result)
                status.update(f"{len(results)} tests, the last: {result.op}, {result.shape}")
        about = next((info for info in list_devices() if info.device == device), None)
    except ValueError as error:
        raise click.UsageError(f"--device: {error}") from error
    except NativeError as error:
        raise click.ClickException(str(error)) from error
    failed = [result for result in results if not result.ok]
    if as_json:
        click.echo(json.dumps({"device": device, "failed": len(failed), "results": [document(r) for r in results]}))
    else:
        name = ", ".join(filter(None, (about.description, about.architecture))) if about else device
        show(f"{device}: {name}", results)
    return 1 if failed else 0


def document(result: Result) -> dict[str, object]:
    """A result for JSON, which has no infinity."""
    values = asdict(result)
    return values | {"error": result.error if result.error < float("inf") else None}


def verdict(result: Result) -> str:
    """One word."""
    return "refused" if result.refused else "ok" if result.ok else "FAILED"


def show(title: str, results: list[Result]) -> None:
    """A table on a terminal, lines in a pipe; what failed and why comes last."""
    console = Console(highlight=False)
    table = Table("op", "shape", "largest error", "bound", "result", "kernels", title=title)
    if not console.is_terminal:
        click.echo(title)
    for result in results:
        row = (
            result.op,
            result.shape,
            f"{result.error:.1e}",
            f"{result.bound:.0e}",
            verdict(result),
            ", ".join(result.paths),
        )
        if console.is_terminal:
            table.add_row(*row, style="red" if not result.ok else "dim" if result.refused else None)
        else:
            click.echo(f"{row[4]}: {row[0]}, {row[1]}: {row[2]} of {row[3]}{f' by {row[5]}' if row[5] else ''}")
    if console.is_terminal:
        console.print(table)
    for result in results:
        if not result.ok:
            click.echo(f"FAILED: {result.op}, {result.shape}: {result.note or f'error {result.error:.1e}'}")
    failed, refused = sum(not r.ok for r in results), sum(r.refused for r in results)
    click.echo(f"{len(results)} tests on {title}: {failed} failed, {refused} refused by the device")
