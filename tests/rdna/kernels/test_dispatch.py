"""Which kernels the host's code chooses on each architecture: every launch is recorded, none is executed.

A kernel that is launched must be in the code object of its architecture and must have code; `device.py` says so
for every launch, here and in the tests that execute.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest

from pyluce.native.errors import UnsupportedOpError
from pyluce.native.ggml import GGMLType
from pyluce.native.luce import Phase
from pyluce.selftest import products
from pyluce.selftest.bench import OpBench
from tests.rdna.kernels.device import FakeDevice
from tests.rdna.kernels.sizes import ALSO_IN_CHUNKS, SMALL, WIDE, case_of

HALF = re.escape("__half")


def names(fake: FakeDevice, compute: Callable[[], object]) -> list[str]:
    """What was launched, as written in the sources."""
    fake.launches.clear()
    compute()
    fake.check()
    return [launch.name for launch in fake.launches]


def expect(found: Iterable[str], *patterns: str) -> None:
    """Each launch is what its pattern says, in order."""
    found = list(found)
    assert len(found) == len(patterns), found
    for name, pattern in zip(found, patterns, strict=True):
        assert re.fullmatch(pattern, name), f"expected {pattern}, found {name} in {found}"


RING = ("F32", "F16", "BF16", "Q8_0", "IQ4_NL", "Q4_K", "Q5_K", "Q6_K")
"""Types of weights that go through shared memory, where their rows are whole and aligned."""
ATTENTION_ANY = ("luce_attn_any_kernel<{0}>", "luce_attn_merge_kernel") * 2
PLE = ("luce_ple_gate_kernel", "luce_ple_conv_kernel")
PLE_LONG = (*PLE, "luce_ple_history_kernel")
OPS: dict[tuple[str, int], tuple[str, ...]] = {
    ("hc_init", 0): ("hc_norm_kernel",),
    ("hc_norm", 0): ("hc_norm_kernel",),
    ("hc_mix", 0): ("hc_mix_kernel",),
    ("hc_combine", 0): ("hc_combine_kernel",),
    ("silu_scale", 0): ("silu_scale_kernel",),
    ("norm_rope", 0): ("luce_norm_rope_kernel",),
    ("qsa_pool", 0): ("luce_qsa_pool_kernel",) * 2,
    ("qsa_attn", 0): tuple(name.format("float") for name in ATTENTION_ANY),
    ("qsa_attn", 1): tuple(name.format(HALF) for name in ATTENTION_ANY),
    ("ple_gate, ple_conv", 0): (*PLE, *PLE, *PLE_LONG, *PLE, *PLE_LONG),
    ("route", 0): (r"route_kernel<\d+, \d+>",),
    ("argmax", 0): ("argmax_parts_kernel", "argmax_kernel"),
    ("moe_combine", 0): ("moe_combine_kernel",),
}


@pytest.mark.parametrize(("kind", "number"), OPS)
def test_ops_of_small_sizes(recorded: FakeDevice, device: str, kind: str, number: int) -> None:
    case = case_of(kind, SMALL, number)
    expect(names(recorded, lambda: case.compute(lambda a: OpBench(a, device=device))), *OPS[kind, number])


def test_f16_keys_of_the_models_heads_take_the_matrix_kernel(recorded: FakeDevice, device: str) -> None:
    for number, pattern in ((0, "luce_attn_any_kernel<float>"), (1, "luce_attn_row_kernel")):
        case = case_of("qsa_attn", WIDE, number)
        found = names(recorded, lambda case=case: case.compute(lambda a: OpBench(a, device=device)))
        expect(found, *(pattern, "luce_attn_merge_kernel") * 2)


@pytest.mark.parametrize(("d", "padded"), [(16, 32), (32, 32), (64, 64), (128, 128)])
def test_gdn_takes_a_scan_for_a_chunk_and_a_row_kernel_for_rows(
    recorded: FakeDevice, device: str, d: int, padded: int
) -> None:
    case = case_of("gdn", replace(SMALL, gd=d))
    exact = "true" if d == 128 else "false"
    expect(
        names(recorded, lambda: case.compute(lambda a: OpBench(a, device=device))),
        f"luce_gdn_prepare_kernel<{padded}, 4>",
        f"luce_gdn_scan_kernel<{padded}, {exact}>",
        f"luce_gdn_finish_kernel<{padded}>",
        *(rf"luce_gdn_row_kernel<{padded}, 4, {exact}, 1>",) * 2,
    )


@pytest.mark.parametrize("type_name", (*products.REQUIRED_TYPES, *products.OTHER_TYPES))
def test_row_products_of_every_type(recorded: FakeDevice, device: str, type_name: str) -> None:
    number = int(GGMLType[type_name])
    width = 512 if type_name == "Q6_K" else 256
    for shape in (products.Shape(width, 40), products.Shape(width, 40, 6, 2)):
        for count, columns in ((1, [1]), (2, [2]), (4, [4]), (8, [4, 4])):
            with products.Product(type_name, shape, Phase.ROW, count, device) as product:
                found = names(recorded, lambda p=product, n=count: p.rows(0, n))
            if type_name in RING:
                expect(found, r"ring_kernel<[124], 256>")
            else:
                expect(found, *(rf"mmv_kernel<\(ggml_type\){number}, {n}>" for n in columns))


@pytest.mark.parametrize("type_name", (*products.REQUIRED_TYPES, *ALSO_IN_CHUNKS))
def test_chunk_products_of_every_type_take_matrix_kernels(recorded: FakeDevice, device: str, type_name: str) -> None:
    number, half = int(GGMLType[type_name]), "__half2" if type_name == "F16" else "__hip_bfloat162"
    with products.Product(type_name, products.Shape(256, 96), Phase.CHUNK, 16, device) as product:
        found = names(recorded, lambda: product.rows(0, 16))
    dense = rf"luce_mmb_dense_kernel<{half}, {2 if type_name == 'F32' else 1}, .*>"
    if type_name == "F32":
        expect(found, *(r"luce_mmb_round_kernel<__hip_bfloat162, 2>",) * 2, dense)
    else:
        widen = rf"luce_mmb_w16<\(ggml_type\){number}, {half}>"
        expect(found, rf"luce_mmb_round_kernel<{half}, 1>", widen, dense)
    with products.Product(type_name, products.Shape(256, 96, 6, 2), Phase.CHUNK, 16, device) as product:
        found = names(recorded, lambda: product.rows(0, 16))
    expect(found[:3], "luce_mmb_count", "luce_mmb_place", "luce_mmb_scatter")
    if type_name == "F32":
        expect(found[3:], "luce_mmb_f32")
    else:
        expect(
            found[3:],
            rf"luce_mmb_round_kernel<{half}, 1>",
            rf"luce_mmb_tile_kernel<\(ggml_type\){number}, {half}, 128>",
        )


@pytest.mark.parametrize("type_name", sorted({*products.OTHER_TYPES} - {*ALSO_IN_CHUNKS}))
def test_chunk_products_that_no_kernel_takes_are_refused(recorded: FakeDevice, device: str, type_name: str) -> None:
    with products.Product(type_name, products.Shape(256, 96), Phase.CHUNK, 16, device) as product:
        with pytest.raises(UnsupportedOpError):
            product.rows(0, 16)
    assert not recorded.launches
