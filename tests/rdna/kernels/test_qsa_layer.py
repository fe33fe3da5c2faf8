"""A sparse attention layer's launches of a row graph on the interpreter: fewer than nodes, and the bits of the nodes."""

from __future__ import annotations

import numpy as np
import pytest

from tests.graph.test_qsa_layer import SHAPES, as_graph, differing, node_by_node
from tests.rdna.kernels.device import FakeDevice

JOBS, SELECT = ("luce_qsa_jobs_kernel",), ("luce_score_rows_kernel", "luce_select_kernel")
ROW, ANY = ("luce_attn_row_kernel", "luce_attn_merge_kernel"), ("luce_attn_any_kernel", "luce_attn_merge_kernel")
LAUNCHES = {
    "model": (*JOBS, *SELECT, *ROW),
    "model, all": (*JOBS, *ROW),
    "small": (*JOBS, *SELECT, *ANY),
    "small, all": (*JOBS, *ANY),
}


@pytest.mark.parametrize("name", SHAPES)
def test_a_layers_graph_is_its_nodes_in_fewer_launches(executed: FakeDevice, device: str, name: str) -> None:
    found = as_graph(device, SHAPES[name])
    executed.check()
    assert tuple(launch.name.split("<")[0] for launch in executed.launches) == LAUNCHES[name]
    assert np.isfinite(found[0]).all()
    assert differing(found, node_by_node(device, SHAPES[name])) == []
    executed.check()
