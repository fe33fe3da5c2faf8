"""`luce plan`: what a model will take, before anything is loaded, from its header alone."""

from __future__ import annotations

import json
from dataclasses import replace

import click
from click.core import ParameterSource

from cli.loading import Failure
from cli.options import EngineFlags, as_flag, engine_options, refuse_together
from pyluce.memory.facts import ModelFacts, load_published
from pyluce.memory.load import load_request, open_meter, read_load, this_machine
from pyluce.memory.machine import DeviceMemory, Machine, MemoryKind
from pyluce.memory.planner import PlanError, largest_fit, make_plan
from pyluce.memory.text import plan_json, plan_lines
from pyluce.native import NativeError
from pyluce.options import DEFAULT_MODEL, LoadOptions, OptionError
from pyluce.profiles import Profile, load_profile
from pyluce.speculation import NO_SPECULATION, Speculation
from pyluce.weights import ModelError

GIB = 1 << 30


@click.command()
@engine_options
@click.option("--like", metavar="NAME", help="Plan a published quant without its file: ud-q4_k_xl, iq4_nl or gsq-rco.")
@click.option("--profile", metavar="NAME", help="Plan for the devices of a profile instead of this machine's.")
@click.option(
    "--device-memory",
    type=click.FloatRange(0.0, min_open=True),
    metavar="GIB",
    help="Memory that is free on the device, which need not be in this machine.",
)
@click.option(
    "--memory-kind",
    type=click.Choice([kind.value for kind in MemoryKind if kind is not MemoryKind.CPU]),
    help="With --device-memory: whether the device shares the host's memory.",
)
@click.option(
    "--host-memory",
    type=click.FloatRange(0.0, min_open=True),
    metavar="GIB",
    help="Memory that is free on the host.  [default: this machine's]",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, sizes in bytes.")
def plan(
    engine: EngineFlags,
    like: str | None,
    profile: str | None,
    device_memory: float | None,
    memory_kind: str | None,
    host_memory: float | None,
    as_json: bool,
) -> None:
    """Say where the bytes of MODEL would go, without loading it.

    The flags are those of `luce run`, which follows the same plan; the largest context and number of slots that would fit are named too. Only
    headers are read: a file that was cut off behind its header is enough.
    """
    refuse_together(model=engine.model is not None, like=like is not None)
    refuse_together(profile=profile is not None, device_memory=device_memory is not None)
    refuse_together(profile=profile is not None, device=_given("device"))
    if (memory_kind is None) != (device_memory is None):
        raise click.UsageError("--device-memory and --memory-kind belong together: give both or none")
    try:
        load, machine = _target(engine.load, profile, device_memory, memory_kind, host_memory)
        facts, speculation = _facts(engine, load, like)
        with open_meter(facts, load, here=profile is None and device_memory is None) as meter:
            request = load_request(facts, load, speculation)
            made = make_plan(facts, request, machine, meter)
            automatic = make_plan(facts, replace(request, chunk=0), machine, meter).chunk_tokens
            largest = largest_fit(facts, request, machine, meter)
    except (PlanError, OptionError) as error:
        raise Failure(as_flag(error)) from error
    except NativeError as error:
        hint = "" if engine.load.device == "cpu" else "; or say what it has: --device-memory GIB --memory-kind KIND"
        raise Failure(f"cannot plan: {error}{hint}") from error
    except ModelError as error:
        raise Failure(f"cannot plan: {error}") from error
    except ValueError as error:
        raise click.UsageError(as_flag(error)) from error
    for warning in made.warnings:
        click.echo(f"warning: {warning}", err=True)
    if as_json:
        click.echo(json.dumps(plan_json(made, largest, automatic)))
        return
    for line in plan_lines(made, largest, automatic):
        click.echo(line)


def _facts(engine: EngineFlags, load: LoadOptions, like: str | None) -> tuple[ModelFacts, Speculation]:
    if like is None:
        return read_load(engine.model or DEFAULT_MODEL, load)
    if load.spec is not None or load.verify_width > 1 or load.draft is not None:
        raise click.UsageError(
            "--like: expected without --spec, --verify-width and --draft, as no draft head is in these facts"
        )
    return load_published(like), NO_SPECULATION


def _target(
    load: LoadOptions, profile: str | None, device_gib: float | None, kind: str | None, host_gib: float | None
) -> tuple[LoadOptions, Machine]:
    """The options with what a profile adds, and the machine to plan for."""
    if profile is not None:
        found = load_profile(profile)
        return _with_profile(load, found), _with_host(found.machine, host_gib)
    if device_gib is not None and kind is not None:
        if load.device == "cpu":
            raise click.UsageError(
                "--device-memory: expected with a GPU (--device cuda:N or hip:N); for the CPU give --host-memory"
            )
        device = DeviceMemory(load.device, MemoryKind(kind), int(device_gib * GIB))
        return load, _with_host(Machine(device, this_machine("cpu").host_free_bytes), host_gib)
    return load, _with_host(this_machine(load.device), host_gib)


def _with_profile(load: LoadOptions, profile: Profile) -> LoadOptions:
    """Flags win over the profile; it chooses the chunk unless a flag does."""
    chunk = load.chunk if _given("chunk") else 0
    return replace(load, device=profile.machine.target.name, max_ctx=load.max_ctx or profile.max_ctx, chunk=chunk)


def _with_host(machine: Machine, gib: float | None) -> Machine:
    if gib is None:
        return machine
    free, target = int(gib * GIB), machine.target
    if target.kind is MemoryKind.CPU:
        target = replace(target, free_bytes=free)
    return replace(machine, target=target, host_free_bytes=free)


def _given(parameter: str) -> bool:
    return click.get_current_context().get_parameter_source(parameter) is not ParameterSource.DEFAULT
