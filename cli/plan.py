"""`luce plan`: what a model will take, before anything is loaded, from its header alone."""

from __future__ import annotations

import json
from dataclasses import replace

import click

from cli.loading import Failure
from cli.options import EngineFlags, engine_options, refuse_together
from cli.planning import Place, Planned, choose_place, make_planned
from pyluce.memory.load import this_machine
from pyluce.memory.machine import DeviceMemory, Machine, MemoryKind
from pyluce.memory.text import plan_json, plan_lines
from pyluce.native import NativeError

GIB = 1 << 30


@click.command()
@engine_options
@click.option("--like", metavar="NAME", help="Plan a published quant without its file: ud-q4_k_xl, iq4_nl or gsq-rco.")
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
    device_memory: float | None,
    memory_kind: str | None,
    host_memory: float | None,
    as_json: bool,
) -> None:
    """Say where the bytes of MODEL would go, without loading it.

    The flags are those of `luce run`, which follows the same plan. The devices of a --profile need not be in this machine. The largest
    context and number of slots that would fit are named too. Only headers are read: a file that was cut off behind its header is enough.
    """
    refuse_together(model=engine.model is not None, like=like is not None)
    refuse_together(profile=engine.profile is not None, device_memory=device_memory is not None)
    if (memory_kind is None) != (device_memory is None):
        raise click.UsageError("--device-memory and --memory-kind belong together: give both or none")
    place = _place(engine, device_memory, memory_kind, host_memory)
    made = make_planned(engine, engine.load, like, place)
    show_plan(made, as_json)


def show_plan(made: Planned, as_json: bool) -> None:
    """Print a plan; its warnings go to standard error."""
    for warning in made.plan.warnings:
        click.echo(f"warning: {warning}", err=True)
    if as_json:
        click.echo(json.dumps(plan_json(made.plan, made.largest, made.automatic_chunk)))
        return
    for line in plan_lines(made.plan, made.largest, made.automatic_chunk):
        click.echo(line)


def _place(engine: EngineFlags, device_gib: float | None, kind: str | None, host_gib: float | None) -> Place:
    """The machine to plan for."""
    load = engine.load
    if device_gib is not None and kind is not None:
        if load.device == "cpu":
            raise click.UsageError(
                "--device-memory: expected with a GPU (--device cuda:N or hip:N); for the CPU give --host-memory"
            )
        if load.expert_device is not None:
            raise click.UsageError(
                "--device-memory: expected without --expert-device, whose memory it does not say; a profile says both"
            )
        device = DeviceMemory(load.device, MemoryKind(kind), int(device_gib * GIB))
        return Place(_with_host(Machine(device, this_machine("cpu").host_free_bytes), host_gib), here=False)
    try:
        found = choose_place(load, engine.profile, profile_first=True)
    except NativeError as error:
        raise Failure(f"cannot plan: {error}; or say what it has: --device-memory GIB --memory-kind KIND") from error
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    return replace(found, machine=_with_host(found.machine, host_gib))


def _with_host(machine: Machine, gib: float | None) -> Machine:
    if gib is None:
        return machine
    free, target = int(gib * GIB), machine.target
    if target.kind is MemoryKind.CPU:
        target = replace(target, free_bytes=free)
    return replace(machine, target=target, host_free_bytes=free)
