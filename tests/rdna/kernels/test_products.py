"""Matrix products of every weight type on the interpreter: against float64, and rows that do not see each other."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pyluce.native.luce import Phase
from pyluce.selftest import products
from tests.rdna.kernels.device import FakeDevice
from tests.rdna.kernels.sizes import ALSO_IN_CHUNKS

ROWS = 8
DENSE, EXPERTS = products.Shape(256, 9), products.Shape(256, 6, 4, 2)
CHUNK, CHUNK_EXPERTS = products.Shape(256, 33), products.Shape(256, 20, 3, 2)


@pytest.mark.parametrize("type_name", (*products.REQUIRED_TYPES, *products.OTHER_TYPES))
@pytest.mark.parametrize("shape", (DENSE, EXPERTS), ids=str)
def test_row_products(executed: FakeDevice, device: str, type_name: str, shape: products.Shape) -> None:
    if type_name == "Q6_K":  # whose fast kernel takes pairs of super-blocks
        shape = replace(shape, n_in=512)
    with products.Product(type_name, shape, Phase.ROW, ROWS, device) as product:
        whole = product.rows(0, ROWS)
        executed.check()
        bound = products.bound(type_name, Phase.ROW, on_gpu=True)
        assert products.relative_error(whole, product.expected()) <= bound
        assert products.rows_that_differ(product, whole, (1, 2, 4)) == []
    executed.check()


@pytest.mark.parametrize("type_name", (*products.REQUIRED_TYPES, *ALSO_IN_CHUNKS))
@pytest.mark.parametrize("shape", (CHUNK, CHUNK_EXPERTS), ids=str)
def test_chunk_products(executed: FakeDevice, device: str, type_name: str, shape: products.Shape) -> None:
    with products.Product(type_name, shape, Phase.CHUNK, 32, device) as product:
        whole = product.rows(0, 32)
        executed.check()
        assert products.relative_error(whole, product.expected()) <= products.ROUNDED
        assert products.rows_that_differ(product, whole, (16,)) == []
    if shape is CHUNK or type_name != "F32":
        assert sum(launch.stats.wmma for launch in executed.launches if launch.stats) > 0
    executed.check()
