"""The meanings written by hand against the manual's text, for those whose text compiles."""

from __future__ import annotations

import importlib

import numpy as np
import pytest

from tests.rdna.decode import meaning, operand_bits, plain_name
from tests.rdna.errors import UnknownInstruction
from tests.rdna.overrides import MEANINGS
from tests.rdna.pcode import Meaning, compile_text

# the text is right for exact arithmetic only: floor(x + 0.5) rounds in float32; 1 ulp functions flush denormals
INEXACT = {"v_rndne_f32", "s_rndne_f32"} | {
    f"v_{n}_f32" for n in ("rcp", "rcp_iflag", "rsq", "sqrt", "sin", "cos", "log")
}
INEXACT |= {f"v_s_{n}_f32" for n in ("rcp", "rsq", "sqrt", "log")} | {"v_div_fmas_f32"}


def by_text(arch: str) -> dict[str, Meaning]:
    """What the text of each handwritten meaning compiles to, where it does."""
    found: dict[str, Meaning] = {}
    enums = importlib.import_module(f"tinygrad.runtime.autogen.amd.{arch}.enum")
    for table in ("VOP1Op", "VOP2Op", "VOP3Op", "VOPCOp", "SOP1Op", "SOP2Op"):
        for op in getattr(enums, table):
            name, text = plain_name(op), meaning(arch, op)
            if name in MEANINGS and text is not None and name not in found:
                bits = operand_bits(arch, op)
                width = {f"S{i}": bits.get(f"src{i}", ("", 32))[1] for i in range(3)}
                try:
                    found[name] = compile_text(name, text, width, name.startswith("s_"))
                except UnknownInstruction:
                    continue
    return found


@pytest.mark.parametrize("arch", ["rdna3", "rdna4"])
def test_same_as_the_text(arch: str) -> None:
    rng = np.random.default_rng(1)
    texts = {name: m for name, m in by_text(arch).items() if name not in INEXACT}
    assert len(texts) >= 12, sorted(texts)
    special = np.array(
        [0, 0x80000000, 0x7F800000, 0xFF800000, 0x7FC00000, 1, 0x80000001, 0x3F800000, 0xBF000000], np.uint32
    )
    grid = np.array(np.meshgrid(special, special)).reshape(2, -1)
    inputs = {f"S{k}": rng.integers(0, 2**32, 600, dtype=np.uint64).astype(np.uint32) for k in range(3)}
    inputs["S0"][:81], inputs["S1"][:81] = grid
    inputs["S1"][300:] &= 31
    inputs["laneId"] = np.arange(600, dtype=np.uint32) % 32
    for name, text in texts.items():
        own = MEANINGS[name]
        wide = inputs
        if name.endswith("f64"):
            wide = {k: x.astype(np.uint64) << np.uint64(32) for k, x in inputs.items()}
        with np.errstate(all="ignore"):
            expected = dict(zip(text.outputs, text.function(*[wide[k] for k in text.inputs]), strict=True))
            got = dict(zip(own.outputs, own.function(*[wide[k] for k in own.inputs]), strict=True))
        for output in own.outputs:
            a, b = np.asarray(got[output]), np.asarray(expected[output])
            if "_f32" in name and a.dtype == np.uint32:  # NaNs: any
                a, b = (np.where(np.isnan(x.view(np.float32)), 0, x) for x in (a, b))
            assert np.array_equal(a, b), (name, output, np.flatnonzero(a != b)[:5])
