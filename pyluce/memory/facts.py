"""What a plan needs to know of a model: sizes, and each tensor's shape and type. Read from headers, or shipped.

Tensor data are never read, so a file that was cut off behind its header serves, and for published quants no file at all.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from importlib import resources
from pathlib import Path
from typing import Any, Final

from pyluce.weights.ggml_types import TYPES, TYPES_BY_NAME
from pyluce.weights.hparams import HParams, PleParams
from pyluce.weights.model_file import open_model
from pyluce.weights.tensors import OUTPUT, PLE_TABLE, TOKEN_EMBEDDING, TensorInfo

PUBLISHED_FILE: Final = "published_quants.json"


@dataclass(frozen=True, slots=True)
class TensorFact:
    """One tensor: `ne` fastest axis first; `type_id` None where it is not known."""

    name: str
    ne: tuple[int, ...]
    type_id: int | None

    @property
    def is_expert(self) -> bool:
        """A stack of routed experts."""
        return self.name.endswith("_exps.weight")

    @property
    def layer(self) -> int | None:
        """The number of its layer, a draft head's behind the trunk's; None for a tensor of none."""
        parts = self.name.split(".", 2)
        return int(parts[1]) if parts[0] == "blk" and len(parts) == 3 and parts[1].isdigit() else None

    @property
    def n_values(self) -> int:
        """Values in it."""
        values = 1
        for size in self.ne:
            values *= size
        return values

    @property
    def n_bytes(self) -> int:
        """Bytes of its data. ValueError when the type is not known."""
        if self.type_id is None:
            raise ValueError(f"{self.name}: expected a known type, found none in these facts")
        kind = TYPES[self.type_id]
        return self.n_values // kind.block * kind.size


@dataclass(frozen=True, slots=True)
class Published:
    """Totals of a published quant whose types are not known one by one. `notes` say where they come from."""

    loaded_bytes: int
    expert_bytes: int | None
    sidecar_bytes: int | None
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """A model as a plan sees it: `tensors` are the trunk's with embedding, output and PLE table. With `published` not every type is known."""

    name: str
    hparams: HParams
    tensors: Mapping[str, TensorFact] = field(repr=False)
    published: Published | None = None

    @property
    def has_head(self) -> bool:
        """A draft head is part of it."""
        return f"blk.{self.hparams.n_layer}.nextn.eh_proj.weight" in self.tensors

    @property
    def device_tensors(self) -> list[TensorFact]:
        """What a GPU has: all but the PLE table and the token embedding, which is the output matrix where there is none."""
        on_host = {PLE_TABLE, TOKEN_EMBEDDING} if OUTPUT in self.tensors else {PLE_TABLE}
        return [t for t in self.tensors.values() if t.name not in on_host]


def facts_of(name: str, hparams: HParams, tensors: Mapping[str, TensorInfo]) -> ModelFacts:
    """The facts of a model that is open already."""
    return ModelFacts(name, hparams, {t.name: TensorFact(t.name, t.ne, t.type_id) for t in tensors.values()})


def read_facts(path: str | os.PathLike[str]) -> ModelFacts:
    """The facts of the model at `path` (any shard), from the headers of its files alone: each may end behind its header.

    Raises ModelError for what is wrong with them.
    """
    with open_model(path, whole=False) as file:
        return facts_of(file.hparams.name or Path(file.path).stem, file.hparams, file.tensors)


def published_names() -> list[str]:
    """What `load_published` knows."""
    return sorted(_published()["quants"])


def load_published(name: str, *, mtp: bool = False) -> ModelFacts:
    """The facts of a published quant, `mtp` with its draft head. Raises ValueError naming those that there are, or without a head."""
    document = _published()
    quant = document["quants"].get(name.lower())
    if quant is None:
        raise ValueError(f"like: expected one of {', '.join(published_names())}, found {name!r}")
    if mtp and quant["sidecar_bytes"] is None:
        raise ValueError(
            f"like: expected a quant whose draft head is published, found {name!r}, of which none is known"
        )
    hparams = _hparams(document["model"]["hparams"])
    tensors: dict[str, TensorFact] = {}
    for pattern, layers, ne, type_name in document["model"]["tensors"]:
        kind = TYPES_BY_NAME[type_name].id if type_name is not None else None
        for layer in [] if layers == "mtp" and not mtp else _layers(hparams, layers):
            full = pattern.format(layer)
            tensors[full] = TensorFact(full, tuple(ne), kind)
    totals = Published(
        loaded_bytes=quant["loaded_bytes"],
        expert_bytes=quant["expert_bytes"],
        sidecar_bytes=quant["sidecar_bytes"],
        notes=tuple(quant["notes"]),
    )
    return ModelFacts(quant["title"], hparams, tensors, totals)


def _published() -> dict[str, Any]:
    text = (resources.files("pyluce") / "data" / PUBLISHED_FILE).read_text(encoding="utf-8")
    document: dict[str, Any] = json.loads(text)
    return document


def _layers(h: HParams, which: str) -> list[int]:
    """The layers that a tensor's pattern stands for; for one without a layer any single number does."""
    kinds = {
        "none": [0],
        "all": list(range(h.n_layer)),
        "linear": [i for i, recurrent in enumerate(h.recurrent_layers) if recurrent],
        "full": list(h.full_layers),
        "ple": [h.ple.layer] if h.ple is not None else [],
        "mtp": [h.n_layer],
    }
    return kinds[which]


def _hparams(values: Mapping[str, Any]) -> HParams:
    """HParams from JSON, where tuples are lists."""

    def plain(given: Mapping[str, Any]) -> dict[str, Any]:
        return {key: tuple(value) if isinstance(value, list) else value for key, value in given.items()}

    known = {item.name for item in fields(HParams)}
    if set(values) != known:
        raise ValueError(f"{PUBLISHED_FILE}: expected the hyper-parameters {sorted(known)}, found {sorted(values)}")
    ple = PleParams(**plain(values["ple"])) if values["ple"] is not None else None
    return HParams(**{**plain(values), "ple": ple})
