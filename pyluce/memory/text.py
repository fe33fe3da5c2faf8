"""A plan for people, and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pyluce.memory.link import PlannedLink, link_json, link_text
from pyluce.memory.machine import Machine, MemoryKind
from pyluce.memory.parts import Place
from pyluce.memory.planner import Largest, MemoryPlan
from pyluce.memory.rows import budget_of


def plan_lines(plan: MemoryPlan, largest: Largest, automatic_chunk: int) -> Iterator[str]:
    """The plan as lines of at most some 100 columns. `automatic_chunk`: rows that the planner would choose."""
    target, request = plan.machine.target, plan.request
    named = f"{target.name} ({target.architecture})" if target.architecture else target.name
    yield f"model     {plan.model}"
    kind = "" if target.kind is MemoryKind.CPU else f", {target.kind.value} memory"
    available, budget = _size(plan.machine.available_bytes).strip(), _size(plan.budget_bytes).strip()
    yield f"device    {named}{kind}: {available} available, {budget} used at most"
    yield from _expert_lines(plan.machine)
    slots, most = _slots(request.n_slots), _slots(largest.n_slots)
    yield f"context   {request.n_ctx:,} tokens in {slots}, keys and values {request.kv_type}"
    chosen = "" if plan.chunk_tokens == automatic_chunk else f" (auto: {automatic_chunk:,})"
    yield f"chunk     {plan.chunk_tokens:,} tokens{chosen}"
    if plan.machine.expert is not None:
        why = "" if plan.streams_why is None else f" (auto: {plan.streams_why})"
        yield f"streams   {streams_text(plan.streams)}{why}"
    yield f"kept      {plan.prefix_cache_bytes >> 20:,} MiB for prompts that begin alike"
    yield ""
    shared = plan.machine.shares_host_memory
    there = plan.machine.expert_shares_host_memory
    places: tuple[tuple[Place, ...], ...] = ((Place.TARGET,), (Place.HOST,), (Place.EXPERT,))
    if shared:
        places = ((Place.TARGET, Place.HOST, Place.EXPERT),) if there else ((Place.TARGET, Place.HOST), (Place.EXPERT,))
    elif there:
        places = ((Place.TARGET,), (Place.EXPERT, Place.HOST))
    for group in (*places, (Place.DISK,)):
        parts = [p for p in plan.parts if p.place in group]
        if not parts:
            continue
        yield _place_name(plan, group[0])
        for part in parts:
            yield f"  {part.what:<42}{_size(part.n_bytes)}"
        if len(parts) > 1:
            yield f"  {'in all':<42}{_size(sum(p.n_bytes for p in parts))}"
    yield ""
    yield (
        f"largest   {largest.n_ctx:,} tokens in {slots}, or {most} of {request.n_ctx:,} tokens "
        f"(nothing kept, chunks of {largest.chunk:,})"
    )
    for note in plan.notes:
        yield f"note: {note}"
    if target.kind is not MemoryKind.CPU:
        yield "note: the device's own pools for matrix products are not in this plan; the tenth that stays free is for them"


def _expert_lines(machine: Machine) -> Iterator[str]:
    """The device that holds the experts, and the hot ones, where there is one."""
    expert = machine.expert
    if expert is None:
        return
    named = f"{expert.name} ({expert.architecture})" if expert.architecture else expert.name
    free = machine.expert_available_bytes
    kind = "" if expert.kind is MemoryKind.CPU else f", {expert.kind.value} memory"
    yield f"experts   {named}{kind}: {_size(free).strip()} available, {_size(budget_of(free)).strip()} used at most"
    yield f"hot       {machine.hot or 'none'}"
    if machine.link is not None:
        yield from _link_lines(machine.link)


def streams_text(streams: int) -> str:
    """How many chunks of a prompt run at the same time."""
    return "1 chunk of a prompt at a time" if streams == 1 else f"{streams} chunks of a prompt at once"


def _link_lines(link: PlannedLink) -> Iterator[str]:
    """The link, and what a decoded row is on it."""
    yield f"link      {link_text(link)}"
    if link.n_layer:
        out, back = link.row_out_bytes / 1e3, link.row_back_bytes / 1e3
        yield f"          a decoded row sends {out:,.1f} kB and gets {back:,.1f} kB where no expert is hot: {link.row_s * 1e3:,.2f} ms"


def plan_json(plan: MemoryPlan, largest: Largest, automatic_chunk: int) -> dict[str, Any]:
    """The plan with every size in bytes."""
    target, expert = plan.machine.target, plan.machine.expert
    return {
        "model": plan.model,
        "device": {"name": target.name, "memory": target.kind.value, "architecture": target.architecture},
        "expert_device": None if expert is None else expert.name,
        "expert_memory": None if expert is None else expert.kind.value,
        "expert_available_bytes": plan.machine.expert_available_bytes,
        "hot_experts": plan.machine.hot,
        "link": link_json(plan.machine.link),
        "available_bytes": plan.machine.available_bytes,
        "budget_bytes": plan.budget_bytes,
        "n_ctx": plan.request.n_ctx,
        "slots": plan.request.n_slots,
        "kv_type": plan.request.kv_type,
        "chunk": plan.chunk_tokens,
        "automatic_chunk": automatic_chunk,
        "prompt_streams": plan.streams,
        "prompt_streams_why": plan.streams_why,
        "prefix_cache_bytes": plan.prefix_cache_bytes,
        "parts": [{"place": p.place.value, "what": p.what, "bytes": p.n_bytes, "mapped": p.mapped} for p in plan.parts],
        "largest": {"n_ctx": largest.n_ctx, "slots": largest.n_slots, "chunk": largest.chunk},
        "warnings": list(plan.warnings),
        "notes": list(plan.notes),
    }


def _slots(count: int) -> str:
    return "1 slot" if count == 1 else f"{count} slots"


def _place_name(plan: MemoryPlan, place: Place) -> str:
    target, expert = plan.machine.target, plan.machine.expert
    if place is Place.EXPERT and expert is not None:
        return f"{expert.name}, with the host" if plan.machine.expert_shares_host_memory else expert.name
    if place is not Place.TARGET:
        return str(place.value)
    if target.kind is MemoryKind.CPU:
        return "memory"
    return f"{target.name}, with the host" if plan.machine.shares_host_memory else target.name


def _size(n_bytes: int) -> str:
    """Right-aligned, in the largest unit that leaves a whole number before the point."""
    value = n_bytes / 2**30
    number, unit = (
        (value, "GiB") if value >= 1 else (value * 2**10, "MiB") if value * 2**10 >= 1 else (value * 2**20, "KiB")
    )
    return f"{number:10,.2f} {unit}"
