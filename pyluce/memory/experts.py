"""Where a model's routed experts would go: what one takes, which are hot, and what the device that holds them needs besides."""

from __future__ import annotations

from dataclasses import dataclass

from pyluce.memory.facts import ModelFacts, TensorFact
from pyluce.placement.counts import RouteShape
from pyluce.placement.hot import HotSet, choose_hot, even_hot
from pyluce.placement.options import PlacementOptions
from pyluce.placement.table_file import read_routes_for
from pyluce.weights.hparams import HParams

F32_BYTES = 4


@dataclass(frozen=True, slots=True)
class HotPlan:
    """The hot set that a placement begins with, its bytes on the target, and the share of a table's picks that it covers."""

    hot: HotSet
    n_bytes: int
    n_experts: int
    coverage: float | None = None
    learns: bool = False

    def __str__(self) -> str:
        covered = "" if self.coverage is None else f", {self.coverage:.1%} of the table's picks"
        learning = ", learned while serving" if self.learns else ""
        return f"{self.hot.n_hot:,} of {self.n_experts:,} experts{covered}{learning}"


def route_shape(hparams: HParams) -> RouteShape:
    """The routed layers of a model."""
    return RouteShape(hparams.n_layer, hparams.n_expert, hparams.n_expert_used)


def routed_experts(facts: ModelFacts) -> list[TensorFact]:
    """The stacks of the trunk's layers; those of a draft head stay on the target."""
    return [
        t for t in facts.tensors.values() if t.is_expert and t.layer is not None and t.layer < facts.hparams.n_layer
    ]


def expert_bytes(facts: ModelFacts) -> tuple[int, ...]:
    """Gate, up and down of one expert, for each layer. Where single types are not published, the mean of the total.

    Raises ValueError where not even that is published.
    """
    h = facts.hparams
    if facts.published is not None:
        total = facts.published.expert_bytes
        if total is None:
            raise ValueError(
                f"{facts.name}: how large the routed experts are is not published, so no split can be planned"
            )
        return (total // (h.n_layer * h.n_expert),) * h.n_layer
    sizes = [0] * h.n_layer
    for t in routed_experts(facts):
        assert t.layer is not None
        sizes[t.layer] += t.n_bytes // h.n_expert
    return tuple(sizes)


def plan_hot(facts: ModelFacts, placement: PlacementOptions) -> HotPlan | None:
    """The hot set that a model is loaded with; None without a placement. Raises RoutesError for a table that does not fit it."""
    if placement.expert_placement is None:
        return None
    shape, sizes = route_shape(facts.hparams), expert_bytes(facts)
    n_experts = shape.n_layer * shape.n_expert
    if placement.table is None:
        hot = even_hot(shape, sizes, placement.budget_bytes)
        return HotPlan(hot, hot.n_bytes(sizes), n_experts, learns=True)
    counts = read_routes_for(placement.table, shape)
    hot = choose_hot(counts, sizes, placement.budget_bytes)
    return HotPlan(hot, hot.n_bytes(sizes), n_experts, hot.coverage(counts), placement.learns)


def split_graph_bytes(hparams: HParams, rows: int) -> int:
    """Intermediate values of `rows` rows on the device that holds the experts, all in F32: the rows, gate, up and their product
    for each pick, and the picks' vectors, which go back. By formula: nothing is shared among them.
    """
    pick = 3 * hparams.n_ff_exp + hparams.n_embd
    return rows * F32_BYTES * (hparams.n_embd + hparams.n_expert_used * (pick + 1))
