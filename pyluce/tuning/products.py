"""The matrix products of a model, each once: what there may be a choice for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from pyluce.weights import HParams
from pyluce.weights.tensors import OUTPUT, PLE_TABLE, TOKEN_EMBEDDING

EACH_INPUT = "ffn_down_exps.weight"
"""The experts' matrix that has an input for each pick; the others read one for all of a row's."""


class Matrix(Protocol):
    """A tensor of a model's header."""

    @property
    def name(self) -> str:
        """Its name in the file."""

    @property
    def ne(self) -> tuple[int, ...]:
        """Its shape, fastest axis first."""

    @property
    def type_id(self) -> int | None:
        """Its ggml type, None where that is not known."""


@dataclass(frozen=True, slots=True, order=True)
class Product:
    """Weights [k, m] of a ggml type; with experts, [k, m, n_expert], of which a row picks n_used. n_used 0: no experts.

    each_input: every pick has an input of its own. last_rows: only the last rows of a prompt are multiplied by it (the output matrix).
    """

    type_id: int
    k: int
    m: int
    n_used: int = 0
    n_expert: int = 0
    each_input: bool = False
    last_rows: bool = False

    @property
    def key(self) -> tuple[int, int, int, int]:
        """What names it in a table: type, k, m, n_used."""
        return self.type_id, self.k, self.m, self.n_used


def model_products(hparams: HParams, tensors: Iterable[Matrix]) -> list[Product]:
    """The products of the trunk's graphs, in order of their names in a table. A draft head is left out: it may be used or not."""
    head = f"blk.{hparams.n_layer}."
    matrices = {t.name: t for t in tensors if _is_matrix(t) and not t.name.startswith((head, "nextn."))}
    if OUTPUT in matrices:
        matrices.pop(TOKEN_EMBEDDING, None)
    found: dict[tuple[int, int, int, int], Product] = {}
    for name, t in matrices.items():
        assert t.type_id is not None
        experts = len(t.ne) == 3
        made = Product(
            t.type_id,
            t.ne[0],
            t.ne[1] if len(t.ne) > 1 else 1,
            hparams.n_expert_used if experts else 0,
            t.ne[2] if experts else 0,
            name.endswith(EACH_INPUT),
            name in (OUTPUT, TOKEN_EMBEDDING),
        )
        found.setdefault(made.key, made)
    return [found[key] for key in sorted(found)]


def _is_matrix(t: Matrix) -> bool:
    beside = ("norm", "conv1d", "ssm_a", ".bias")
    return t.type_id is not None and t.name != PLE_TABLE and not any(part in t.name for part in beside)
