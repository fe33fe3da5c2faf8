"""What a draft head adds to a chunk of a prompt: the products that its keys and values take, and no others."""

from __future__ import annotations

from collections import Counter
from math import prod

import pytest

from pyluce.graph import RunnerOptions, TrunkRunner
from pyluce.graph.trunk import GraphKey
from pyluce.native.ggml import ggml_op_name
from pyluce.native.luce import Phase
from pyluce.native.tensors import tensor_struct
from pyluce.options import DEFAULT_MODEL
from pyluce.speculation import fill_share
from pyluce.weights import open_model
from tests.support.device import only_cpu
from tests.support.real_model import require_libraries

ROWS = 64


def products(mtp: bool) -> Counter[str]:
    """Multiplications of a chunk graph's products, a row, by the name of the weight."""
    found: Counter[str] = Counter()
    names = {b"MUL_MAT", b"MUL_MAT_ID"}
    with TrunkRunner(DEFAULT_MODEL, RunnerOptions(n_ctx=256, mtp=mtp)) as runner:
        graph = runner._graphs.get(GraphKey(Phase.CHUNK, ROWS, 0, runner._span(ROWS)))
        for node in graph.graph.nodes():
            header = tensor_struct(node)
            if ggml_op_name(header.op) in names:
                weight = header.src[0]
                found[tensor_struct(weight).name.decode()] += tensor_struct(weight).ne[0] * prod(header.ne) // ROWS
    return found


@only_cpu
def test_keys_and_values_alone() -> None:
    require_libraries()
    without, with_head = products(mtp=False), products(mtp=True)
    added = with_head - without
    assert set(added) == {
        f"blk.8.{part}.weight" for part in ("nextn.eh_proj", "hc_attn_down", "hc_attn_up", "attn_k", "attn_v")
    }
    assert not without - with_head
    with open_model(DEFAULT_MODEL) as model:
        head = sum(without.values()) + model.hparams.n_embd * model.hparams.n_vocab
        assert sum(added.values()) / head == pytest.approx(fill_share(model), rel=0.03)
