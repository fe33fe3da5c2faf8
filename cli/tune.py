"""`luce tune`: measure which of a GPU's kernels is the fastest for each product of a model, and keep the choices in a file."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import click

from cli.loading import Failure
from pyluce.memory.facts import read_facts
from pyluce.native import NativeError
from pyluce.native.backend import Backend
from pyluce.native.devices import parse_device
from pyluce.native.tune import DeviceChoices
from pyluce.options import CHUNK_UNIT, DEFAULT_MODEL, MAX_CHUNK
from pyluce.tuning import Entry, TuneTable, model_products
from pyluce.tuning.apply import default_path, this_site
from pyluce.tuning.measure import ProductTimer, measure
from pyluce.weights import ModelError

NOTHING = "nothing to tune: the CPU has one kernel for each product; give a GPU with --device cuda:N or hip:N"


@click.command()
@click.argument("model", required=False, type=click.Path(path_type=Path))
@click.option(
    "--device",
    default="cpu",
    show_default=True,
    metavar="cpu|cuda:N|hip:N",
    envvar="LUCE_DEVICE",
    show_envvar=True,
    help="The GPU to measure; nothing else should run on it meanwhile.",
)
@click.option(
    "--chunk",
    type=click.IntRange(CHUNK_UNIT, MAX_CHUNK),
    default=512,
    show_default=True,
    help="The largest chunk of a prompt to measure, in tokens.",
)
@click.option(
    "--output",
    "-o",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Where the table goes.  [default: where `--tune auto` looks]",
)
@click.option("--quiet", "-q", is_flag=True, help="Say nothing while measuring.")
def tune(model: Path | None, device: str, chunk: int, output: Path | None, quiet: bool) -> None:
    """Measure the choices that a GPU has for the products of MODEL, whose header alone is read, and write a table of the best.

    `luce run --tune auto`, the default, uses it with this device, these libraries and models of the same shapes.
    """
    try:
        backend, _ = parse_device(device)
    except ValueError as error:
        raise click.UsageError(f"--device: {error}") from error
    if backend == "cpu":
        click.echo(NOTHING)
        return
    if backend == "rpc":
        raise click.UsageError(f"--device: expected a GPU of this machine, found {device!r}: tune it where it is")
    try:
        table, path = _measure(model or DEFAULT_MODEL, device, chunk, output, quiet)
        table.save(path)
    except (ModelError, NativeError, MemoryError, OSError) as error:
        raise Failure(str(error) or type(error).__name__) from error
    for entry in table.entries:
        click.echo(describe(entry))
    count = len(table.entries)
    click.echo(
        f"{count} {'choice' if count == 1 else 'choices'} better than the default, digest {table.digest}: {path}"
    )


def _measure(model: Path, device: str, chunk: int, output: Path | None, quiet: bool) -> tuple[TuneTable, Path]:
    facts = read_facts(model)
    products = model_products(facts.hparams, facts.tensors.values())
    choices, site = DeviceChoices(device), this_site(device)

    def progress(done: int, total: int, what: str) -> None:
        if not quiet:
            click.echo(f"{done + 1} of {total}: {what}", err=True)

    with Backend(device) as backend:
        timer = partial(ProductTimer, backend)
        table = measure(products, choices, timer, site, model=facts.name, chunk=chunk, progress=progress)
    return table, output or default_path(site, products)


def describe(entry: Entry) -> str:
    """What was chosen, with the times of the default and of the choice."""
    times = entry.microseconds
    rows = sorted({int(name.partition(":")[0]) for name in times})
    pairs = (f"{n} rows {times[f'{n}:default']:g} to {times[f'{n}:{entry.value}']:g} us" for n in rows)
    return f"{entry}: {entry.value}; {', '.join(pairs)}"
