"""Plans where a model's bytes go before anything is allocated, picks chunk rows and room for kept prompts, refuses what cannot fit.

Pure: everything it knows of the world comes in as facts, a machine and a meter. `pyluce.loading` and `luce plan` use the same
function, so what a plan says is what loading does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, Protocol

from pyluce.graph.chunks import pad_rows
from pyluce.graph.options import CHUNK_UNIT, RunnerOptions
from pyluce.memory.experts import split_graph_bytes
from pyluce.memory.facts import ModelFacts, TensorFact
from pyluce.memory.machine import Machine
from pyluce.memory.parts import Part, Place, weight_parts
from pyluce.memory.rows import FLOOR_ROWS, FLOOR_ROWS_SPLIT, budget_of, fit_rows, fit_rows_and_allowance, row_cap
from pyluce.memory.streams import AUTOMATIC, AUTOMATIC_STREAMS, SMALLEST_ROWS, against_streams
from pyluce.state.layout import StateOptions
from pyluce.state.store import automatic_budget, cache_pages

LARGEST_CONTEXT: Final = (1 << 24) - 1
CONTEXT_STEP: Final = 256
LARGEST_SLOTS: Final = 64
SMALL_CHUNK: Final = 256
ROPE_BLOCK: Final = 4096
LARGEST_BYTES: Final = 1 << 62


class PlanError(ValueError):
    """It does not fit; the message begins with the option that should be lower, and names the largest that would fit."""


class SizeMeter(Protocol):
    """Sizes from shapes (`pyluce.memory.meter.Meter`), in bytes."""

    @property
    def derived_bytes(self) -> int: ...
    def repacked_bytes(self, tensors: list[TensorFact]) -> int: ...
    def copied_bytes(self, tensors: list[TensorFact]) -> int: ...
    def state_bytes(self, options: StateOptions) -> int: ...
    def graph_bytes(self, options: StateOptions, rows: int) -> int: ...
    def work_bytes(self, options: StateOptions, rows: int) -> int: ...
    def draft_bytes(self, options: StateOptions) -> int: ...


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked for. chunk 0: the planner chooses; prefix_cache_bytes None: room for three full contexts, if it is there.

    mtp: with the parts of a draft head. streams: chunks of a prompt that are computed at once; 0: the planner chooses.
    """

    n_ctx: int
    n_slots: int = 1
    kv_type: str = "f16"
    chunk: int = 0
    prefix_cache_bytes: int | None = None
    max_rollback: int = 0
    mtp: bool = False
    streams: int = 1


@dataclass(frozen=True, slots=True)
class Largest:
    """The most that would fit, with nothing kept for the prefix cache: 0 when nothing does. `chunk`: rows that this counts with."""

    n_ctx: int
    n_slots: int
    chunk: int


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """A plan that fits. Parts by place; `budget_bytes` is nine tenths of what is available on the target.

    `streams_why`: why there are so many streams; None: that many were asked for.
    """

    model: str
    request: Request
    machine: Machine
    chunk_tokens: int
    prefix_cache_bytes: int
    parts: tuple[Part, ...]
    budget_bytes: int
    warnings: tuple[str, ...]
    notes: tuple[str, ...]
    streams: int = 1
    streams_why: str | None = None

    def total(self, *places: Place, mapped: bool = True) -> int:
        """Bytes at these places; `mapped` False leaves out what the system may drop and read again."""
        return sum(p.n_bytes for p in self.parts if p.place in places and (mapped or not p.mapped))


def make_plan(facts: ModelFacts, request: Request, machine: Machine, meter: SizeMeter) -> MemoryPlan:
    """The plan, or PlanError."""
    return _Planner(facts, request, machine, meter).plan()


def largest_fit(facts: ModelFacts, request: Request, machine: Machine, meter: SizeMeter) -> Largest:
    """The largest context for the slots that are asked for, and the most slots of the context that is asked for."""
    return _Planner(facts, request, machine, meter).largest()


class _Planner:
    def __init__(self, facts: ModelFacts, request: Request, machine: Machine, meter: SizeMeter) -> None:
        self._facts = facts
        self._request = request
        self._machine = machine
        self._meter = meter
        self._streams = request.streams or 1
        self._available = machine.available_bytes
        self._budget = budget_of(self._available)
        weights, self._notes = weight_parts(facts, machine, meter)
        self._weights = (*weights, Part(Place.TARGET, "weights, derived", meter.derived_bytes))
        counted = [Place.TARGET]
        if machine.shares_host_memory:
            counted += [Place.HOST, *([Place.EXPERT] if machine.expert_shares_host_memory else [])]
        mine = [p for p in self._weights if p.place in counted]
        self._there = sum(p.n_bytes for p in self._weights if p.place is Place.EXPERT)
        self._resident = sum(p.n_bytes for p in mine if not p.mapped)
        self._mapped = sum(p.n_bytes for p in mine if p.mapped)

    def plan(self) -> MemoryPlan:
        request, machine = self._request, self._machine
        self._check_elsewhere()
        state = self._state(request.n_ctx, request.n_slots)
        warnings = []
        fixed = self._fixed(request.n_ctx, request.n_slots) + self._mapped
        if self._mapped and fixed + self._measure(state, request.chunk or CHUNK_UNIT) > self._budget:
            warnings.append(self._mapped_warning(fixed))
            fixed -= self._mapped
        chunk, allowance = self._rows(state, fixed)
        budget = self._prefix_cache(state, allowance * self._share, chunk)
        why = None
        if request.streams == AUTOMATIC:
            chunk, why = self._choose_streams(state, fixed, chunk, budget)
        state = replace(state, cache_pages=cache_pages(self._facts.hparams, state, budget))
        parts = (*self._weights, *self._state_parts(state, budget), *self._run_parts(state, chunk))
        return MemoryPlan(
            model=self._facts.name,
            request=request,
            machine=machine,
            chunk_tokens=chunk,
            prefix_cache_bytes=budget,
            parts=tuple(p for p in parts if p.n_bytes),
            budget_bytes=self._budget,
            warnings=tuple(warnings),
            notes=tuple(self._notes),
            streams=self._streams,
            streams_why=why,
        )

    def largest(self) -> Largest:
        request = self._request
        chunk = request.chunk or SMALL_CHUNK
        top = self._facts.hparams.n_ctx_train or LARGEST_CONTEXT
        steps = max(top, request.n_ctx) // CONTEXT_STEP
        context = _largest(steps, lambda n: self._fits(n * CONTEXT_STEP, request.n_slots, chunk))
        slots = _largest(LARGEST_SLOTS, lambda n: self._fits(request.n_ctx, n, chunk))
        return Largest(context * CONTEXT_STEP, slots, chunk)

    # sizes

    def _state(self, n_ctx: int, n_slots: int) -> StateOptions:
        """The state without pages for the prefix cache."""
        options = RunnerOptions(
            n_ctx=n_ctx,
            n_slots=n_slots,
            kv_type=self._request.kv_type,
            max_rollback=self._request.max_rollback,
            mtp=self._request.mtp,
        )
        return options.state(self._facts.hparams)

    def _fixed(self, n_ctx: int, n_slots: int) -> int:
        """What must be there whatever the chunk: weights that are no map of a file, state, tables on the host where it shares."""
        host = self._host_tables(n_ctx, n_slots) if self._machine.shares_host_memory else 0
        return self._resident + self._meter.state_bytes(self._state(n_ctx, n_slots)) + host

    def _measure(self, state: StateOptions, rows: int) -> int:
        rows = min(rows, pad_rows(state.n_ctx))
        graphs = self._graphs(state, rows) + self._meter.draft_bytes(state)
        both = self._machine.shares_host_memory and self._machine.expert_shares_host_memory
        return graphs + self._meter.work_bytes(state, rows) + (self._split_graphs(rows) if both else 0)

    def _graphs(self, state: StateOptions, rows: int) -> int:
        """Graphs of the trunk on the target: each stream of a prompt has its own memory."""
        return self._streams * self._meter.graph_bytes(state, rows)

    def _split_graphs(self, rows: int) -> int:
        """Graphs on the device that holds the experts; 0 without one."""
        if self._machine.expert is None:
            return 0
        return self._streams * split_graph_bytes(self._facts.hparams, rows)

    def _host_tables(self, n_ctx: int, n_slots: int) -> int:
        """Rotation angles of every position, and a copy of the page tables."""
        angles = -(-n_ctx // ROPE_BLOCK) * ROPE_BLOCK * self._facts.hparams.rope_dim * 4
        return angles + 4 * self._state(n_ctx, n_slots).pages_per_slot * n_slots

    def _fits(self, n_ctx: int, n_slots: int, chunk: int) -> bool:
        return self._fixed(n_ctx, n_slots) + self._measure(self._state(n_ctx, n_slots), chunk) <= self._budget

    # decisions

    def _check_elsewhere(self) -> None:
        """The weights must fit on each device, before anything else is asked."""
        if self._resident > self._budget:
            raise PlanError(
                f"device: the weights take {gib(self._resident)}, found {gib(self._available)} available on "
                f"{self._machine.target.name}, of which a tenth is kept free; choose another device, or a smaller quant"
            )
        expert = self._machine.expert
        if expert is None:
            return
        need = self._there + self._split_graphs(self._request.chunk or CHUNK_UNIT)
        available = self._machine.expert_available_bytes
        if need > budget_of(available):
            raise PlanError(
                f"expert_device: the routed experts and their graphs take {gib(need)}, found {gib(available)} available on "
                f"{expert.name}, of which a tenth is kept free; choose another device, or a smaller quant"
            )

    def _rows_there(self) -> int:
        """Rows whose graphs fit on the device that holds the experts."""
        room = budget_of(self._machine.expert_available_bytes) - self._there
        return room // self._split_graphs(1)

    def _rows(self, state: StateOptions, fixed: int) -> tuple[int, int]:
        """Rows of a chunk, and bytes on the target that kept prompts may take."""
        request, machine = self._request, self._machine
        wanted = self._wanted(state) // self._share
        if request.chunk:
            need = fixed + self._measure(state, request.chunk)
            if need > self._budget:
                raise self._refusal(state, request.chunk)
            return request.chunk, min(wanted, self._budget - need)
        floor = (FLOOR_ROWS if machine.expert is None else FLOOR_ROWS_SPLIT) // self._streams
        found = fit_rows_and_allowance(
            self._limit(), self._available, fixed, lambda rows: self._measure(state, rows), wanted, floor, CHUNK_UNIT
        )
        if not found.rows:
            raise self._refusal(state, SMALL_CHUNK)
        return found.rows, found.allowance

    def _limit(self) -> int:
        """The most rows of a chunk: rules of rows are about those that are computed at once, in all streams."""
        request, machine = self._request, self._machine
        split = machine.expert is not None
        limit = min(row_cap(request.n_slots, split=split, hot_experts=machine.hot_bytes > 0), pad_rows(request.n_ctx))
        if split:
            limit = min(limit // self._streams, self._rows_there())
        return max(CHUNK_UNIT, limit // CHUNK_UNIT * CHUNK_UNIT)

    def _choose_streams(self, state: StateOptions, fixed: int, chunk: int, budget: int) -> tuple[int, str]:
        """Rows of a chunk and why there are as many streams: a second one must fit beside what kept prompts get without it."""
        request = self._request
        against = against_streams(self._machine, request.n_slots, request.n_ctx, request.chunk)
        if against is not None:
            return chunk, against
        self._streams = AUTOMATIC_STREAMS
        rows = self._rows_beside(state, fixed + budget // self._share)
        if rows and self._host_room(state, rows) >= budget:
            return rows, f"two GPUs, and room for two chunks of {rows:,} rows"
        self._streams = 1
        return chunk, f"no room for two chunks of {request.chunk or SMALLEST_ROWS:,} rows beside kept prompts"

    def _rows_beside(self, state: StateOptions, taken: int) -> int:
        """Rows of the chunks of several streams beside so many bytes on the target; 0 where they would not be worth it."""
        rows = self._request.chunk
        if rows:
            fits = taken + self._measure(state, rows) <= self._budget and rows <= self._rows_there()
            return rows if fits else 0
        rows = fit_rows(self._limit(), self._available, taken, lambda n: self._measure(state, n), CHUNK_UNIT)
        return rows if rows >= SMALLEST_ROWS else 0

    def _wanted(self, state: StateOptions) -> int:
        """Bytes for kept prompts that are asked for, host and device together."""
        given = self._request.prefix_cache_bytes
        if given is not None:
            return given
        return automatic_budget(self._facts.hparams, state, max(0, self._available - self._resident))

    def _prefix_cache(self, state: StateOptions, room: int, chunk: int) -> int:
        """What kept prompts get: what is left where nothing was asked for, what was asked for, or PlanError."""
        given = self._request.prefix_cache_bytes
        room = min(room, self._host_room(state, chunk))
        if given is not None and given > room:
            raise PlanError(
                f"prefix_cache_mib: {given >> 20} MiB do not fit beside weights, state and graphs; at most {room >> 20} would"
            )
        return room if given is None else given

    @property
    def _share(self) -> int:
        """Kept prompts lie half on the host where the target's memory is its own."""
        return 1 if self._machine.shares_host_memory else 2

    def _host_room(self, state: StateOptions, chunk: int) -> int:
        """What the host's memory allows kept prompts; no limit where it is the target's, whose memory has been asked."""
        if self._machine.shares_host_memory:
            return LARGEST_BYTES
        there = self._there + self._split_graphs(min(chunk, pad_rows(state.n_ctx)))
        taken = there if self._machine.expert_shares_host_memory else 0
        taken += self._host_tables(state.n_ctx, state.n_slots)
        return 2 * max(0, budget_of(self._machine.host_free_bytes) - taken)

    def _refusal(self, state: StateOptions, chunk: int) -> PlanError:
        largest = self.largest()
        fits = [f"at most {largest.n_slots} would fit" if largest.n_slots else "not even one would fit"]
        if largest.n_ctx:
            fits.append(f"{state.n_slots} of at most {largest.n_ctx} tokens would")
        return PlanError(
            f"max_concurrency: the state of {state.n_slots} sequences of {state.n_ctx} tokens takes "
            f"{gib(self._meter.state_bytes(state))}, beside {gib(self._resident)} of weights and "
            f"{gib(self._measure(state, chunk))} for chunks of {chunk} tokens; found {gib(self._available)} available, of which "
            f"a tenth is kept free; {', '.join(fits)}: lower max_concurrency, max_ctx or chunk"
        )

    def _mapped_warning(self, fixed: int) -> str:
        return (
            f"weights, state and a chunk take more than the {gib(self._available)} that are available; {gib(self._mapped)} "
            "of the weights are mapped, and parts of them will be read from the file again and again"
        )

    # parts

    def _state_parts(self, state: StateOptions, budget: int) -> list[Part]:
        bare = replace(state, cache_pages=0)
        total, slots = self._meter.state_bytes(state), self._meter.state_bytes(bare)
        pages = total - slots
        return [
            Part(Place.TARGET, "state", slots),
            Part(Place.TARGET, "prefix cache, pages", pages),
            Part(Place.HOST, "prefix cache, recurrent states and logits", max(0, budget - pages)),
        ]

    def _run_parts(self, state: StateOptions, chunk: int) -> list[Part]:
        rows = min(chunk, pad_rows(state.n_ctx))
        return [
            Part(Place.TARGET, "graphs", self._graphs(state, rows)),
            Part(Place.TARGET, "draft graphs", self._meter.draft_bytes(state)),
            Part(Place.TARGET, "workspace", self._meter.work_bytes(state, rows)),
            Part(Place.EXPERT, "graphs, by formula", self._split_graphs(rows)),
            Part(Place.HOST, "tables", self._host_tables(state.n_ctx, state.n_slots)),
        ]


def _largest(high: int, fits: Callable[[int], bool]) -> int:
    """The largest number up to `high` that fits, 0 when 1 does not; what fits must fit when there is less."""
    low = 0
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low


def gib(n_bytes: int) -> str:
    """A size for people."""
    return f"{n_bytes / 2**30:.2f} GiB"
