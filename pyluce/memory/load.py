"""The plan that loading a model follows: its header, the options of the load, the memory that is free at this moment."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from pyluce.graph.options import RunnerOptions
from pyluce.memory.experts import expert_bytes, plan_hot, route_shape
from pyluce.memory.facts import ModelFacts, facts_of
from pyluce.memory.machine import DeviceMemory, Machine, MemoryKind
from pyluce.memory.meter import Meter
from pyluce.memory.planner import MemoryPlan, Request, make_plan
from pyluce.native import ggml_backend as api
from pyluce.native.devices import device_memory, find_device
from pyluce.native.ggml_backend import BackendDevType
from pyluce.options import DEFAULT_MAX_CTX, LoadOptions, available_cpus
from pyluce.placement.hot import HotSet
from pyluce.placement.learner import HotLearner, LearnerOptions
from pyluce.placement.table_file import read_routes_for
from pyluce.speculation import NO_SPECULATION, Speculation, choose_speculation
from pyluce.state import memory as system
from pyluce.weights.model_file import ModelFile, open_model


def choose_context(max_ctx: int | None, n_ctx_train: int) -> int:
    """The context size in tokens: what was asked for, else the default, never more than the model was trained for by default."""
    if max_ctx is not None:
        return max_ctx
    return min(DEFAULT_MAX_CTX, n_ctx_train) if n_ctx_train > 0 else DEFAULT_MAX_CTX


def load_request(facts: ModelFacts, options: LoadOptions, speculation: Speculation = NO_SPECULATION) -> Request:
    """What loading with these options asks of the memory."""
    kept = options.prefix_cache_mib
    return Request(
        n_ctx=choose_context(options.max_ctx, facts.hparams.n_ctx_train),
        n_slots=options.max_concurrency,
        kv_type=options.kv_type,
        chunk=options.chunk,
        prefix_cache_bytes=None if kept is None else kept << 20,
        max_rollback=speculation.options.max_drafts,
        mtp=speculation.uses_head,
        streams=options.prompt_streams,
    )


def this_machine(device: str, expert_device: str | None = None) -> Machine:
    """The memory of devices of this machine that is free now. Raises NativeError when there is no such device."""
    expert = None if expert_device is None else this_device(expert_device)
    return Machine(this_device(device), system.available_bytes(), expert)


def this_device(name: str) -> DeviceMemory:
    """One of them. Raises NativeError, or ValueError for what is no device's name."""
    if name == "cpu":
        return DeviceMemory("cpu", MemoryKind.CPU, system.available_bytes())
    free, _ = device_memory(name)
    integrated = api.ggml_backend_dev_type(find_device(name)) == BackendDevType.IGPU
    return DeviceMemory(name, MemoryKind.UNIFIED if integrated else MemoryKind.DISCRETE, free)


def with_hot(machine: Machine, facts: ModelFacts, options: LoadOptions) -> Machine:
    """The machine with the bytes of the hot experts that these options ask for. Raises RoutesError, ValueError."""
    hot = plan_hot(facts, options.placement)
    return machine if hot is None else replace(machine, hot_bytes=hot.n_bytes, hot=str(hot))


def open_meter(facts: ModelFacts, options: LoadOptions, *, here: bool = True) -> Meter:
    """The meter for a load with these options; `here` False: the device is not in this machine, the CPU's alignment stands for its own."""
    on_cpu = options.device == "cpu"
    return Meter(
        facts,
        on_cpu=on_cpu,
        repack=options.repack and options.expert_device is None,
        n_threads=cpu_threads(options),
        buffer_type=api.ggml_backend_dev_buffer_type(find_device(options.device)) if here and not on_cpu else 0,
        collect_picks=options.collect_routing is not None,
    )


def read_load(path: str | os.PathLike[str], options: LoadOptions) -> tuple[ModelFacts, Speculation]:
    """What loading the model at `path` would load, from the headers of its files: the draft head is part of the facts if it is used.

    Raises ModelError, OptionError.
    """
    with open_model(path, draft=options.draft, whole=False) as file:
        speculation = choose_speculation(file, options)
        if speculation.uses_head:
            file.attach_draft(embedding=options.device != "cpu")
        return facts_of(file.hparams.name or Path(file.path).stem, file.hparams, file.tensors), speculation


def cpu_threads(options: LoadOptions) -> int:
    """Threads that a load with these options computes with; 1 on a GPU."""
    return (options.threads or available_cpus()) if options.device == "cpu" else 1


def plan_load(model_file: ModelFile, options: LoadOptions, speculation: Speculation = NO_SPECULATION) -> MemoryPlan:
    """The plan for an open model (its draft head attached, if it is used) on this machine, as it is now. Raises PlanError, NativeError."""
    facts = facts_of(model_file.hparams.name or model_file.path, model_file.hparams, model_file.tensors)
    with open_meter(facts, options) as meter:
        machine = with_hot(this_machine(options.device, options.expert_device), facts, options)
        return make_plan(facts, load_request(facts, options, speculation), machine, meter)


def hot_experts(model_file: ModelFile, options: LoadOptions) -> HotSet | None:
    """The experts that are on the target as well; None without a placement. Raises RoutesError for a table that does not fit the model."""
    facts = facts_of(model_file.hparams.name or model_file.path, model_file.hparams, model_file.tensors)
    hot = plan_hot(facts, options.placement)
    return hot.hot if hot is not None else None


def hot_learner(model_file: ModelFile, options: LoadOptions) -> HotLearner | None:
    """What the hot experts follow; None unless the placement is learned. Raises RoutesError for a table that does not fit the model."""
    placement = options.placement
    if not placement.learns:
        return None
    facts = facts_of(model_file.hparams.name or model_file.path, model_file.hparams, model_file.tensors)
    shape = route_shape(facts.hparams)
    counts = None if placement.table is None else read_routes_for(placement.table, shape)
    limit = LearnerOptions(swap_mib_s=placement.swap_mib_s)
    return HotLearner(shape, expert_bytes(facts), placement.budget_bytes, limit, counts)


def runner_options(plan: MemoryPlan, options: LoadOptions, hot: HotSet | None = None) -> RunnerOptions:
    """The runner that the plan is for, with these experts on the target too."""
    return RunnerOptions(
        n_ctx=plan.request.n_ctx,
        n_slots=plan.request.n_slots,
        n_threads=cpu_threads(options),
        kv_type=plan.request.kv_type,
        max_rollback=plan.request.max_rollback,
        chunk_tokens=plan.chunk_tokens,
        repack=options.repack,
        device=options.device,
        tune=options.tune,
        prefix_cache_bytes=plan.prefix_cache_bytes,
        mtp=plan.request.mtp,
        expert_device=options.expert_device,
        hot_experts=hot,
        prompt_streams=plan.streams,
        draft_path=None if options.draft is None or not plan.request.mtp else str(options.draft),
    )
