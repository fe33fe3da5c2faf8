"""The tensor table: what must be there, in which shape and type, and what may not be there."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pyluce.weights import ModelError, ModelFile, MtpStatus, open_model
from pyluce.weights.catalogue import check_model
from pyluce.weights.ggml_types import BF16, F16, TYPES
from pyluce.weights.hparams import read_hparams
from pyluce.weights.shards import Shard
from pyluce.weights.tensors import TensorInfo
from tests.weights.conftest import Draft, make_draft
from tools.synth import FULL, MICRO, TINY, Quantiser, Shape, model_metadata, model_tensors, write_gguf

A = "qwen4exp."
OPTIONAL = {"output.weight"}


def test_every_tensor_is_needed(micro: Draft, tmp_path: Path) -> None:
    for name, tensor in micro.tensors.items():
        rest = {n: t for n, t in micro.tensors.items() if n != name}
        path = Draft(micro.metadata, rest).write(tmp_path / "m.gguf")
        if name in OPTIONAL:
            open_model(path).close()
            continue
        pattern = rf"tensor {re.escape(name)}: expected {re.escape(str(list(tensor.ne)))}"
        if name == "per_layer_token_embd.weight":
            pattern = rf"tensor {re.escape(name)}: expected \[16, 272\]"
        with pytest.raises(ModelError, match=pattern + ", found no such tensor"):
            open_model(path)


def test_every_shape_is_checked(micro: Draft, tmp_path: Path) -> None:
    for name, tensor in micro.tensors.items():
        changed = Draft(micro.metadata, dict(micro.tensors))
        ne = (*tensor.ne[:-1], tensor.ne[-1] + 1) if name != "per_layer_token_embd.weight" else (16, 271)
        changed.add(name, ne)
        with pytest.raises(
            ModelError, match=rf"shape of {re.escape(name)}: expected .*, found {re.escape(str(list(ne)))}"
        ):
            open_model(changed.write(tmp_path / "m.gguf"))


def test_a_transposed_matrix(draft: Draft, tmp_path: Path) -> None:
    draft.add("blk.0.attn_gate.weight", (64, 64))
    draft.add("blk.0.ffn_up_shexp.weight", (32, 64))
    with pytest.raises(ModelError, match=r"ffn_up_shexp.weight: expected \[64, 32\], found \[32, 64\]"):
        open_model(draft.write(tmp_path / "m.gguf"))


@pytest.mark.parametrize(
    ("name", "ne", "type_name", "message"),
    [
        ("blk.0.ssm_a", (2,), "F16", "expected one of F32, found F16"),
        ("output_hc_norm.weight", (256,), "BF16", "expected one of F32, found BF16"),
        ("blk.1.ple_conv1d.weight", (4, 256), "I32", "expected one of F32, F16, BF16, found I32"),
        ("blk.0.attn_gate.weight", (64, 64), "I8", "found I8"),
        ("blk.0.attn_gate.weight", (64, 64), "Q8_1", "found Q8_1"),
        ("blk.0.attn_gate.weight", (64, 64), "F64", "found F64"),
        ("token_embd.weight", (64, 320), "I16", "found I16"),
        ("per_layer_token_embd.weight", (16, 384), "I32", "found I32"),
    ],
)
def test_types_that_do_not_fit(
    draft: Draft, tmp_path: Path, name: str, ne: tuple[int, ...], type_name: str, message: str
) -> None:
    draft.add(name, ne, type_name)
    with pytest.raises(ModelError, match=rf"type of {re.escape(name)}: .*{message}"):
        open_model(draft.write(tmp_path / "m.gguf"))


@pytest.mark.parametrize("type_name", ["F16", "BF16", "Q4_0", "Q5_1", "IQ4_NL", "MXFP4", "NVFP4", "Q2_0"])
def test_types_that_fit(draft: Draft, opened: Callable[[Draft], ModelFile], type_name: str) -> None:
    """Up to Q2_0, ggml's number 42."""
    draft.add("blk.0.attn_gate.weight", (64, 64), type_name)
    info = opened(draft).tensors["blk.0.attn_gate.weight"]
    kind = TYPES[info.type_id]
    assert kind.name == type_name and info.nbytes == 64 * 64 // kind.block * kind.size == 64 * info.row_bytes


@pytest.mark.parametrize(
    "name",
    [
        "extra.weight", "blk.0.attn_q.bias", "blk.3.attn_q.bias", "blk.0.ffn_up_exps.scale", "blk.0.attn_norm.weight",
        "output_norm.weight", "rope_freqs.weight", "blk.4.attn_q.weight", "blk.99999.ssm_a", "blk.4.nextn.enorm.weight",
        "blk.3.ssm_a", "token_embd.weight2",
    ],
)  # fmt: skip
def test_tensors_that_nobody_knows(draft: Draft, tmp_path: Path, name: str) -> None:
    """They might be meant to change the result; upstream refuses such a file too."""
    draft.add(name, (64,))
    with pytest.raises(
        ModelError, match=rf"tensor {re.escape(name)}: expected .*, found (one more|a block beyond them)"
    ):
        open_model(draft.write(tmp_path / "m.gguf"))


def test_a_tensor_known_to_be_unused(draft: Draft, opened: Callable[[Draft], ModelFile]) -> None:
    draft.add("blk.0.exp_probs_b.bias", (4,))
    model = opened(draft)
    assert "blk.0.exp_probs_b.bias" not in model.tensors
    assert "exp_probs_b.bias is not used" in model.warnings[0]


def test_output_is_the_embedding_if_missing(draft: Draft, opened: Callable[[Draft], ModelFile]) -> None:
    del draft.tensors["output.weight"]
    assert "output.weight" not in opened(draft).tensors


def test_norms_by_stream(draft: Draft, opened: Callable[[Draft], ModelFile]) -> None:
    """Gains stored as [n_embd, streams] come out as one vector; trailing ones do not matter."""
    for name in ("output_hc_norm.weight", "blk.0.hc_attn_norm.weight", "blk.1.ple_norm_key.weight"):
        draft.tensors[name] = replace(draft.tensors[name], ne=(64, 4))
    old = draft.tensors["blk.0.ffn_gate_inp_shexp.weight"]
    draft.tensors[old.name] = replace(old, ne=(64, 1, 1))
    tensors = opened(draft).tensors
    assert tensors["output_hc_norm.weight"].ne == (256,) == tensors["blk.1.ple_norm_key.weight"].ne
    assert tensors[old.name].ne == (64,)


def test_half_precision_convolution(draft: Draft, opened: Callable[[Draft], ModelFile]) -> None:
    draft.add("blk.1.ple_conv1d.weight", (4, 256), "F16")
    draft.add("blk.0.ssm_conv1d.weight", (4, 128), "BF16")
    tensors = opened(draft).tensors
    assert (tensors["blk.1.ple_conv1d.weight"].type_id, tensors["blk.0.ssm_conv1d.weight"].type_id) == (F16, BF16)


def test_fused_gate_and_up(opened: Callable[[Draft], ModelFile], tmp_path: Path) -> None:
    draft = make_draft(replace(MICRO, fused_gate_up=True))
    tensors = opened(draft).tensors
    assert tensors["blk.0.ffn_gate_up_exps.weight"].ne == (64, 64, 4)
    assert "blk.0.ffn_gate_exps.weight" not in tensors and "blk.0.ffn_up_exps.weight" not in tensors
    draft.add("blk.0.ffn_gate_up_exps.weight", (64, 32, 4))
    with pytest.raises(ModelError, match=r"ffn_gate_up_exps.weight: expected \[64, 64, 4\], found \[64, 32, 4\]"):
        open_model(draft.write(tmp_path / "m.gguf"))


def test_fused_gate_and_up_beside_a_separate_one(draft: Draft, tmp_path: Path) -> None:
    draft.add("blk.0.ffn_gate_up_exps.weight", (64, 64, 4))
    with pytest.raises(ModelError, match="ffn_gate_up_exps.weight: expected only tensors of the architecture"):
        open_model(draft.write(tmp_path / "m.gguf"))


def test_fused_attention_is_taken_apart(draft: Draft, opened: Callable[[Draft], ModelFile]) -> None:
    """Q with its gate, K and V of a full layer as one matrix: three row ranges of it."""
    parts = [draft.tensors.pop(f"blk.3.attn_{p}.weight") for p in "qkv"]
    raw = [np.concatenate([c.reshape(-1).view(np.uint8) for c in p.data()]) for p in parts]
    rows = sum(p.ne[1] for p in parts)
    fused = replace(parts[0], name="blk.3.attn_qkv.weight", ne=(64, rows), data=lambda: iter(raw))
    draft.tensors[fused.name] = fused
    model = opened(draft)
    assert fused.name not in model.tensors
    for part, expected in zip(parts, raw, strict=True):
        info = model.tensors[part.name]
        assert info.ne == part.ne and info.nbytes == part.nbytes
        assert np.array_equal(model.read(info), expected)


def test_ple_tensors_without_keys(draft: Draft, tmp_path: Path) -> None:
    for key in [k for k in draft.metadata if ".ple." in k or k.endswith("per_layer_input")]:
        del draft.metadata[key]
    with pytest.raises(
        ModelError, match=r"ple\.layers: expected the layer that uses per_layer_token_embd.weight, found no"
    ):
        open_model(draft.write(tmp_path / "m.gguf"))
    del draft.tensors["per_layer_token_embd.weight"]
    with pytest.raises(ModelError, match=r"blk\.1\.ple_.*expected no PLE tensors, as there are no PLE keys"):
        open_model(draft.write(tmp_path / "m.gguf"))
    for name in [n for n in draft.tensors if ".ple_" in n]:
        del draft.tensors[name]
    with open_model(draft.write(tmp_path / "m.gguf")) as model:
        assert model.hparams.ple is None


def test_ple_tensors_in_another_layer(draft: Draft, tmp_path: Path) -> None:
    draft.set(A + "ple.layers", "u32", [0])
    with pytest.raises(ModelError, match=r"blk\.1\.ple_.*expected PLE tensors in layer 0, found one in layer 1"):
        open_model(draft.write(tmp_path / "m.gguf"))


def test_a_table_too_small_for_its_heads(draft: Draft, tmp_path: Path) -> None:
    draft.add("per_layer_token_embd.weight", (16, 271))
    with pytest.raises(ModelError, match=r"expected 16 values by at least 272 rows .*, found \[16, 271\]"):
        open_model(draft.write(tmp_path / "m.gguf"))


def test_fewer_blocks_than_tensors(draft: Draft, tmp_path: Path) -> None:
    """block_count cut with everything else consistent: half a model would run without a word."""
    shape = replace(MICRO, n_layer=8)
    whole = make_draft(shape)
    half = Draft(model_metadata(MICRO, 3, "half"), whole.tensors)
    with pytest.raises(ModelError, match=r"tensor blk\.4\.\S+: expected 4 blocks and 0 for MTP, found a block beyond"):
        open_model(half.write(tmp_path / "m.gguf"))


@pytest.mark.parametrize("shape", [MICRO, TINY, replace(TINY, mtp=True), replace(FULL, n_layer=48, mtp=True)])
def test_expected_names_are_those_of_the_writer(shape: Shape, tmp_path: Path) -> None:
    """The table against the writer's own list, for the real model's widths too (a sidecar of it has 32 + 2 tensors)."""
    path = tmp_path / "metadata.gguf"
    write_gguf(path, model_metadata(shape, 1, "metadata"), [])
    with Shard(path) as shard:
        hparams, warnings = read_hparams(shard.metadata, str(path))
    assert not warnings
    infos = {t.name: TensorInfo(t.name, t.type_id, t.ne, t.nbytes, 0, 0) for t in model_tensors(shape, 1, Quantiser())}
    catalogue = check_model("model", hparams, infos)
    assert {**catalogue.tensors, **catalogue.mtp.tensors}.keys() == infos.keys()
    assert (catalogue.mtp.status is MtpStatus.PRESENT) == shape.mtp
    if shape.n_layer == 48:
        assert (len(catalogue.tensors), len(catalogue.mtp.tensors)) == (1224, 32)
