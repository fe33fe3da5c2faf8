"""The experts that a step picked, brought together so that one read gets them: only where somebody counts them.

Every layer's ids are copied into one tensor behind the layer; what the layers compute stays as it is.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from pyluce.graph.ops import GraphScope
from pyluce.native import ggml
from pyluce.native.structs import GGMLType
from pyluce.native.tensors import TensorArena, tensor_get, tensor_shape
from pyluce.weights import HParams


class RouteSink(Protocol):
    """Who counts (`pyluce.placement.recorder.RouteRecorder`)."""

    def add(self, picks: npt.NDArray[np.int32]) -> None:
        """The picks [n_layer, rows, n_used] of a step, ids of experts."""


def new_picks(arena: TensorArena, hparams: HParams, n_rows: int) -> int:
    """The tensor for all layers, I32 [n_used, T, n_layer]."""
    tensor = arena.new_tensor(GGMLType.I32, (hparams.n_expert_used, n_rows, hparams.n_layer), "picks")
    ggml.ggml_set_output(tensor)
    return tensor


def copy_picks(g: GraphScope, picks: int, layer: int, ids: int) -> None:
    """Copy a layer's ids [n_used, T] to their place, next in the graph."""
    n_used, n_rows, _, _ = tensor_shape(picks)
    place = ggml.ggml_view_2d(g.ctx, picks, n_used, n_rows, 4 * n_used, 4 * n_used * n_rows * layer)
    g.now(ggml.ggml_cpy(g.ctx, ids, place))


def read_picks(picks: int, n_rows: int) -> npt.NDArray[np.int32]:
    """[n_layer, n_rows, n_used] of the step that has ended; further rows are padding."""
    n_used, padded, n_layer, _ = tensor_shape(picks)
    found: npt.NDArray[np.int32] = tensor_get(picks, np.int32, (n_layer, padded, n_used))
    return found[:, :n_rows]


def count_picks(picks: int, n_rows: int, *sinks: RouteSink | None) -> None:
    """Tell everybody who counts what the first `n_rows` rows of a step picked."""
    found = read_picks(picks, n_rows)
    for sink in sinks:
        if sink is not None:
            sink.add(found)
