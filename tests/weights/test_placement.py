"""Weights in ggml's hands: mapped where they lie, repacked where ggml has a faster product, never the PLE table."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pyluce.native import ggml
from pyluce.native.backend import Backend, GraphAllocator, cpu_repack_buffer_type
from pyluce.native.quants import dequantize
from pyluce.native.structs import GGMLType
from pyluce.native.tensors import Graph, TensorArena, tensor_get, tensor_set, tensor_struct
from pyluce.weights import ModelError, ModelFile, open_model, place_weights, upload
from pyluce.weights.placement import device_tensors
from pyluce.weights.tensors import PLE_TABLE
from tests.weights.conftest import make_draft
from tools.synth import MICRO, Shape, write_model

pytestmark = pytest.mark.usefixtures("libraries")

SHAPE = replace(
    MICRO, n_embd=256, n_ff_exp=256, n_ff_shexp=256, n_expert=2, ssm_state=64, ssm_v_heads=4, ssm_k_heads=2, n_head=8
)
"""Rows that every type fits, and no more than that: ggml's quantisers are slow."""
TYPES = ["F32", "F16", "Q8_0", "Q4_K", "IQ4_NL"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("placement")


def model_path(folder: Path, type_name: str) -> Path:
    path = folder / f"{type_name}.gguf"
    return path if path.exists() else write_model(path, SHAPE.with_type(type_name))[0]


@pytest.fixture
def backend() -> Iterator[Backend]:
    with Backend(n_threads=1) as backend:
        yield backend


def product(backend: Backend, weight: int, x: np.ndarray) -> np.ndarray:
    """weight [k, n] times x [m rows of k] -> [m rows of n], by ggml."""
    with TensorArena.for_counts(8, 8) as arena, GraphAllocator(backend) as allocator:
        rows = arena.new_tensor(GGMLType.F32, (x.shape[1], x.shape[0]))
        ggml.ggml_set_input(rows)
        result = ggml.ggml_mul_mat(arena.ptr, weight, rows)
        graph = Graph(arena, 8)
        graph.expand(result)
        allocator.alloc(graph)
        tensor_set(rows, x)
        backend.compute(graph)
        return tensor_get(result, np.float32, (x.shape[0], tensor_struct(result).ne[0]))


def values(model: ModelFile, name: str) -> np.ndarray:
    info = model.tensors[name]
    return dequantize(info.type_id, model.read(info).reshape(-1, info.row_bytes), info.ne[0])


@pytest.mark.parametrize("repack", [False, True])
@pytest.mark.parametrize("type_name", TYPES)
def test_products_of_placed_weights(folder: Path, backend: Backend, type_name: str, repack: bool) -> None:
    x = np.random.default_rng(1).standard_normal((5, 256), np.float32)
    with open_model(model_path(folder, type_name)) as model, place_weights(model, backend, repack=repack) as weights:
        for name in ("blk.0.attn_qkv.weight", "blk.3.attn_q.weight", "output.weight"):
            expected = x @ values(model, name).T
            found = product(backend, weights.tensor(name), x)
            assert np.abs(found - expected).max() < 0.03 * np.abs(expected).max()


@pytest.mark.parametrize("type_name", TYPES)
def test_what_goes_where(folder: Path, backend: Backend, type_name: str) -> None:
    with open_model(model_path(folder, type_name)) as model, place_weights(model, backend, repack=True) as weights:
        report = weights.report()
        table = model.tensors[PLE_TABLE]
        assert report.mapped_bytes + report.repacked_bytes + table.nbytes == model.size_bytes
        assert report.mapped_tensors + report.repacked_tensors == len(model.tensors) - 1
        assert report.ple_table_bytes == table.nbytes
        assert weights.get(PLE_TABLE) is None
        with pytest.raises(KeyError):
            weights.tensor(PLE_TABLE)
        inside = [n for n, t in model.tensors.items() if n != PLE_TABLE and is_mapped(model, weights.tensor(n), t)]
        assert len(inside) == report.mapped_tensors
        assert "token_embd.weight" in inside and "blk.0.ssm_a" in inside
        if type_name in ("F32", "F16"):
            assert report.repacked_tensors == 0
        if type_name == "Q4_K" and cpu_repack_buffer_type() is not None and report.repacked_tensors:
            assert "blk.0.ffn_up_exps.weight" not in inside and "output.weight" not in inside


def is_mapped(model: ModelFile, tensor: int, info: object) -> bool:
    from pyluce.weights import TensorInfo

    assert isinstance(info, TensorInfo)
    return tensor_struct(tensor).data == model.address(info)


def test_without_repacking_everything_is_mapped(folder: Path, backend: Backend) -> None:
    with open_model(model_path(folder, "Q4_K")) as model, place_weights(model, backend, repack=False) as weights:
        assert weights.report().repacked_bytes == 0
        for name, info in model.tensors.items():
            if name != PLE_TABLE:
                assert is_mapped(model, weights.tensor(name), info)


def test_progress(folder: Path, backend: Backend) -> None:
    calls: list[tuple[str, int, int]] = []
    with (
        open_model(model_path(folder, "Q4_K")) as model,
        place_weights(model, backend, repack=True, progress=lambda *call: calls.append(call)) as weights,
    ):
        report = weights.report()
    assert len(calls) == report.repacked_tensors
    if calls:
        assert {c[0] for c in calls} == {"weights"} and calls[-1][1:] == (report.repacked_bytes, report.repacked_bytes)
        assert [c[1] for c in calls] == sorted(c[1] for c in calls)


def test_shards(folder: Path, backend: Backend) -> None:
    paths = write_model(folder / "sharded.gguf", SHAPE.with_type("Q4_K"), shards=3)
    with open_model(paths[1]) as model, open_model(model_path(folder, "Q4_K")) as whole:
        with place_weights(model, backend) as weights, place_weights(whole, backend) as expected:
            assert weights.report() == expected.report()
            for name in ("blk.0.ssm_a", "blk.3.attn_k_norm.weight"):
                shape = model.tensors[name].ne
                assert np.array_equal(
                    tensor_get(weights.tensor(name), np.float32, shape), values(whole, name).reshape(shape)
                )


def test_the_model_cannot_be_closed_before_its_weights(folder: Path, backend: Backend) -> None:
    model = open_model(model_path(folder, "F32"))
    weights = place_weights(model, backend)
    with pytest.raises(ValueError, match="still in use: close the placed weights first"):
        model.close()
    tensor_get(weights.tensor("blk.0.ssm_a"), np.float32, 4)
    weights.close()
    weights.close()
    model.close()


def test_truncated_while_weights_are_copied(tmp_path: Path, backend: Backend) -> None:
    path = write_model(tmp_path / "m.gguf", SHAPE.with_type("Q4_K"))[0]
    with open_model(path) as model:
        with place_weights(model, backend) as weights:
            if not weights.report().repacked_tensors:
                pytest.skip("ggml repacks nothing on this machine")
        with path.open("r+b") as file:
            file.truncate(model.tensors["blk.2.ffn_up_exps.weight"].offset + 100)
        with pytest.raises(ModelError, match="truncated after it was opened"):
            place_weights(model, backend)


def test_taken_apart_attention(tmp_path: Path, backend: Backend) -> None:
    """A fused matrix of a full layer is three tensors in one range of the map."""
    draft = make_draft(SHAPE)
    parts = [draft.tensors.pop(f"blk.3.attn_{p}.weight") for p in "qkv"]
    raw = [np.concatenate([c.reshape(-1).view(np.uint8) for c in p.data()]) for p in parts]
    rows = sum(p.ne[1] for p in parts)
    fused = replace(parts[0], name="blk.3.attn_qkv.weight", ne=(256, rows), data=lambda: iter(raw))
    draft.tensors[fused.name] = fused
    with open_model(draft.write(tmp_path / "m.gguf")) as model, place_weights(model, backend) as weights:
        for part, expected in zip(parts, raw, strict=True):
            found = tensor_get(weights.tensor(part.name), np.uint8, part.nbytes)
            assert np.array_equal(found, expected)


MEASURE = """
import sys, psutil
from pyluce.native.backend import Backend
from pyluce.weights import open_model, place_weights
from pyluce.weights.tensors import PLE_TABLE
def mapped():
    return sum(m.rss for m in psutil.Process().memory_maps(grouped=False) if m.path == sys.argv[1])
backend = Backend(n_threads=1)
model = open_model(sys.argv[1])
weights = place_weights(model, backend)
print(model.tensors[PLE_TABLE].nbytes, mapped(), weights.report().repacked_bytes)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_placing_touches_neither_the_table_nor_the_map(folder: Path) -> None:
    shape: Shape = replace(SHAPE.with_type("Q4_K"), table="F32", ple_base=10007)
    path = write_model(folder / "large-table.gguf", shape)[0]
    command = [sys.executable, "-c", MEASURE, str(path)]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    table_bytes, mapped, _ = map(int, output.split())
    assert table_bytes > 8 << 20 and mapped < 1 << 20


@pytest.mark.parametrize("piece_bytes", [1000, 1 << 20])
@pytest.mark.parametrize("tied", [False, True])
def test_copied_to_a_device_every_tensor_has_the_bytes_of_the_file(
    folder: Path, backend: Backend, monkeypatch: pytest.MonkeyPatch, tied: bool, piece_bytes: int
) -> None:
    calls: list[tuple[str, int, int]] = []
    monkeypatch.setattr(upload, "PIECE_BYTES", piece_bytes)
    with open_model(model_path(folder, "Q4_K")) as model:
        if tied:
            del model.tensors["output.weight"]
        with place_weights(model, backend, copy=True, progress=lambda *call: calls.append(call)) as weights:
            report = weights.report()
            names = {t.name for t in device_tensors(model)}
            assert ("token_embd.weight" in names) == tied and PLE_TABLE not in names
            assert set(model.tensors) - names == {PLE_TABLE} | (set() if tied else {"token_embd.weight"})
            for name in names:
                info, tensor = model.tensors[name], weights.tensor(name)
                assert not is_mapped(model, tensor, info)
                assert np.array_equal(tensor_get(tensor, np.uint8, info.nbytes), model.read(info)), name
            assert report.device_bytes == sum(model.tensors[n].nbytes for n in names) == calls[-1][1] == calls[-1][2]
            assert report.device_tensors == len(names) and report.mapped_tensors == 1
            assert len(calls) == sum(-(-model.tensors[n].nbytes // piece_bytes) for n in names)


def test_an_upload_that_is_interrupted_frees_its_memory(folder: Path, backend: Backend) -> None:
    def interrupt(stage: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    with open_model(model_path(folder, "Q4_K")) as model:
        with pytest.raises(KeyboardInterrupt):
            place_weights(model, backend, copy=True, progress=interrupt)
        info = model.tensors["output.weight"]
        model.tensors["output.weight"] = replace(info, offset=info.offset + (1 << 40))
        with pytest.raises(ModelError, match="truncated"):
            place_weights(model, backend, copy=True)
