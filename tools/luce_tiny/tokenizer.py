"""The 4,096-token byte-level BPE of luce-tiny, and the corpus as token shards.

    python -m tools.luce_tiny.tokenizer train CORPUS_DIR OUT_DIR
    python -m tools.luce_tiny.tokenizer encode CORPUS_DIR OUT_DIR   # train.u16.xz and held.u16.xz

The pre-tokeniser is llama.cpp's `qwen35`, so libllama splits text exactly as this file does.
Special tokens take the last ids; `<|endoftext|>` separates documents and resets the n-gram hash.
"""

from __future__ import annotations

import argparse
import lzma
import random
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

VOCAB_SIZE = 4096
PRE_TOKENIZER = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
USER_DEFINED = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
SPECIAL = CONTROL + USER_DEFINED
FIRST_SPECIAL = VOCAB_SIZE - len(SPECIAL)
EOT_ID = FIRST_SPECIAL
IM_START_ID = FIRST_SPECIAL + 1
IM_END_ID = FIRST_SPECIAL + 2


def train(corpus: Path, out: Path, sample_mb: int = 30) -> Tokenizer:
    """Train the merges on a sample of documents (plus chat-like text, so its words are single tokens)."""
    documents = corpus.read_text().split("\0")
    random.Random(3).shuffle(documents)
    sample, size = [], 0
    for document in documents:
        sample.append(document)
        size += len(document)
        if size > sample_mb * 1e6:
            break
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(PRE_TOKENIZER), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=FIRST_SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
        max_token_length=16,
    )
    tokenizer.train_from_iterator(sample, trainer)
    if tokenizer.get_vocab_size() != FIRST_SPECIAL:
        raise SystemExit(f"expected {FIRST_SPECIAL} learned tokens, got {tokenizer.get_vocab_size()}")
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in CONTROL])
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in USER_DEFINED])
    for index, text in enumerate(SPECIAL):
        if tokenizer.token_to_id(text) != FIRST_SPECIAL + index:
            raise SystemExit(f"{text} has id {tokenizer.token_to_id(text)}, expected {FIRST_SPECIAL + index}")
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out / "tokenizer.json"))
    return tokenizer


def load(directory: Path) -> Tokenizer:
    return Tokenizer.from_file(str(directory / "tokenizer.json"))


def encode(corpus: Path, out: Path, held_every: int = 200) -> None:
    """Write every document, preceded by `<|endoftext|>`, as uint16; each `held_every`-th one is held out."""
    tokenizer = load(out)
    documents = corpus.read_text().split("\0")
    parts: dict[str, list[np.ndarray]] = {"train": [], "held": []}
    for start in range(0, len(documents), 2000):
        batch = tokenizer.encode_batch(documents[start : start + 2000])
        for offset, item in enumerate(batch):
            name = "held" if (start + offset) % held_every == 0 else "train"
            parts[name].append(np.array([EOT_ID, *item.ids], np.uint16))
    for name, arrays in parts.items():
        tokens = np.concatenate(arrays)
        # the two bytes apart compress better
        raw = tokens.view(np.uint8).reshape(-1, 2).T.tobytes() if name == "train" else tokens.tobytes()
        (out / f"{name}.u16.xz").write_bytes(lzma.compress(raw, preset=4))
        print(f"{name}: {tokens.size} tokens, {(out / f'{name}.u16.xz').stat().st_size / 1e6:.1f} MB")


def read_shard(path: Path) -> np.ndarray:
    """Tokens of a shard written by `encode`, uint16 [n]."""
    raw = np.frombuffer(lzma.decompress(path.read_bytes()), np.uint8)
    if path.name.startswith("train"):
        raw = np.ascontiguousarray(raw.reshape(2, -1).T).reshape(-1)
    return raw.view(np.uint16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("train", "encode"))
    parser.add_argument("corpus", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    if args.command == "train":
        train(args.corpus / "corpus.txt", args.out)
    else:
        encode(args.corpus / "corpus.txt", args.out)


if __name__ == "__main__":
    main()
