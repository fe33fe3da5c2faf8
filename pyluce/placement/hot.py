"""The hot set: experts that are on the target as well, chosen by how often they were picked, under a budget of bytes."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from pyluce.placement.counts import Counts, RouteShape

DEFAULT_BUDGET_MIB: Final = 8192
NOT_HERE: Final = -1


@dataclass(frozen=True, slots=True)
class HotSet:
    """For each layer the ids of its hot experts; an id's place in the list is its slot on the target."""

    layers: tuple[tuple[int, ...], ...]

    @classmethod
    def empty(cls, n_layer: int) -> HotSet:
        """No expert is hot."""
        return cls(((),) * n_layer)

    @property
    def n_hot(self) -> int:
        """Hot experts of all layers."""
        return sum(len(ids) for ids in self.layers)

    def n_bytes(self, expert_bytes: Sequence[int]) -> int:
        """Bytes on the target, with the bytes of one expert of each layer."""
        return sum(len(ids) * size for ids, size in zip(self.layers, expert_bytes, strict=True))

    def check(self, shape: RouteShape) -> None:
        """Raise ValueError unless every layer is there and its ids are different ones in range."""
        if len(self.layers) != shape.n_layer:
            raise ValueError(f"hot experts: expected {shape.n_layer} layers, found {len(self.layers)}")
        for layer, ids in enumerate(self.layers):
            wrong = [e for e in ids if not 0 <= e < shape.n_expert]
            if wrong:
                raise ValueError(
                    f"hot experts of layer {layer}: expected ids from 0 to {shape.n_expert - 1}, found {wrong[0]}"
                )
            if len(set(ids)) != len(ids):
                raise ValueError(f"hot experts of layer {layer}: expected different ids, found one twice")

    def target_table(self, layer: int, n_expert: int) -> npt.NDArray[np.int32]:
        """I32 [n_expert]: where on the target an expert is, -1 if it is not there."""
        table = np.full(n_expert, NOT_HERE, np.int32)
        table[list(self.layers[layer])] = np.arange(len(self.layers[layer]), dtype=np.int32)
        return table

    def expert_table(self, layer: int, n_expert: int) -> npt.NDArray[np.int32]:
        """I32 [n_expert]: an expert's id on the expert device, which has them all; -1 for those that the target computes."""
        table = np.arange(n_expert, dtype=np.int32)
        table[list(self.layers[layer])] = NOT_HERE
        return table

    def replaced(self, layer: int, slot: int, expert: int) -> HotSet:
        """The set with another expert in a slot. Raises ValueError for a slot that is not there or an expert that is hot already."""
        ids = self.layers[layer]
        if not 0 <= slot < len(ids):
            raise ValueError(f"layer {layer}: expected a slot below {len(ids)}, found {slot}")
        if expert in ids:
            raise ValueError(f"layer {layer}: expected an expert that is not hot, found {expert}")
        changed = (*ids[:slot], expert, *ids[slot + 1 :])
        return HotSet((*self.layers[:layer], changed, *self.layers[layer + 1 :]))

    def coverage(self, counts: Counts) -> float:
        """The share of all picks whose expert is hot; 0 when nothing was picked."""
        total = int(counts.sum())
        held = sum(int(counts[layer, list(ids)].sum()) for layer, ids in enumerate(self.layers) if ids)
        return held / total if total else 0.0


def choose_hot(counts: Counts, expert_bytes: Sequence[int], budget_bytes: int) -> HotSet:
    """The hot set of counts [n_layer, n_expert] under a budget, by the reference system's greedy rule.

    Experts of a layer are ranked by their count, equal ones by their id. Among the layers whose next expert still fits, the one with
    the most picks a byte is taken; of equal ones that with the larger count, then the lower layer; until nothing fits. Experts
    that were never picked may fill what is left. `expert_bytes`: gate, up and down of one expert of each layer.
    """
    n_layer, n_expert = counts.shape
    if len(expert_bytes) != n_layer:
        raise ValueError(f"expert_bytes: expected {n_layer} layers, found {len(expert_bytes)}")
    if min(expert_bytes, default=1) <= 0 or budget_bytes < 0:
        raise ValueError(
            f"expected positive sizes and a budget of at least 0, found {min(expert_bytes)}, {budget_bytes}"
        )
    ranked = [sorted(range(n_expert), key=lambda e, row=row: (-row[e], e)) for row in counts.tolist()]  # type: ignore[misc]
    numbers: list[list[int]] = counts.tolist()
    chosen: list[list[int]] = [[] for _ in range(n_layer)]
    left = budget_bytes

    common = math.lcm(*expert_bytes)  # so that picks a byte are compared as whole numbers, exactly

    def entry(layer: int) -> tuple[int, int, int]:
        count = numbers[layer][ranked[layer][len(chosen[layer])]]
        return (-count * (common // expert_bytes[layer]), -count, layer)

    heap = [entry(layer) for layer in range(n_layer)] if n_expert else []
    heapq.heapify(heap)
    while heap:
        _, _, layer = heapq.heappop(heap)
        if expert_bytes[layer] > left:
            continue  # what is left only shrinks: nothing more of this layer will fit
        left -= expert_bytes[layer]
        chosen[layer].append(ranked[layer][len(chosen[layer])])
        if len(chosen[layer]) < n_expert:
            heapq.heappush(heap, entry(layer))
    return HotSet(tuple(map(tuple, chosen)))


def even_hot(shape: RouteShape, expert_bytes: Sequence[int], budget_bytes: int) -> HotSet:
    """Where nothing is known yet: as many slots for each layer as fit, lower layers first where one more does, ids from 0."""
    slots = [0] * shape.n_layer
    left = budget_bytes
    grew = True
    while grew:
        grew = False
        for layer, size in enumerate(expert_bytes):
            if slots[layer] < shape.n_expert and size <= left:
                slots[layer] += 1
                left -= size
                grew = True
    return HotSet(tuple(tuple(range(n)) for n in slots))
