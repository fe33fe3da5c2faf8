"""What `luce plan` and `luce run --dry-run` have in common: which machine is planned for, and the plan."""

from __future__ import annotations

from dataclasses import dataclass, replace

import click

from cli.loading import Failure
from cli.options import EngineFlags, as_flag
from pyluce.memory.facts import ModelFacts, load_published
from pyluce.memory.link import PlannedLink, assumed_link, look_at_link
from pyluce.memory.load import load_request, open_meter, read_load, this_device, with_hot
from pyluce.memory.machine import DeviceMemory, Machine
from pyluce.memory.planner import Largest, MemoryPlan, PlanError, largest_fit, make_plan
from pyluce.native import NativeError
from pyluce.options import DEFAULT_MODEL, LoadOptions, OptionError
from pyluce.placement.table_file import RoutesError
from pyluce.profiles import Profile
from pyluce.spec import SpecOptions
from pyluce.speculation import Speculation
from pyluce.state import memory as system
from pyluce.weights import ModelError


@dataclass(frozen=True, slots=True)
class Place:
    """A machine to plan for. `here`: its target is in this one; `notes` say what is not."""

    machine: Machine
    here: bool
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan with what else would fit, and rows that the planner would choose."""

    plan: MemoryPlan
    largest: Largest
    automatic_chunk: int
    speculation: Speculation


def choose_place(load: LoadOptions, profile: Profile | None, *, profile_first: bool) -> Place:
    """Devices of this machine, or of the profile's table, and the link between two: measured where both are this machine's.

    `profile_first`: what the profile says goes before what is here, otherwise it stands for what is not. Raises NativeError or
    ValueError for a device that is neither here nor in the table.
    """
    notes: list[str] = []
    here: dict[str, bool] = {}

    def find(name: str) -> DeviceMemory:
        said = profile.device(name) if profile is not None else None
        here[name] = False
        if said is not None and profile_first:
            return said
        try:
            found = this_device(name)
        except (NativeError, ValueError):
            if said is None:
                raise
            notes.append(f"{name} is not in this machine; planned with what the profile says of it")
            return said
        here[name] = True
        return found

    target = find(load.device)
    expert = None if load.expert_device is None else find(load.expert_device)
    host = system.available_bytes()
    if profile is not None and profile.host_bytes is not None and not all(here.values()):
        host = profile.host_bytes
    return Place(Machine(target, host, expert, link=_link(load, here)), here[load.device], tuple(notes))


def _link(load: LoadOptions, here: dict[str, bool]) -> PlannedLink | None:
    """What lies between the devices of a split. `here`: which of them were asked, not taken from a profile."""
    if load.expert_device is None:
        return None
    absent = [name for name, found in here.items() if not found]
    if absent:
        return assumed_link(f"{' and '.join(absent)} as the profile says, not as found here")
    return look_at_link(load.device, load.expert_device)


def read_model(engine: EngineFlags, load: LoadOptions, like: str | None) -> tuple[ModelFacts, Speculation]:
    """The facts of the model, or of a published quant. Raises ModelError, OptionError, ValueError."""
    if like is None:
        return read_load(engine.model or DEFAULT_MODEL, load)
    if load.draft is not None:
        raise click.UsageError("--like: expected without --draft, as no file is read")
    published = load_published(like)
    known = published.published is not None and published.published.sidecar_bytes is not None
    sources = load.spec if load.spec is not None else (("mtp",) if known else ())
    chosen = SpecOptions(sources, load.verify_width)
    speculation = Speculation(chosen, "" if known else "no draft head of this quant is known")
    return (load_published(like, mtp=True) if speculation.uses_head else published), speculation


def make_planned(engine: EngineFlags, load: LoadOptions, like: str | None, place: Place) -> Planned:
    """The plan of a load. A plan that fails exits with 1, what cannot be planned with 2."""
    try:
        facts, speculation = read_model(engine, load, like)
        machine = with_hot(place.machine, facts, load)
        if machine.link is not None:
            machine = replace(machine, link=machine.link.carrying(facts.hparams))
        with open_meter(facts, load, here=place.here) as meter:
            request = load_request(facts, load, speculation)
            made = make_plan(facts, request, machine, meter)
            automatic = made if request.chunk == 0 else make_plan(facts, replace(request, chunk=0), machine, meter)
            largest = largest_fit(facts, request, machine, meter)
    except (PlanError, OptionError) as error:
        raise Failure(as_flag(error)) from error
    except NativeError as error:
        hint = "" if load.device == "cpu" else "; or say what it has: --device-memory GIB --memory-kind KIND"
        raise Failure(f"cannot plan: {error}{hint}") from error
    except ModelError as error:
        raise Failure(f"cannot plan: {error}") from error
    except RoutesError as error:
        raise click.UsageError(f"--expert-placement: {error}") from error
    except ValueError as error:
        raise click.UsageError(as_flag(error)) from error
    return Planned(replace(made, notes=(*made.notes, *place.notes)), largest, automatic.chunk_tokens, speculation)
