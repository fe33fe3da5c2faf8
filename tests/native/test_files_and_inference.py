"""GGUF headers, conversions of quantized rows, and libllama's inference, each against something independent."""

from __future__ import annotations

from pathlib import Path

import gguf as reference
import numpy as np
import pytest

from pyluce.native import GgufFile, LlamaContext, LlamaModel, NativeError, dequantize, quantize, to_float
from pyluce.native.ggml import GGMLType
from tests.native.small_models import MERGES, N_EMBD, vocabulary_tokens

PROMPT = [5, 80, 200, 33, 7, 91, 12, 64]


def test_metadata_of_every_kind(vocabulary_path: Path) -> None:
    with GgufFile(vocabulary_path) as file:
        assert (file.version, file.alignment) == (3, 32)
        assert file.get("test.floats") == [0.5, -1.25]
        assert file.get("test.texts") == ["one", "zwei", "três"]
        assert file.get("test.flag") is True and file.get("test.large") == 2**63 + 5
        assert file.get("no.such.key", "default") == "default"
        assert file.get("tokenizer.ggml.tokens") == vocabulary_tokens()
        metadata = file.metadata()
        assert list(metadata) == file.keys()
        assert metadata["tokenizer.ggml.merges"] == MERGES and metadata["llama.block_count"] == 1
        assert file.tensors() == []


def test_tensor_infos_against_the_gguf_package(llama_path: Path) -> None:
    read = reference.GGUFReader(llama_path)
    with GgufFile(llama_path) as file:
        found = {t.name: t for t in file.tensors()}
        assert list(found) == [t.name for t in read.tensors]
        for tensor in read.tensors:
            info = found[tensor.name]
            assert info.ne[: len(tensor.shape)] == tuple(int(n) for n in tensor.shape)
            assert (info.type, info.n_bytes) == (int(tensor.tensor_type), int(tensor.n_bytes))
            assert file.data_offset + info.offset == int(tensor.data_offset)
        assert found["output_norm.weight"].ne == (N_EMBD, 1, 1, 1)


@pytest.mark.parametrize("length", [0, 3, 4, 23, 24, 60, 500])
def test_truncated_files_are_refused(vocabulary_path: Path, tmp_path: Path, length: int) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(vocabulary_path.read_bytes()[:length])
    with pytest.raises(NativeError, match="ggml cannot read"):
        GgufFile(path)
    with pytest.raises(FileNotFoundError):
        GgufFile(tmp_path / "absent.gguf")


@pytest.mark.parametrize("name", ["F16", "BF16", "Q8_0", "Q4_0", "Q5_1", "Q4_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4"])
def test_rows_convert_as_the_gguf_package_does(name: str) -> None:
    values = np.random.default_rng(4).standard_normal((3, 2, 512)).astype(np.float32)
    raw = quantize(GGMLType[name], values)
    found = dequantize(GGMLType[name], raw, 512)
    expected = reference.quants.dequantize(raw, reference.GGMLQuantizationType[name])
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-7)
    assert found.shape == values.shape and np.abs(found - values).mean() < 0.15


def test_float32_rows_and_wrong_sizes() -> None:
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    raw = values.view(np.uint8).reshape(2, 12)
    assert np.array_equal(dequantize(GGMLType.F32, raw, 3), values)
    with pytest.raises(ValueError, match="expected uint8 rows of 12 bytes"):
        dequantize(GGMLType.F32, raw[:, :8], 3)
    with pytest.raises(ValueError, match="multiple of 256 elements"):
        quantize(GGMLType.Q4_K, np.zeros((1, 128), np.float32))
    with pytest.raises(ValueError, match="importance matrix"):
        quantize(GGMLType.IQ2_XXS, np.zeros((1, 256), np.float32))
    with pytest.raises(ValueError, match="found I32"):
        to_float(GGMLType.I32)


def test_the_same_tokens_give_the_same_logits(llama_path: Path) -> None:
    with LlamaContext(llama_path, n_ctx=64) as context:
        whole = context.decode(PROMPT, want="all")
        assert whole is not None and whole.shape == (len(PROMPT), len(vocabulary_tokens()))
        assert context.length() == len(PROMPT)
        context.clear()
        assert context.length() == 0
        again = context.decode(PROMPT, want="all")
        assert again is not None and np.array_equal(again, whole)
        context.clear()
        last = context.decode(PROMPT)
        assert last is not None
        np.testing.assert_allclose(last, whole[-1], rtol=1e-4, atol=1e-5)
        context.clear()
        assert context.decode(PROMPT[:-1], want="none") is None
        step = context.decode(PROMPT[-1:])
        assert step is not None
        np.testing.assert_allclose(step, whole[-1], rtol=1e-3, atol=1e-3)
        other = context.decode([1])
        assert other is not None and not np.allclose(other, whole[-1], atol=1e-2)


def test_long_inputs_are_split_and_copies_stay_valid(llama_path: Path) -> None:
    tokens = [(7 * i) % 250 for i in range(50)]
    with (
        LlamaContext(llama_path, n_ctx=64, n_batch=64) as wide,
        LlamaContext(llama_path, n_ctx=64, n_batch=16) as narrow,
    ):
        a, b = wide.decode(tokens, want="all"), narrow.decode(tokens, want="all")
        assert a is not None and b is not None and a.shape == b.shape
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3)
        kept = a.copy()
        wide.decode([1, 2, 3])
        assert np.array_equal(a, kept)


def test_sequences_do_not_mix(llama_path: Path) -> None:
    with LlamaModel(llama_path) as model:
        with LlamaContext(model, n_ctx=128, n_seq_max=2) as context:
            one = context.decode(PROMPT, sequence=0)
            two = context.decode(PROMPT[::-1], sequence=1)
            assert (context.length(0), context.length(1)) == (8, 8)
            context.clear()
            again = context.decode(PROMPT[::-1], sequence=1)
            assert one is not None and two is not None and again is not None
            assert np.array_equal(two, again) and not np.array_equal(one, two)
        assert not model.closed


def test_removing_positions_and_states(llama_path: Path) -> None:
    with LlamaContext(llama_path, n_ctx=64) as context:
        context.decode(PROMPT, want="none")
        state = context.get_state()
        straight = context.decode([9])
        context.remove(0, len(PROMPT))
        assert context.length() == len(PROMPT)
        again = context.decode([9])
        context.clear()
        context.set_state(state)
        assert context.length() == len(PROMPT)
        restored = context.decode([9])
        assert straight is not None and again is not None and restored is not None
        assert np.array_equal(straight, again) and np.array_equal(straight, restored)
        with pytest.raises(NativeError, match="refused a state"):
            context.set_state(state[: len(state) // 2])


def test_a_refused_removal_is_an_error(llama_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pyluce.native import llama

    with LlamaContext(llama_path, n_ctx=32) as context:
        context.decode(PROMPT, want="none")
        monkeypatch.setattr(llama, "llama_memory_seq_rm", lambda *_: False)
        with pytest.raises(NativeError, match="cannot remove positions 3 to -1"):
            context.remove(0, 3)


def test_a_full_context_and_bad_tokens_are_errors(llama_path: Path) -> None:
    with LlamaContext(llama_path, n_ctx=32, n_batch=512) as context:
        with pytest.raises(NativeError, match=r"llama_decode of \d+ tokens at position \d+: no room"):
            context.decode([1] * (context.n_ctx + 1))
        context.clear()
        for bad in (-1, len(vocabulary_tokens())):
            with pytest.raises(ValueError, match="expected token ids from 0"):
                context.decode([1, bad])
        with pytest.raises(ValueError, match="at least one token"):
            context.decode([])
        assert context.decode([1]) is not None


def test_an_abort_stops_a_decode(llama_path: Path) -> None:
    with LlamaContext(llama_path, n_ctx=64) as context:
        context.set_abort(lambda: True)
        with pytest.raises(NativeError, match="aborted"):
            context.decode(PROMPT)
        context.set_abort(None)
        context.clear()
        assert context.decode(PROMPT) is not None


def test_the_context_closes_its_own_model_and_no_other(llama_path: Path) -> None:
    context = LlamaContext(llama_path, n_ctx=32)
    model = context.model
    context.close()
    context.close()
    assert model.closed
    with LlamaModel(llama_path) as shared:
        LlamaContext(shared, n_ctx=32).close()
        assert not shared.closed
        left_open = LlamaContext(shared, n_ctx=32)
    assert left_open.closed
