"""Models in several files: found from any of them, checked against each other."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from pyluce.weights import ModelError, open_model
from tests.weights.conftest import Draft
from tools.synth import Value, write_gguf


@pytest.fixture
def shards(draft: Draft, tmp_path: Path) -> list[Path]:
    return draft.write_shards(tmp_path, 3)


@pytest.mark.parametrize("which", [0, 1, 2])
def test_from_any_shard(draft: Draft, shards: list[Path], which: int) -> None:
    calls: list[tuple[str, int, int]] = []
    with open_model(shards[which], lambda *call: calls.append(call)) as model:
        assert [s.path for s in model.shards] == shards
        assert model.path == str(shards[0])
        assert model.tensors.keys() == draft.tensors.keys()
        assert {t.shard for t in model.tensors.values()} == {0, 1, 2}
        for name in ("token_embd.weight", "blk.2.ssm_a", "blk.3.ffn_down_shexp.weight"):
            expected = np.concatenate([chunk.reshape(-1) for chunk in draft.tensors[name].data()])
            assert np.array_equal(model.read(model.tensors[name]), expected)
    assert calls == [("open", 1, 3), ("open", 2, 3), ("open", 3, 3)]


def test_one_shard_of_one(draft: Draft, tmp_path: Path) -> None:
    (path,) = draft.write_shards(tmp_path, 1)
    with open_model(path) as model:
        assert len(model.shards) == 1


def test_missing_shard_is_named(shards: list[Path]) -> None:
    shards[1].unlink()
    with pytest.raises(ModelError, match=r"expected 3 files.*found no model-00002-of-00003\.gguf\. Download"):
        open_model(shards[2])


def test_missing_first_shard(shards: list[Path]) -> None:
    shards[0].unlink()
    with pytest.raises(ModelError, match=r"no model-00001-of-00003\.gguf"):
        open_model(shards[1])


def test_a_number_beyond_the_count(shards: list[Path], tmp_path: Path) -> None:
    odd = tmp_path / "model-00004-of-00003.gguf"
    shutil.copy(shards[0], odd)
    with pytest.raises(ModelError, match="name of the shard: expected a number from 00001 to 00003, found 00004"):
        open_model(odd)


def test_swapped_shards(shards: list[Path], tmp_path: Path) -> None:
    spare = tmp_path / "spare"
    shards[1].rename(spare)
    shards[2].rename(shards[1])
    spare.rename(shards[2])
    with pytest.raises(ModelError, match=r"split\.no: expected 1, found 2"):
        open_model(shards[0])


def test_a_shard_of_another_split(draft: Draft, shards: list[Path], tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = draft.write_shards(tmp_path / "other", 4)
    shutil.copy(other[1], shards[1])
    with pytest.raises(ModelError, match=r"split\.count: expected 3 .*found 4"):
        open_model(shards[0])


def test_wrong_total(draft: Draft, shards: list[Path], tmp_path: Path) -> None:
    write_gguf(shards[2], {"split.no": Value("u16", 2), "split.count": Value("u16", 3)}, [])
    with pytest.raises(ModelError, match=r"split\.tensors\.count: expected \d+ \(tensors in all shards\), found 113"):
        open_model(shards[0])


def test_a_tensor_in_two_shards(draft: Draft, shards: list[Path]) -> None:
    tensors = list(draft.tensors.values())
    third = [tensors[0], *tensors[len(tensors) * 2 // 3 + 1 :]]
    split = {"split.no": Value("u16", 2), "split.count": Value("u16", 3)}
    write_gguf(shards[2], split, third)
    with pytest.raises(
        ModelError, match=r"tensor token_embd\.weight: expected it in one shard, found it in model-00001"
    ):
        open_model(shards[0])


def test_a_renamed_shard(shards: list[Path], tmp_path: Path) -> None:
    alone = tmp_path / "alone.gguf"
    shutil.copy(shards[0], alone)
    with pytest.raises(ModelError, match=r"split\.count: expected 1, by the file's name, found 3"):
        open_model(alone)


def test_names_of_shards_on_files_that_are_none(draft: Draft, tmp_path: Path) -> None:
    path = draft.write(tmp_path / "m-00001-of-00002.gguf")
    shutil.copy(path, tmp_path / "m-00002-of-00002.gguf")
    with pytest.raises(ModelError, match=r"split\.count: expected 2 \(as in its name\), found None"):
        open_model(path)


def test_bad_split_key(draft: Draft, tmp_path: Path) -> None:
    draft.set("split.count", "string", "three")
    with pytest.raises(ModelError, match=r"split\.count: expected an integer, found three"):
        open_model(draft.write(tmp_path / "m.gguf"))


@pytest.mark.parametrize("kind", ["missing", "folder", "empty"])
def test_no_file_at_all(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "m.gguf"
    if kind == "folder":
        path.mkdir()
    elif kind == "empty":
        path.touch()
    with pytest.raises(ModelError, match=r"m\.gguf"):
        open_model(path)
