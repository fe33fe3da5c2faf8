"""One key changed at a time: the model is refused, and the message says what was expected and what was found."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from pyluce.weights import HParams, ModelError, ModelFile, open_model
from tests.weights.conftest import Draft
from tools.synth import MICRO, Value

A = "qwen4exp."

MISSING = [
    "block_count", "context_length", "embedding_length", "attention.head_count", "attention.head_count_kv",
    "attention.key_length", "attention.value_length", "attention.layer_norm_rms_epsilon",
    "attention.indexer.head_count", "attention.indexer.key_length", "attention.indexer.top_k",
    "attention.compress_ratios", "expert_count", "expert_used_count", "expert_feed_forward_length",
    "expert_shared_feed_forward_length", "hyper_connection.count", "hyper_connection.low_rank", "ssm.conv_kernel",
    "ssm.inner_size", "ssm.state_size", "ssm.time_step_rank", "ssm.group_count", "rope.dimension_count",
    "rope.dimension_sections", "rope.freq_base", "ple.layers", "ple.ngram_size", "ple.heads_per_ngram",
    "ple.conv_kernel", "ple.head_offsets", "ple.head_vocab_sizes", "ple.layer_multipliers", "ple.eos_token_id",
    "embedding_length_per_layer_input",
]  # fmt: skip

CHANGED: list[tuple[str, str, object, str]] = [
    # counts that make no sense
    ("block_count", "u32", 0, "an integer from 1 to 512, found 0"),
    ("block_count", "u32", 513, "found 513"),
    ("block_count", "u32", 4_000_000_000, "found 4000000000"),
    ("block_count", "i32", -1, "found -1"),
    ("block_count", "string", "four", "found 'four'"),
    ("block_count", "f32", 4.0, "an integer from 1 to 512, found 4.0"),
    ("block_count", "bool", True, "found True"),
    ("block_count", "u32", [4], "an integer from 1 to 512, found an array of 1 u32"),
    ("nextn_predict_layers", "u32", 2, "an integer from 0 to 1, found 2"),
    ("nextn_predict_layers", "u32", 4_294_967_295, "found 4294967295"),
    ("context_length", "u32", 0, "found 0"),
    ("embedding_length", "u32", 0, "found 0"),
    ("embedding_length", "u64", 1 << 40, "found 1099511627776"),
    ("expert_count", "u32", 0, "found 0"),
    ("expert_count", "u32", 1025, "an integer from 1 to 1024, found 1025"),
    ("expert_used_count", "u32", 0, "found 0"),
    ("expert_used_count", "u32", 5, "found 5"),
    ("expert_used_count", "u32", [2, 2, 1, 2], r"one value for all layers \(2\), found 1 at layer 2"),
    ("expert_feed_forward_length", "u32", [32, 32, 0, 32], "for layer 2, found 0"),
    ("expert_feed_forward_length", "u32", [32, 32, 64, 32], "one value for all layers"),
    ("expert_feed_forward_length", "u32", [32, 32], "an array of 4 integers .* found an array of 2 u32"),
    ("expert_shared_feed_forward_length", "u32", 0, "found 0"),
    ("vocab_size", "u32", 321, "320, the length of tokenizer.ggml.tokens, found 321"),
    # attention
    ("attention.head_count", "u32", 0, "found 0"),
    ("attention.head_count", "u32", 3, "a multiple of the 2 KV heads, found 3"),
    ("attention.head_count_kv", "u32", [0, 0, 0, 0], "for layer 3, found 0"),
    ("attention.value_length", "u32", 16, "the key length, 32, found 16"),
    ("attention.layer_norm_rms_epsilon", "f32", 0.0, "found 0"),
    ("attention.layer_norm_rms_epsilon", "f32", float("nan"), "found nan"),
    ("attention.layer_norm_rms_epsilon", "u32", 1, "a float"),
    ("rope.dimension_count", "u32", 0, "found 0"),
    ("rope.dimension_count", "u32", 7, "an even number, found 7"),
    ("rope.dimension_count", "u32", 18, "an integer from 2 to 16, found 18"),
    ("rope.dimension_sections", "i32", [2, 1, 0, 0], r"the sum 4 \(half of rope.dimension_count\), found \[2, 1, 0, 0\]"),
    ("rope.dimension_sections", "i32", [2, 2, 1, -1], "found -1 at index 3"),
    ("rope.dimension_sections", "i32", [2, 1, 1], "an array of 4 integers"),
    ("rope.dimension_sections", "f32", [2.0, 1.0, 1.0, 0.0], "an array of 4 integers .* found an array of 4 f32"),
    ("rope.dimension_sections", "u32", 4, "an array of 4 integers .* found 4"),
    ("rope.freq_base", "f32", float("inf"), "found inf"),
    ("rope.freq_base", "f32", -1.0, "found -1"),
    ("rope.scaling.factor", "f32", -2.0, "found -2"),
    # layer kinds
    ("full_attention_interval", "u32", 0, "an integer from 1 to 512, found 0"),
    ("full_attention_interval", "u32", 2, r"attention.recurrent_layers: expected 0 at layer 1 .* found 1"),
    ("attention.recurrent_layers", "bool", [True, True, False, False], r"1 at layer 2 .* found 0"),
    ("attention.recurrent_layers", "bool", [True, True, True], "an array of 4 integers"),
    ("attention.recurrent_layers", "u32", [1, 1, 2, 0], "found 2 at index 2"),
    # the indexer
    ("attention.compress_ratios", "u32", [0, 0, 0, 0], r"a ratio above 1 for the full-attention layer 3 .* found 0.*zeros"),
    ("attention.compress_ratios", "u32", 0, r"a ratio above 1 for the full-attention layer 3 .* found 0"),
    ("attention.compress_ratios", "u32", [0, 0, 0, 1], "a ratio above 1"),
    ("attention.compress_ratios", "u32", [0, 4, 0, 4], "0 for the linear layer 1, found 4"),
    ("attention.compress_ratios", "u32", [0, 0, 0], "found an array of 3 u32"),
    ("attention.compress_ratios", "u32", [0, 0, 0, 5], "top_k: expected a multiple of the compress ratio 5, found 32"),
    ("attention.indexer.top_k", "u32", 30, "a multiple of the compress ratio 4, found 30"),
    ("attention.indexer.top_k", "u32", 0, "found 0"),
    ("attention.indexer.head_count", "u32", 0, "found 0"),
    ("attention.indexer.key_length", "u32", 4, r"dimension_count: expected an integer from 2 to 4, found 8"),
    # hyper-connections and linear layers
    ("hyper_connection.count", "u32", 1, "an integer from 2 to 16, found 1"),
    ("hyper_connection.low_rank", "u32", 0, "found 0"),
    ("ssm.conv_kernel", "u32", 1, "an integer from 2 to 16, found 1"),
    ("ssm.state_size", "u32", 0, "found 0"),
    ("ssm.group_count", "u32", 0, "found 0"),
    ("ssm.inner_size", "u32", 65, r"time_step_rank \* state_size, 2 \* 32, found 65"),
    # PLE
    ("ple.layers", "u32", [3], r"a linear layer .* found full layer 3"),
    ("ple.layers", "u32", [4], "found 4 at index 0"),
    ("ple.layers", "u32", [0, 1], "an array of 1 integers .* found an array of 2 u32"),
    ("ple.layers", "u32", 1, "an array of 1 integers"),
    ("ple.layers", "u32", [], "as there is ple.ngram_size, found no such key or an empty list"),
    ("ple.ngram_size", "u32", 1, "an integer from 2 to 8, found 1"),
    ("ple.ngram_size", "u32", 9, "found 9"),
    ("ple.heads_per_ngram", "u32", 0, "found 0"),
    ("ple.heads_per_ngram", "u32", 33, "at most 64 heads in all, found 66"),
    ("ple.conv_kernel", "u32", 0, "found 0"),
    ("embedding_length_per_layer_input", "u32", 15, "embedding_length / heads, 64 / 4, found 15"),
    ("ple.layer_multipliers", "u64", [3, 5], "an array of 3 integers .* found an array of 2 u64"),
    ("ple.layer_multipliers", "u64", [3, 5, 0], "found 0 at index 2"),
    ("ple.layer_multipliers", "f64", [3.0, 5.0, 7.0], "found an array of 3 f64"),
    ("ple.head_vocab_sizes", "u64", [61, 67, 71, 0], "found 0 at index 3"),
    ("ple.head_vocab_sizes", "u64", [61, 67, 71], "an array of 4 integers"),
    ("ple.head_vocab_sizes", "u64", [61, 67, 71, 1 << 32], "found 4294967296 at index 3"),
    ("ple.head_offsets", "u64", [0, 61, 128, 198], r"ranges that do not overlap \(from 199 on\), found a head at 198"),
    ("ple.head_offsets", "u64", [0, 61, 128, (1 << 31) - 50], "rows up to 2147483647, found 2147483671"),
    ("ple.head_offsets", "i64", [0, 61, 128, -199], "found -199 at index 3"),
    ("ple.eos_token_id", "u32", 320, "an integer from 0 to 319, found 320"),
    ("ple.eos_token_id", "u32", [0, 1], "an integer from 0 to 319, found an array of 2 u32"),
    ("ple.image_token_id", "u32", 320, "an integer from 0 to 319, found 320"),
    # arithmetic that this engine does not have
    ("expert_gating_func", "u32", 2, "softmax routing"),
    ("expert_group_count", "u32", 4, "experts in one group"),
    ("expert_weights_scale", "f32", 2.5, "expert weights that are not scaled, found 2.5"),
]  # fmt: skip


def write_changed(draft: Draft, path: Path, key: str, value: Value | None) -> Path:
    if value is None:
        del draft.metadata[key]
    else:
        draft.metadata[key] = value
    return draft.write(path)


@pytest.mark.parametrize("key", MISSING)
def test_a_missing_key(draft: Draft, tmp_path: Path, key: str) -> None:
    with pytest.raises(ModelError, match=rf"{re.escape(key)}: expected .*, found no such key"):
        open_model(write_changed(draft, tmp_path / "m.gguf", A + key, None))


@pytest.mark.parametrize(("key", "kind", "value", "message"), CHANGED, ids=[f"{c[0]}={c[2]}" for c in CHANGED])
def test_a_changed_key(draft: Draft, tmp_path: Path, key: str, kind: str, value: object, message: str) -> None:
    with pytest.raises(ModelError) as caught:
        open_model(write_changed(draft, tmp_path / "m.gguf", A + key, Value(kind, value)))
    text = str(caught.value)
    assert re.search(message, text), text
    assert "expected" in text and "found" in text and "m.gguf" in text


@pytest.mark.parametrize(
    ("key", "kind", "value", "message"),
    [
        ("general.architecture", "string", "llama", "expected qwen4exp, found 'llama'"),
        ("general.architecture", "u32", 4, "expected qwen4exp, found 4"),
        ("general.alignment", "u32", 48, "a power of two up to 65536, found 48"),
        ("general.alignment", "u32", 0, "found 0"),
        ("general.alignment", "string", "32", "found 32"),
        ("tokenizer.ggml.tokens", "u32", [1, 2], "an array of 1 to 4194304 strings, found an array of 2 u32"),
        (
            "tokenizer.ggml.tokens",
            "string",
            ["a"] * 319,
            "token_type: expected an array of 319 u32 or i32, found an array of 320",
        ),
        ("tokenizer.ggml.token_type", "i32", [1] * 319, "an array of 320 u32 or i32, found an array of 319 i32"),
        ("tokenizer.ggml.token_type", "f32", [1.0] * 320, "an array of 320 u32 or i32, found an array of 320 f32"),
        ("tokenizer.ggml.scores", "f32", [1.0], "an array of 320 f32, found an array of 1 f32"),
        ("tokenizer.ggml.merges", "i32", [1], "an array of string, found an array of 1 i32"),
        ("tokenizer.ggml.model", "u32", 1, "expected text, found 1"),
        ("tokenizer.chat_template", "bool", True, "expected text, found True"),
        ("tokenizer.ggml.eos_token_id", "f32", 1.0, "the id of a token, found 1.0"),
        ("tokenizer.ggml.eot_token_id", "u32", [1, 2], "the id of a token, found an array of 2 u32"),
        ("tokenizer.ggml.add_bos_token", "u32", 1, "true or false, found 1"),
    ],
)
def test_keys_of_all_models(draft: Draft, tmp_path: Path, key: str, kind: str, value: object, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        open_model(write_changed(draft, tmp_path / "m.gguf", key, Value(kind, value)))


def test_no_architecture(draft: Draft, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="expected qwen4exp, found None"):
        open_model(write_changed(draft, tmp_path / "m.gguf", "general.architecture", None))


def test_rope_scaling(draft: Draft, tmp_path: Path) -> None:
    draft.set(A + "rope.scaling.type", "string", "yarn")
    draft.set(A + "rope.scaling.factor", "f32", 4.0)
    with pytest.raises(ModelError, match="no RoPE scaling, found yarn with factor 4"):
        open_model(draft.write(tmp_path / "m.gguf"))


def test_two_different_ratios(draft: Draft, tmp_path: Path) -> None:
    for key in ("attention.recurrent_layers", "ple.layers"):
        draft.metadata.pop(A + key)
    draft.set(A + "full_attention_interval", "u32", 2)
    draft.set(A + "attention.compress_ratios", "u32", [0, 4, 0, 8])
    with pytest.raises(ModelError, match=r"one ratio for all full-attention layers \(4\), found 8 at layer 3"):
        open_model(draft.write(tmp_path / "m.gguf"))


def test_only_linear_layers(draft: Draft, tmp_path: Path) -> None:
    draft.metadata.pop(A + "full_attention_interval")
    draft.set(A + "attention.recurrent_layers", "bool", [True] * 4)
    with pytest.raises(ModelError, match="a full-attention layer among the 4"):
        open_model(draft.write(tmp_path / "m.gguf"))


def test_block_count_without_a_trunk(draft: Draft, tmp_path: Path) -> None:
    draft.set(A + "block_count", "u32", 1)
    draft.set(A + "nextn_predict_layers", "u32", 1)
    with pytest.raises(ModelError, match="a trunk beside the MTP block, found 1 with 1 of them for MTP"):
        open_model(draft.write(tmp_path / "m.gguf"))


def test_all_values_as_written(draft: Draft, opened: Callable[[Draft], ModelFile]) -> None:
    draft.set(A + "ple.image_token_id", "u32", 7)
    draft.set("general.file_type", "u32", 15)
    hp = opened(draft).hparams
    assert isinstance(hp, HParams) and hp.ple is not None
    s = MICRO
    assert (hp.n_layer, hp.n_layer_nextn, hp.n_embd, hp.n_vocab, hp.n_ctx_train) == (4, 0, 64, 320, 2048)
    assert (hp.n_head, hp.n_head_kv, hp.head_dim) == (s.n_head, s.n_head_kv, s.head_dim)
    assert (hp.rope_dim, hp.rope_sections, hp.rope_freq_base) == (8, (2, 1, 1, 0), 1e7)
    assert hp.rms_eps == pytest.approx(1e-6)
    assert (hp.n_expert, hp.n_expert_used, hp.n_ff_exp, hp.n_ff_shexp) == (4, 2, 32, 32)
    assert (hp.hc_count, hp.hc_low_rank) == (4, 16)
    assert (hp.ssm_conv_kernel, hp.ssm_state, hp.ssm_k_heads, hp.ssm_v_heads, hp.ssm_inner) == (4, 32, 1, 2, 64)
    assert hp.conv_channels == 2 * 32 + 64
    assert (hp.indexer_heads, hp.indexer_dim, hp.indexer_top_k, hp.compress_ratio) == (2, 16, 32, 4)
    assert hp.recurrent_layers == (True, True, True, False) and hp.full_layers == (3,)
    assert (hp.ple.layer, hp.ple.ngram_size, hp.ple.heads_per_ngram, hp.ple.n_heads, hp.ple.head_dim) == (
        1,
        3,
        2,
        4,
        16,
    )
    assert hp.ple.head_vocab_sizes == (61, 67, 71, 73) and hp.ple.head_offsets == (0, 61, 128, 199)
    assert hp.ple.multipliers == tuple(draft.metadata[A + "ple.layer_multipliers"].value)
    assert (hp.ple.conv_kernel, hp.ple.eos_token_id, hp.ple.image_token_id, hp.ple.n_rows) == (4, 0, 7, 272)
    assert (hp.name, hp.file_type) == ("micro", 15)


def test_other_ways_to_say_the_same(draft: Draft, opened: Callable[[Draft], ModelFile]) -> None:
    """Scalars for arrays and arrays for scalars, other integer types, derived keys left out."""
    plain = opened(draft).hparams
    draft.set(A + "attention.compress_ratios", "u32", 4)
    draft.set(A + "expert_feed_forward_length", "u32", [32] * 4)
    draft.set(A + "expert_used_count", "i32", [2] * 4)
    draft.set(A + "attention.head_count", "u32", [0, 0, 0, 4])
    draft.set(A + "attention.head_count_kv", "i32", [0, 0, 0, 2])
    draft.set(A + "block_count", "u64", 4)
    draft.set(A + "ple.head_offsets", "i64", [0, 61, 128, 199])
    draft.set(A + "rope.scaling.type", "string", "none")
    del draft.metadata[A + "attention.recurrent_layers"]
    assert opened(draft).hparams == plain
    draft.set(A + "attention.recurrent_layers", "bool", [True, True, True, False])
    del draft.metadata[A + "full_attention_interval"]
    assert opened(draft).hparams == plain
    del draft.metadata[A + "attention.recurrent_layers"]
    assert opened(draft).hparams == plain, "every fourth layer by default"


def test_unknown_keys_are_reported(draft: Draft, opened: Callable[[Draft], ModelFile]) -> None:
    draft.set(A + "attention.sliding_window", "u32", 128)
    draft.set("tokenizer.ggml.eos_token_id", "u32", 9999)
    warnings = opened(draft).warnings
    assert len(warnings) == 2
    assert "qwen4exp.attention.sliding_window is not known" in warnings[0]
    assert "eos_token_id is 9999, which is no token of the 320" in warnings[1]


def test_without_a_vocabulary(draft: Draft, tmp_path: Path, opened: Callable[[Draft], ModelFile]) -> None:
    del draft.metadata["tokenizer.ggml.tokens"]
    with pytest.raises(
        ModelError, match="vocab_size: expected the number of tokens, or tokenizer.ggml.tokens, found neither"
    ):
        open_model(draft.write(tmp_path / "m.gguf"))
    draft.set(A + "vocab_size", "u32", 320)
    assert opened(draft).hparams.n_vocab == 320
