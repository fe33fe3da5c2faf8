"""GET /props as OpenAPI describes it. The `memory` section is fixed field by field; clients may rely on it."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Shown(BaseModel):
    """Part of an answer: exactly these fields."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class CacheMemory(Shown):
    """The state of all sequences. It is allocated once for every slot's whole context, so its bytes do not follow the live tokens."""

    location: Literal["device", "host"] = Field(description="Where it lies: on a GPU, or in the host's memory.")
    capacity_tokens: int = Field(description="Tokens of all slots' contexts together.")
    live_tokens: int | None = Field(description="Tokens in the one slot; null where several slots share the cache.")
    kv_bytes: int = Field(
        description="Attention keys and values, the draft head's and the prefix cache's pages included."
    )
    recurrent_bytes: int = Field(description="GDN states and convolution inputs.")
    draft_feature_bytes: int = Field(description="Hidden rows that the draft head reads; 0 without one.")
    other_bytes: int = Field(description="Indexer keys, page tables, alignment.")
    host_state_bytes: int = Field(description="Tables on the host that belong to live sequences.")


class SnapshotEntry(Shown):
    """One kept prompt. Pages that entries share count in each of them, but once in the totals."""

    slot: int = Field(description="Place in this list, the entry used last first.")
    role: Literal["prefix", "agent_turn", "prefill_cache", "disk_staging"] = Field(
        description="prefill_cache: a whole prompt with its logits; prefix: any other. The rest is the reference system's."
    )
    tokens: int
    bytes: int = Field(description="Its pages, its recurrent states and its logits.")
    location: Literal["device", "host"] = Field(description="Where its pages lie.")
    host_copy_bytes: int = Field(description="The part that lies on the host in any case: recurrent states and logits.")


class SnapshotMemory(Shown):
    """What the prefix cache holds. Its pages are part of the cache's bytes above."""

    count: int = Field(description="Entries in all; the list shows the 64 that were used last.")
    entries: list[SnapshotEntry]
    device_bytes: int
    host_bytes: int
    budget_bytes: int = Field(description="What all of it may take, host and device together; 0: nothing is kept.")


class ProcessMemory(Shown):
    """Sampled when /props is served."""

    rss_bytes: int
    peak_rss_bytes: int | None


class DeviceMemory(Shown):
    """One device. On the CPU everything is one device; beside a GPU the host is another one, and so is an expert device ("experts")."""

    name: str
    kind: Literal["cpu", "gpu", "experts", "host"]
    free_bytes: int | None = Field(description="As the driver (for the CPU, the system) said after the last request.")
    total_bytes: int | None
    weights_bytes: int
    cache_bytes: int = Field(description="The sequences' state with the prefix cache's pages.")
    snapshots_bytes: int = Field(description="Kept prompts; the pages among them are part of cache_bytes.")
    workspaces_bytes: int


class WeightMemory(Shown):
    """Weights by the way they are held. Mapped ones are resident as far as they were used."""

    device_bytes: int
    mapped_bytes: int
    repacked_bytes: int
    derived_bytes: int = Field(description="Made from the file's tensors while loading.")
    disk_bytes: int = Field(description="The n-gram table, which stays in the file.")


class WorkspaceMemory(Shown):
    """What computing takes beside state and weights."""

    graph_bytes: int
    draft_graph_bytes: int
    work_buffer_bytes: int = Field(description="The CPU's work buffer; a GPU's pools are its driver's and not counted.")


class ParkedDevice(Shown):
    """What a park left of a GPU."""

    name: str
    context: Literal["released", "kept"] = Field(
        description="released: the driver holds nothing for this process. kept: its context is there, with the code of the kernels."
    )
    why: str | None = Field(description="Why it was kept.")


class MemoryProps(Shown):
    """Where the bytes are, from the buffers that exist: published by the engine thread at the start and after every request.

    `available` is false, and the sections below it null or empty, while there is no report (the model is parked).
    """

    available: bool
    cache: CacheMemory | None
    snapshots: SnapshotMemory | None
    process: ProcessMemory
    devices: list[DeviceMemory]
    weights: WeightMemory | None
    workspaces: WorkspaceMemory | None
    parked_devices: list[ParkedDevice] = Field(description="The GPUs of a parked model; empty while it is loaded.")
    engine: dict[str, Any] = Field(description="The engine's own report, for people; its fields may change.")


class Props(BaseModel):
    """How the server runs: the reference system's schema 2, with all keys always there and null for what is not known."""

    model_config = ConfigDict(extra="allow", frozen=True)

    default_generation_settings: dict[str, Any]
    model_alias: str
    model_path: str
    build_info: str
    speculative_mode: str
    server: dict[str, Any]
    model: dict[str, Any]
    runtime: dict[str, Any]
    prefix_cache: dict[str, Any]
    memory: MemoryProps
