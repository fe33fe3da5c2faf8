"""The smallest sizes that reach every path of the kernels, and the cases of the self-test at them."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Final

import numpy as np

from pyluce.selftest.cases import Case, Sizes, all_cases

SMALL: Final = Sizes(
    rows=3, h=96, s=2, heads=4, n_kv=2, d=32, n_rot=8, di=16, hi=2, n_top=4, tokens=80, gd=16, nk=1, nv=2, experts=20, used=3,
)  # fmt: skip
WIDE: Final = replace(SMALL, d=256, n_rot=32, tokens=72, n_top=6)
"""Heads of the real model, which attention takes to the matrix units when keys are F16."""

ALSO_IN_CHUNKS: Final = ("Q4_0", "Q4_1", "Q5_0", "Q5_1")
"""Types beside the required ones that chunk products take."""

KINDS: Final = (
    *(("hc_init", 0), ("hc_norm", 0), ("hc_mix", 0), ("hc_combine", 0), ("hc_combine", 1), ("silu_scale", 0)),
    *(("norm_rope", 0), ("gdn", 0), ("qsa_pool", 0), ("qsa_select", 0), ("qsa_attn", 0), ("qsa_attn", 1)),
    *(("ple_gate, ple_conv", 0), ("route", 0), ("argmax", 0), ("moe_combine", 0)),
)
"""Kind and number among the cases of that kind."""


@lru_cache(maxsize=4)
def _cases(sizes: Sizes) -> tuple[Case, ...]:
    return tuple(all_cases(np.random.default_rng(1), sizes))


def case_of(kind: str, sizes: Sizes, number: int = 0) -> Case:
    """The n-th case of a kind."""
    return [case for case in _cases(sizes) if case.kind == kind][number]
