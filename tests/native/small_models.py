"""Small GGUF files for the native tests: a byte-level BPE vocabulary, and a whole one-layer llama with random weights."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "Ġw o", "r l", "rl d", "Ġwo rld"]
SPECIAL = ["<|end|>", "<|turn|>", "<|pad|>"]
CHAT_TEMPLATE = "{% for m in messages %}<|turn|>{{ m.content }}{% endfor %}"
N_EMBD, N_HEAD, N_FF = 32, 2, 64


def byte_spellings() -> list[str]:
    """How byte-level BPE writes each of the 256 bytes."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    spelled = {byte: chr(byte) for byte in printable}
    others = [byte for byte in range(256) if byte not in spelled]
    spelled.update({byte: chr(256 + i) for i, byte in enumerate(others)})
    return [spelled[byte] for byte in range(256)]


def vocabulary_tokens() -> list[str]:
    """The tokens in id order: bytes, merged pieces, special tokens."""
    return [*byte_spellings(), *(merge.replace(" ", "") for merge in MERGES), *SPECIAL]


def _add_vocabulary(writer: gguf.GGUFWriter) -> None:
    tokens = vocabulary_tokens()
    kinds = [gguf.TokenType.NORMAL] * (len(tokens) - len(SPECIAL)) + [gguf.TokenType.CONTROL] * len(SPECIAL)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(MERGES)
    writer.add_eos_token_id(tokens.index("<|end|>"))
    writer.add_bos_token_id(tokens.index("<|turn|>"))
    writer.add_pad_token_id(tokens.index("<|pad|>"))
    writer.add_add_bos_token(True)
    writer.add_bool("tokenizer.ggml.clean_spaces", True)
    writer.add_chat_template(CHAT_TEMPLATE)


def write_vocabulary(path: Path) -> Path:
    """A file with a vocabulary and metadata, without tensors."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("vocabulary only")
    writer.add_block_count(1)
    writer.add_array("test.floats", [0.5, -1.25])
    writer.add_array("test.texts", ["one", "zwei", "três"])
    writer.add_bool("test.flag", True)
    writer.add_uint64("test.large", 2**63 + 5)
    _add_vocabulary(writer)
    _finish(writer)
    return path


def write_llama(path: Path, *, leave_out: str | None = None, seed: int = 1) -> Path:
    """A whole one-layer llama with random float32 weights; ``leave_out`` is a tensor that the file then lacks."""
    rng = np.random.default_rng(seed)
    n_vocab = len(vocabulary_tokens())
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("one layer")
    writer.add_context_length(256)
    writer.add_embedding_length(N_EMBD)
    writer.add_block_count(1)
    writer.add_feed_forward_length(N_FF)
    writer.add_head_count(N_HEAD)
    writer.add_head_count_kv(N_HEAD)
    writer.add_rope_dimension_count(N_EMBD // N_HEAD)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(n_vocab)
    _add_vocabulary(writer)
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (n_vocab, N_EMBD),
        "output_norm.weight": (N_EMBD,),
        "output.weight": (n_vocab, N_EMBD),
        "blk.0.attn_norm.weight": (N_EMBD,),
        "blk.0.attn_q.weight": (N_EMBD, N_EMBD),
        "blk.0.attn_k.weight": (N_EMBD, N_EMBD),
        "blk.0.attn_v.weight": (N_EMBD, N_EMBD),
        "blk.0.attn_output.weight": (N_EMBD, N_EMBD),
        "blk.0.ffn_norm.weight": (N_EMBD,),
        "blk.0.ffn_gate.weight": (N_FF, N_EMBD),
        "blk.0.ffn_up.weight": (N_FF, N_EMBD),
        "blk.0.ffn_down.weight": (N_EMBD, N_FF),
    }
    for name, shape in shapes.items():
        if name != leave_out:
            scale = 1.0 if name.endswith("norm.weight") else 0.3
            writer.add_tensor(name, (rng.standard_normal(shape) * scale).astype(np.float32))
    _finish(writer)
    return path


def _finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
