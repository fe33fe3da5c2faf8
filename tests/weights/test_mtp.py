"""The MTP block: in the file, in a file beside it, named, missing, or of another model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pyluce.weights import ModelError, MtpStatus, open_model
from tests.weights.conftest import Draft, make_draft
from tools.synth import MICRO, Shape

BLOCK = "blk.4."


def sidecar_of(shape: Shape, *, own: bool = False) -> Draft:
    """Only the MTP block of a model, with or without its own embedding and output, as converters write it."""
    whole = make_draft(replace(shape, mtp=True))
    kept = {n: t for n, t in whole.tensors.items() if n.startswith(BLOCK)}
    if own:
        kept |= {n: whole.tensors[n] for n in ("token_embd.weight", "output.weight")}
    metadata = {k: v for k, v in whole.metadata.items() if ".ple." not in k and not k.endswith("per_layer_input")}
    return Draft(metadata, kept)


def test_in_the_file(draft_with_mtp: Draft, tmp_path: Path) -> None:
    with open_model(draft_with_mtp.write(tmp_path / "m.gguf")) as model:
        assert model.mtp.status is MtpStatus.PRESENT and not model.warnings
        assert (model.hparams.n_layer, model.hparams.n_layer_nextn) == (4, 1)
        assert len(model.mtp.tensors) == 32
        assert model.mtp.tensors["blk.4.nextn.eh_proj.weight"].ne == (128, 64)
        assert model.mtp.tensors["blk.4.nextn.hnorm.weight"].ne == (256,)
        assert not any(n.startswith(BLOCK) for n in model.tensors)


def test_absent(draft: Draft, draft_with_mtp: Draft, tmp_path: Path) -> None:
    with open_model(draft.write(tmp_path / "m.gguf")) as model:
        assert model.mtp.status is MtpStatus.ABSENT and model.mtp.reason
    for name in [n for n in draft_with_mtp.tensors if n.startswith(BLOCK)]:
        del draft_with_mtp.tensors[name]
    with open_model(draft_with_mtp.write(tmp_path / "m2.gguf")) as model:
        assert model.mtp.status is MtpStatus.ABSENT and "announces" in model.mtp.reason


@pytest.mark.parametrize("name", ["blk.4.nextn.eh_proj.weight", "blk.4.attn_q.weight", "blk.4.nextn.hc_head_up.weight"])
def test_not_whole(draft_with_mtp: Draft, tmp_path: Path, name: str) -> None:
    del draft_with_mtp.tensors[name]
    with pytest.raises(ModelError, match=rf"tensor {name}: expected .*, found no such tensor"):
        open_model(draft_with_mtp.write(tmp_path / "m.gguf"))


def test_not_announced(draft_with_mtp: Draft, tmp_path: Path) -> None:
    """The block is there, but block_count and the arrays are those of the trunk."""
    trunk = make_draft(MICRO)
    with pytest.raises(ModelError, match=r"tensor blk\.4\.\S+: expected 4 blocks and 0 for MTP"):
        open_model(Draft(trunk.metadata, draft_with_mtp.tensors).write(tmp_path / "m.gguf"))


def test_an_unknown_tensor_in_the_block(draft_with_mtp: Draft, tmp_path: Path) -> None:
    draft_with_mtp.add("blk.4.nextn.shared_head_norm.weight", (64,))
    with pytest.raises(ModelError, match="shared_head_norm.weight: expected only tensors of the architecture"):
        open_model(draft_with_mtp.write(tmp_path / "m.gguf"))


@pytest.mark.parametrize("folder", [".", "MTP"])
@pytest.mark.parametrize("own", [False, True])
def test_beside_the_model(draft: Draft, tmp_path: Path, folder: str, own: bool) -> None:
    (tmp_path / folder).mkdir(exist_ok=True)
    path = sidecar_of(MICRO, own=own).write(tmp_path / folder / "mtp-micro.gguf")
    with open_model(draft.write(tmp_path / "m.gguf")) as model:
        assert model.mtp.status is MtpStatus.PRESENT and not model.warnings
        assert Path(model.mtp.path) == path
        assert len(model.mtp.tensors) == 32 + 2 * own
        info = model.mtp.tensors["blk.4.nextn.enorm.weight"]
        assert model.shards[info.shard].path == path
        assert model.read(info).size == 256 and model.address(info)
        assert model.tensors["token_embd.weight"].shard == 0


def test_named(draft: Draft, tmp_path: Path) -> None:
    path = sidecar_of(MICRO).write(tmp_path / "any-name.gguf")
    with open_model(draft.write(tmp_path / "m.gguf"), draft=path) as model:
        assert model.mtp.status is MtpStatus.PRESENT and Path(model.mtp.path) == path


def test_beside_shards(draft: Draft, tmp_path: Path) -> None:
    shards = draft.write_shards(tmp_path, 2)
    sidecar_of(MICRO).write(tmp_path / "mtp-micro.gguf")
    with open_model(shards[1]) as model:
        assert model.mtp.status is MtpStatus.PRESENT and len(model.shards) == 3


def test_sidecar_with_ratios_of_zero(draft: Draft, tmp_path: Path) -> None:
    sidecar = sidecar_of(MICRO)
    sidecar.set("qwen4exp.attention.compress_ratios", "u32", [0] * 5)
    path = sidecar.write(tmp_path / "s.gguf")
    with open_model(draft.write(tmp_path / "m.gguf"), draft=path) as model:
        assert model.mtp.status is MtpStatus.PRESENT and model.hparams.compress_ratio == 4


def test_of_another_model(draft: Draft, tmp_path: Path) -> None:
    """Named: an error. Found beside the model: a warning, and the model runs without drafts."""
    path = sidecar_of(replace(MICRO, n_ff_exp=64)).write(tmp_path / "mtp-other.gguf")
    with pytest.raises(ModelError, match="n_ff_exp: expected 32, as in the model, found 64. This MTP sidecar belongs"):
        open_model(draft.write(tmp_path / "m.gguf"), draft=path)
    with open_model(tmp_path / "m.gguf") as model:
        assert model.mtp.status is MtpStatus.INCOMPLETE and "n_ff_exp" in model.mtp.reason
        assert "not used as MTP sidecar" in model.warnings[0] and len(model.shards) == 1


def test_a_sidecar_that_is_none(draft: Draft, tmp_path: Path) -> None:
    model = draft.write(tmp_path / "m.gguf")
    with pytest.raises(ModelError, match=r"nextn_predict_layers: expected 1 \(an MTP sidecar\)"):
        open_model(model, draft=model)


def test_a_sidecar_that_lacks_a_tensor(draft: Draft, tmp_path: Path) -> None:
    sidecar = sidecar_of(MICRO)
    del sidecar.tensors["blk.4.nextn.eh_proj.weight"]
    sidecar.write(tmp_path / "mtp-broken.gguf")
    with open_model(draft.write(tmp_path / "m.gguf")) as model:
        assert model.mtp.status is MtpStatus.INCOMPLETE and "eh_proj" in model.mtp.reason


def test_a_sidecar_as_the_model(tmp_path: Path) -> None:
    path = sidecar_of(MICRO).write(tmp_path / "mtp-micro.gguf")
    with pytest.raises(ModelError, match="expected a whole model, found an MTP sidecar"):
        open_model(path)
