"""`luce run --dry-run`: every setting with where it comes from, and the plan; nothing is loaded."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import click
from click.core import ParameterSource

from cli.loading import check_devices
from cli.options import EngineFlags
from cli.plan import show_plan
from cli.planning import Planned, choose_place, make_planned
from pyluce.memory.load import cpu_threads
from pyluce.memory.text import plan_json
from pyluce.native import NativeError
from pyluce.options import DEFAULT_MODEL

SECRETS = ("api_key",)
HIDDEN = (
    "prompt", "prompt_file", "max_tokens", "stop", "chat", "system", "thinking", "show_thinking", "as_json", "dry_run", "like",
    "quiet", "profile",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ShownSetting:
    """A setting, the value that a run would use (None: none), and where it comes from."""

    name: str
    value: Any
    source: str


def dry_run(engine: EngineFlags, like: str | None, as_json: bool) -> None:
    """Print what a run with these flags would do. Exits with 1 when the plan does not fit or a device is missing."""
    try:
        place = choose_place(engine.load, engine.profile, profile_first=False)
    except (NativeError, ValueError):
        _print_settings(engine, settings(engine, like, None))
        check_devices(engine)
        raise
    try:
        planned = make_planned(engine, engine.load, like, place)
    except click.ClickException:
        if not as_json:
            _print_settings(engine, settings(engine, like, None))
        raise
    shown = settings(engine, like, planned)
    if as_json:
        document = {
            "profile": None if engine.profile is None else str(engine.profile.path),
            "settings": {s.name: {"value": s.value, "source": s.source} for s in shown},
            "plan": plan_json(planned.plan, planned.largest, planned.automatic_chunk),
        }
        click.echo(json.dumps(document))
        return
    _print_settings(engine, shown)
    show_plan(planned, as_json=False)


def settings(engine: EngineFlags, like: str | None, planned: Planned | None) -> list[ShownSetting]:
    """Every flag of this command that is about loading, serving or sampling, in the order of its help."""
    context = click.get_current_context()
    values = {**context.params, **_resolved(engine, like, planned)}
    found = []
    for parameter in context.command.params:
        name = parameter.name or ""
        if name in HIDDEN:
            continue
        value = values.get(name)
        if name in SECRETS and value is not None:
            value = "set"
        found.append(ShownSetting(name, _plain(value), _source(context, engine, parameter)))
    return found


def _resolved(engine: EngineFlags, like: str | None, planned: Planned | None) -> dict[str, Any]:
    """Values that a run would use where a flag leaves them open."""
    load = engine.load
    values: dict[str, Any] = {
        "model": f"like {like}" if like is not None else engine.model or DEFAULT_MODEL,
        "max_concurrency": load.max_concurrency,
        "threads": cpu_threads(load) if load.device == "cpu" else None,
        "expert_device": load.expert_device,
        "expert_placement": load.expert_placement,
        "expert_budget_mib": load.placement.budget_bytes >> 20 if load.expert_placement is not None else None,
        "expert_swap_mib_s": load.placement.swap_mib_s if load.placement.learns else None,
        "prompt_streams": load.prompt_streams or "auto",
        "spec": None if load.spec is None else ",".join(load.spec) or "off",
    }
    if planned is not None:
        plan, speculation = planned.plan, planned.speculation
        values |= {
            "max_ctx": plan.request.n_ctx,
            "chunk": plan.chunk_tokens,
            "prompt_streams": plan.streams,
            "prefix_cache_mib": plan.prefix_cache_bytes >> 20,
            "spec": ",".join(speculation.options.sources) if speculation.options.enabled else "off",
            "draft": speculation.draft_path if speculation.uses_head else None,
        }
    return values


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or None
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def _source(context: click.Context, engine: EngineFlags, parameter: click.Parameter) -> str:
    name = parameter.name or ""
    source = context.get_parameter_source(name)
    if source is ParameterSource.COMMANDLINE:
        return "command line"
    if source is ParameterSource.ENVIRONMENT:
        return str(parameter.envvar)
    if source is ParameterSource.DEFAULT_MAP and engine.profile is not None:
        return f"profile, line {engine.profile.settings[name].line}"
    return "default"


def _print_settings(engine: EngineFlags, shown: list[ShownSetting]) -> None:
    if engine.profile is not None:
        click.echo(f"profile   {engine.profile.name} ({engine.profile.path})")
        click.echo("")
    width = max(len(s.name) for s in shown)
    values = {s.name: _text(s.value) for s in shown}
    column = min(40, max(len(text) for text in values.values()))
    for s in shown:
        click.echo(f"{s.name:<{width}}  {values[s.name]:<{column}}  {s.source}")
    click.echo("")


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value)
