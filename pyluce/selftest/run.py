"""The self-test: cases of every op kind and products of every weight type, one result each.

The reference is float64 on the host, from the formulas (`reference.py`) and from the weights as they are stored, so the CPU's own
kernels are tested the same way as a GPU's.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from pyluce.native import load_libraries
from pyluce.native.backend import Backend
from pyluce.native.devices import find_device, parse_device
from pyluce.native.errors import UnsupportedOpError
from pyluce.native.ggml import GGMLType
from pyluce.native.luce import Phase
from pyluce.selftest import cases, products
from pyluce.selftest.bench import Array, OpBench, Weight
from pyluce.selftest.expected import describe_device, missing_kernels
from pyluce.weights.placement import repacked_tensors
from pyluce.weights.tensors import TensorInfo

SEEDS: Final = range(3)
SHAPES: Final = (
    products.Shape(512, 96),
    products.Shape(768, 33),
    products.Shape(512, 64, 8, 3),
    products.Shape(256, 48, 8, 3, shared_input=False),
)
MODEL_SHAPES: Final = (products.Shape(2560, 640), products.Shape(2560, 16, 512, 10))
COUNTS: Final = {Phase.ROW: products.ROW_COUNTS, Phase.CHUNK: (16, 48, 128)}


@dataclass(frozen=True, slots=True)
class Result:
    """One test. `error` over `bound` as in `Case.error`; `note`: why it failed or what the device refuses; `paths`: the kernels that ran."""

    op: str
    shape: str
    error: float
    bound: float
    seconds: float
    ok: bool
    note: str = ""
    paths: tuple[str, ...] = ()

    @property
    def refused(self) -> bool:
        """The device does not compute this, by its own word, and needs not."""
        return self.ok and bool(self.note)


def run(device: str, *, model_sizes: bool = True) -> Iterator[Result]:
    """Every test on a device; `model_sizes`: at the real model's widths too (minutes on a CPU).

    A test fails that took none of the kernels which this device should (`expected.py`).
    Raises ValueError for what is no device's name, NativeError when the device is not there.
    """
    load_libraries(parse_device(device)[0])
    find_device(device)
    description = describe_device(device)
    for result in _all(device, model_sizes):
        missing = [] if result.note else missing_kernels(description, result.op, result.shape, result.paths)
        if missing:
            note = f"expected the kernel {' and '.join(missing)}, found {', '.join(result.paths) or 'none'}"
            result = replace(result, ok=False, note=note)
        yield result


def _all(device: str, model_sizes: bool) -> Iterator[Result]:
    on_gpu = parse_device(device)[0] != "cpu"
    for seed in SEEDS:
        rng = np.random.default_rng(seed)
        for case in cases.all_cases(rng, cases.random_sizes(rng)):
            yield _op(case, device, on_gpu)
    if model_sizes:
        rng = np.random.default_rng(len(SEEDS))
        for case in cases.all_cases(rng, cases.MODEL):
            yield _op(case, device, on_gpu)
    for type_name in (*products.REQUIRED_TYPES, *products.OTHER_TYPES):
        required = type_name in products.REQUIRED_TYPES
        wide = MODEL_SHAPES if model_sizes and type_name in ("Q8_0", "IQ4_NL") else ()
        for shape in (*SHAPES, *wide) if required else SHAPES[::2]:
            for phase in (Phase.ROW, Phase.CHUNK):
                yield _product(type_name, shape, phase, device, required)
    if not on_gpu:
        yield from _repacked()


def _repacked() -> Iterator[Result]:
    """Products by the matrices that loading lays out anew for this CPU."""
    for type_name, shape in itertools.product(products.REPACKED_TYPES, SHAPES[::2]):
        ne = (shape.n_in, shape.n_out, *([shape.n_expert] if shape.n_expert else []))
        info = TensorInfo("weight", GGMLType[type_name], ne, 0, 0, 0)
        with Backend("cpu") as backend:
            layout, taken = repacked_tensors([info], max(1, shape.n_used), backend)
        if taken:
            for phase in (Phase.ROW, Phase.CHUNK):
                yield _product(type_name, shape, phase, "cpu", True, layout)


def _op(case: cases.Case, device: str, on_gpu: bool) -> Result:
    bound = case.bound_on(on_gpu)

    def test() -> tuple[float, str]:
        return case.error(case.compute(open_bench)), ""

    def open_bench(arrays: Mapping[str, Array | Weight]) -> OpBench:
        benches.append(OpBench(arrays, device=device))
        return benches[-1]

    benches: list[OpBench] = []
    result = _timed(Result(case.kind, case.shape, np.inf, bound, 0.0, False), test, required=True)
    return replace(result, paths=tuple(dict.fromkeys(path for bench in benches for path in bench.paths)))


def _product(
    type_name: str, shape: products.Shape, phase: Phase, device: str, required: bool, weight_type: int | None = None
) -> Result:
    kind = "mul_mat_id" if shape.n_expert else "mul_mat"
    bound = products.bound(type_name, phase, device != "cpu")
    counts = COUNTS[phase]

    def test() -> tuple[float, str]:
        with products.Product(type_name, shape, phase, max(counts), device, weight_type=weight_type) as product:
            whole = product.rows(0, max(counts))
            differ = products.rows_that_differ(product, whole, counts)
            note = f"not what the whole graph gives: {differ[0]} ({len(differ)} in all)" if differ else ""
            paths.extend(product.bench.paths)
            return products.relative_error(whole, product.expected()), note

    paths: list[str] = []
    name = f"{kind} {type_name} {phase.name.lower()}{' repacked' if weight_type is not None else ''}"
    result = _timed(Result(name, str(shape), np.inf, bound, 0.0, False), test, required)
    return replace(result, paths=tuple(paths))


def _timed(result: Result, test: Callable[[], tuple[float, str]], required: bool) -> Result:
    started = time.perf_counter()
    try:
        error, note = test()
    except UnsupportedOpError as failure:
        return replace(result, ok=not required, note=str(failure).splitlines()[0])
    return replace(
        result, error=error, seconds=time.perf_counter() - started, ok=error <= result.bound and not note, note=note
    )
