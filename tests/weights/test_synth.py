"""The writer of random models: deterministic, the same weights in every type, a vocabulary that libllama reads."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pyluce.native.quants import dequantize
from pyluce.weights import ModelFile, open_model
from pyluce.weights.ggml_types import type_name
from tools.synth import MICRO, TINY, Quantiser, Shape, write_model
from tools.synth.shape import primes_from
from tools.synth.vocabulary import byte_symbols, vocabulary_metadata
from tools.synth_gguf import main

SMALL = replace(TINY, n_layer=4, n_ff_exp=256, n_expert=4)


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_the_same_arguments_give_the_same_file(tmp_path: Path) -> None:
    one = write_model(tmp_path / "a.gguf", MICRO, seed=5, name="same")[0]
    two = write_model(tmp_path / "b.gguf", MICRO, seed=5, name="same")[0]
    other = write_model(tmp_path / "c.gguf", MICRO, seed=6, name="same")[0]
    assert digest(one) == digest(two) != digest(other)


def values(model: ModelFile, name: str) -> np.ndarray:
    info = model.tensors[name]
    return dequantize(info.type_id, model.read(info).reshape(-1, info.row_bytes), info.ne[0])


@pytest.mark.usefixtures("libraries")
@pytest.mark.parametrize(
    ("name", "error"), [("F16", 1e-3), ("BF16", 1e-2), ("Q8_0", 1e-2), ("Q4_K", 0.1), ("IQ4_NL", 0.1)]
)
def test_the_same_weights_in_every_type(tmp_path: Path, name: str, error: float) -> None:
    shape: Shape = replace(SMALL, n_expert=2, n_expert_used=2, n_head=4, n_vocab=288)
    with (
        open_model(write_model(tmp_path / "f.gguf", shape)[0]) as original,
        open_model(write_model(tmp_path / "q.gguf", shape.with_type(name))[0]) as rounded,
    ):
        for tensor in ("token_embd.weight", "blk.0.attn_qkv.weight", "blk.2.ffn_down_exps.weight"):
            assert type_name(rounded.tensors[tensor].type_id) == name
            wanted, found = values(original, tensor), values(rounded, tensor)
            assert np.sqrt(np.mean((wanted - found) ** 2)) < error * np.sqrt(np.mean(wanted**2))
        assert np.array_equal(values(original, "blk.0.ssm_a"), values(rounded, "blk.0.ssm_a"))


@pytest.mark.usefixtures("libraries")
def test_q8_0_is_ggmls() -> None:
    """The one block type that is made without the library equals ggml's, bit for bit."""
    from pyluce.native.quants import quantize
    from pyluce.native.structs import GGMLType

    rng = np.random.default_rng(0)
    rows = rng.standard_normal((64, 256), np.float32) * np.exp(rng.uniform(-20, 5, (64, 1))).astype(np.float32)
    rows[3] = 0
    assert np.array_equal(Quantiser().convert(rows, "Q8_0"), quantize(GGMLType.Q8_0, rows))


def test_rows_that_do_not_fit_fall_back(tmp_path: Path) -> None:
    """Rows of 64 values in a Q4_K model become Q8_0, rows of 16 become F16."""
    from tools.synth.tensors import recipes

    types = {r.name: r.type_name for r in recipes(replace(SMALL, hc_low_rank=64, ple_heads=8).with_type("Q4_K"))}
    assert types["blk.0.hc_attn_up.weight"] == "Q8_0"
    assert types["per_layer_token_embd.weight"] == "F16"
    assert types["blk.0.ffn_up_exps.weight"] == "Q4_K"


def test_decay_is_realistic(tmp_path: Path) -> None:
    """exp(softplus(dt) * a) per step: neither frozen nor forgetting everything at once."""
    with open_model(write_model(tmp_path / "m.gguf", replace(SMALL, ssm_v_heads=64, ssm_state=32))[0]) as model:
        rates, steps = (model.read(model.tensors[f"blk.0.{n}"]).view(np.float32) for n in ("ssm_a", "ssm_dt.bias"))
        kept = np.exp(np.log1p(np.exp(steps)) * rates)
        assert 0.1 < kept.min() < 0.8 and 0.99 < kept.max() < 1.0


def test_layers_must_fit_the_interval() -> None:
    with pytest.raises(ValueError, match="n_layer: expected a multiple of 4, found 6"):
        replace(TINY, n_layer=6)
    with pytest.raises(ValueError, match="type: expected one of F32"):
        TINY.with_type("Q9_9")
    assert primes_from(0, 4) == [2, 3, 5, 7] and primes_from(20000003, 2) == [20000003, 20000023]


def test_bytes_have_distinct_symbols() -> None:
    assert len(set(byte_symbols())) == 256 and byte_symbols()[ord("A")] == "A" and byte_symbols()[32] == "\u0120"
    tokens = vocabulary_metadata(512)["tokenizer.ggml.tokens"].value
    assert len(tokens) == len(set(tokens)) == 512 and not any("unused" in t for t in tokens)
    with pytest.raises(ValueError, match="n_vocab: expected at least 261, found 100"):
        vocabulary_metadata(100)


@pytest.mark.usefixtures("libraries")
def test_libllama_tokenises(tmp_path: Path) -> None:
    from pyluce.native.vocabulary import Vocabulary

    path = write_model(tmp_path / "m.gguf", TINY)[0]
    text = "The quick brown fox \u00e4\u00df\u65e5\u672c jumps over 123 dogs.\n\n  def f(x): return x"
    with Vocabulary(path) as vocabulary:
        ids = vocabulary.tokenize(text, add_special=False, parse_special=False)
        assert 0 < len(ids) < 0.75 * len(text.encode())
        assert vocabulary.detokenize(ids) == text.encode()
        assert vocabulary.tokenize("<|im_start|>", add_special=False, parse_special=True) == [1]


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "folder" / "m.gguf"
    arguments = ["--preset", "micro", "--layers", "8", "--mtp", "--top-k", "64", "--type", "F16", "--shards", "2"]
    assert main([str(path), *arguments, "--expert-type", "Q8_0", "--seed", "3"]) == 0
    written = sorted(path.parent.glob("*.gguf"))
    assert [p.name for p in written] == ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"]
    assert str(written[0]) in capsys.readouterr().out
    with open_model(written[0]) as model:
        assert (model.hparams.n_layer, model.hparams.indexer_top_k, model.mtp.status.value) == (8, 64, "present")
        assert type_name(model.tensors["output.weight"].type_id) == "F16"
        assert type_name(model.tensors["blk.0.ffn_up_exps.weight"].type_id) == "Q8_0"
    assert main([str(path), "--layers", "7"]) == 1
    assert "expected a multiple of 4, found 7" in capsys.readouterr().err
