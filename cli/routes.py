"""`luce routes`: count which experts prompts pick, and say what a hot set would hold of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource
from rich.console import Console
from rich.table import Table

from cli.hash import make_request
from cli.loading import Failure, loaded_model
from cli.options import EngineFlags, engine_options, prompts_option, refuse_together
from pyluce.engine import FinishEvent
from pyluce.memory.experts import expert_bytes, route_shape
from pyluce.memory.facts import ModelFacts, load_published, read_facts
from pyluce.placement.counts import Counts, RouteShape, coverage
from pyluce.placement.hot import DEFAULT_BUDGET_MIB, HotSet, choose_hot
from pyluce.placement.options import MAX_BUDGET_MIB
from pyluce.placement.table_file import RoutesError, read_routes
from pyluce.run_hashes import HashFileError, read_prompts
from pyluce.weights import ModelError
from pyluce.weights.hparams import ARCHITECTURE

DEFAULT_TOKENS = 64
MOST_COLUMNS = 6


@click.group()
def routes() -> None:
    """Count which experts a model picks, and show what a hot set would hold of that."""


@routes.command()
@engine_options
@prompts_option
@click.option(
    "-o", "--output", required=True, type=click.Path(dir_okay=False, path_type=Path), help="The routing table to write."
)
@click.option("--add", is_flag=True, help="Go on with the counts of a table that is there.")
@click.option(
    "-n", "--max-tokens", type=click.IntRange(1), default=DEFAULT_TOKENS, show_default=True, help="Tokens per prompt."
)
@click.option(
    "--chat/--raw", default=True, help="Put a prompt into the chat template (default), or take it as plain text."
)
def collect(engine: EngineFlags, prompts_file: Path, output: Path, add: bool, max_tokens: int, chat: bool) -> None:
    """Answer every prompt greedily with MODEL and count the experts that its rows pick, prompts and answers.

    Without drafts, unless --spec or --verify-width asks for them: how many are made depends on time, and their rows count too.
    """
    if output.exists() and not add:
        raise click.UsageError(f"--output: expected no file there, found {output}; give --add to go on with its counts")
    try:
        prompts = read_prompts(prompts_file)
    except HashFileError as error:
        raise click.UsageError(str(error)) from error
    source = click.get_current_context().get_parameter_source
    asked = any(source(name) is not ParameterSource.DEFAULT for name in ("spec", "verify_width"))
    load = replace(engine.load, collect_routing=output, verify_width=engine.load.verify_width if asked else 1)
    n_tokens = 0
    with loaded_model(replace(engine, load=load).for_one_request()) as luce, Console(stderr=True).status("") as status:
        requests = [make_request(luce, line, max_tokens, chat, ignore_end=False) for line in prompts]
        for index, request in enumerate(requests):
            status.update(f"prompt {index + 1} of {len(requests)}")
            for event in luce.run(request):
                if isinstance(event, FinishEvent):
                    n_tokens += event.timings.prompt_tokens + event.timings.completion_tokens
    shape, counts = _read(output)
    click.echo(f"{output}: {len(requests)} prompts, {n_tokens} tokens; {shape}")
    _show_coverage(shape, counts)


@routes.command()
@click.argument("table", type=click.Path(path_type=Path))
@click.option("--model", type=click.Path(path_type=Path), help="A model: say which experts a budget would hold.")
@click.option("--like", metavar="NAME", help="A published quant instead of a model.")
@click.option(
    "--expert-budget-mib",
    type=click.IntRange(0, MAX_BUDGET_MIB),
    envvar="LUCE_EXPERT_BUDGET_MB",
    show_envvar=True,
    help=f"Memory for hot experts; with a model.  [default: {DEFAULT_BUDGET_MIB}]",
)
@click.option(
    "--plot",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write a plot: .svg, .png or .pdf (needs matplotlib).",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def show(
    table: Path,
    model: Path | None,
    like: str | None,
    expert_budget_mib: int | None,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Print the share of picks that the most picked experts of each layer hold."""
    refuse_together(model=model is not None, like=like is not None)
    given = click.get_current_context().get_parameter_source("expert_budget_mib")
    if model is None and like is None and given is ParameterSource.COMMANDLINE:
        raise click.UsageError("--expert-budget-mib: expected with --model or --like, whose experts' sizes it needs")
    shape, counts = _read(table)
    hot = None
    if model is not None or like is not None:
        budget = DEFAULT_BUDGET_MIB if expert_budget_mib is None else expert_budget_mib
        hot = _hot(table, shape, counts, model, like, budget)
    if as_json:
        click.echo(json.dumps(_document(shape, counts, hot)))
    else:
        click.echo(str(shape))
        _show_coverage(shape, counts)
        if hot is not None:
            shares = [len(ids) for ids in hot.layers]
            click.echo(
                f"{budget} MiB hold {hot.n_hot} of {shape.n_layer * shape.n_expert} experts, {min(shares)} to {max(shares)} "
                f"of a layer, and {hot.coverage(counts):.1%} of the picks"
            )
    if plot is not None:
        _plot(plot, table, shape, counts, hot)


def hottest_columns(shape: RouteShape) -> list[int]:
    """How many of the hottest the columns are for: as many as a row picks, and doubled, at most all."""
    found = [shape.n_used]
    while len(found) < MOST_COLUMNS and found[-1] < shape.n_expert:
        found.append(min(2 * found[-1], shape.n_expert))
    return found


def _read(table: Path) -> tuple[RouteShape, Counts]:
    try:
        return read_routes(table)
    except RoutesError as error:
        raise click.UsageError(str(error)) from error


def _hot(
    table: Path, shape: RouteShape, counts: Counts, model: Path | None, like: str | None, budget_mib: int
) -> HotSet:
    try:
        facts: ModelFacts = read_facts(model) if model is not None else load_published(like or "")
        wanted = route_shape(facts.hparams)
        sizes = expert_bytes(facts)
    except ModelError as error:
        raise Failure(str(error)) from error
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    if wanted != shape:
        raise click.UsageError(f"{table}: expected the model's {wanted}; found {shape}")
    return choose_hot(counts, sizes, budget_mib << 20)


def _show_coverage(shape: RouteShape, counts: Counts) -> None:
    columns = hottest_columns(shape)
    by_column = [coverage(counts, k) for k in columns]
    picks = counts.sum(axis=1)
    even = [f"{k / shape.n_expert:.1%}" for k in columns]
    rows = [
        [str(layer), str(int(picks[layer])), *(f"{found[layer]:.1%}" for found in by_column)]
        for layer in range(shape.n_layer)
    ]
    head = ["layer", "picks", *(f"hottest {k}" for k in columns)]
    rows.append(["if even", "", *even])
    console = Console()
    if console.is_terminal:
        table = Table(*head)
        for row in rows:
            table.add_row(*row)
        console.print(table)
        return
    widths = [max(len(head[i]), *(len(row[i]) for row in rows)) for i in range(len(head))]
    for row in [head, *rows]:
        click.echo("  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)))


def _document(shape: RouteShape, counts: Counts, hot: HotSet | None) -> dict[str, Any]:
    return {
        "n_layer": shape.n_layer,
        "n_expert": shape.n_expert,
        "n_expert_used": shape.n_used,
        "picks": [int(n) for n in counts.sum(axis=1)],
        "coverage": {str(k): [float(x) for x in coverage(counts, k)] for k in hottest_columns(shape)},
        "hot": None if hot is None else _placement(shape, counts, hot),
    }


def _placement(shape: RouteShape, counts: Counts, hot: HotSet) -> dict[str, Any]:
    """The hot set as the reference system stores placements, and what it covers."""
    return {
        "arch": ARCHITECTURE,
        "version": 1,
        "n_layer": shape.n_layer,
        "n_expert": shape.n_expert,
        "n_expert_used": shape.n_used,
        "total_hot": hot.n_hot,
        "hot_counts": [len(ids) for ids in hot.layers],
        "hot_expert_ids": [list(ids) for ids in hot.layers],
        "coverage": hot.coverage(counts),
    }


def _plot(path: Path, table: Path, shape: RouteShape, counts: Counts, hot: HotSet | None) -> None:
    """Coverage against the number of hottest experts: a line for each layer, their mean, and what even picks would give."""
    try:
        import matplotlib

        matplotlib.use("agg")
        from matplotlib import pyplot
    except ImportError as error:
        raise Failure("--plot: expected matplotlib, found none; install it: pip install 'pyluce[plot]'") from error
    ks = list(range(shape.n_expert + 1))
    lines = [coverage(counts, k) for k in ks]
    figure, axes = pyplot.subplots(figsize=(8, 5))
    for layer in range(shape.n_layer):
        axes.plot(ks, [line[layer] for line in lines], color="C0", alpha=0.25, linewidth=0.8)
    axes.plot(ks, [float(line.mean()) for line in lines], color="C0", linewidth=2, label="mean of the layers")
    axes.plot(ks, [k / shape.n_expert for k in ks], color="grey", linestyle="--", label="if all were picked alike")
    if hot is not None:
        mean = hot.n_hot / shape.n_layer
        axes.plot([mean], [hot.coverage(counts)], "o", color="C1", label=f"{hot.n_hot} hot experts")
    axes.set(
        xlabel="hottest experts of a layer", ylabel="share of its picks", title=table.name, xlim=(0, shape.n_expert)
    )
    axes.set_ylim(0, 1)
    axes.legend(loc="lower right")
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise Failure(f"--plot: {path} cannot be written: {error}") from error
    finally:
        pyplot.close(figure)
    click.echo(f"plot: {path}", err=True)
