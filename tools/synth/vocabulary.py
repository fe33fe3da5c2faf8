"""A byte-level BPE vocabulary of any size: control tokens, the 256 bytes, merges learned from a short text, fillers."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Final

from tools.synth.writer import Value

CONTROLS: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
THINKING: Final = ("<think>", "</think>")
EOS: Final = 0
END_OF_TURN: Final = CONTROLS.index("<|im_end|>")

_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5
MAX_MERGES: Final = 400

CHAT_TEMPLATE: Final = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and not enable_thinking -%}
{{ '<think>\\n\\n</think>\\n\\n' }}
{%- endif -%}
{%- endif -%}"""

_TEXT: Final = """
The quick brown fox jumps over the lazy dog while the early bird catches nothing at all, because there were no worms in
the garden that morning. Every model needs some words to begin with, and these are as good as any others: they should be
short, they should repeat, and they should leave the reader with the feeling that something was said. When a sentence is
read one byte at a time, the common pairs appear again and again; joining them makes the text shorter and the numbers
larger. This is how a small vocabulary grows: first the letters, then the endings, then the little words, and after them
whole syllables. Questions and answers follow the same path. What is the capital of the country? Where does the river
go? How many apples are in the basket, and who put them there? The answer is always in the text, if one looks for it
with patience. Numbers matter as well: one two three four five six seven eight nine ten, 0 1 2 3 4 5 6 7 8 9, 10 20 30,
2024 2025 2026. Code has its own rhythm: def function(value): return value + 1; for item in list: print(item); if not
found: raise Error("expected something, found nothing"). Let the machine count and the human decide.
"""


def byte_symbols() -> list[str]:
    """The printable character that stands for each byte in a byte-level vocabulary."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    symbols = {byte: chr(byte) for byte in printable}
    others = [byte for byte in range(256) if byte not in symbols]
    symbols.update({byte: chr(256 + i) for i, byte in enumerate(others)})
    return [symbols[byte] for byte in range(256)]


def learn_merges(count: int) -> list[tuple[str, str]]:
    """Up to `count` pairs, the most frequent first (of equals the alphabetically first)."""
    symbols = byte_symbols()
    words = Counter(_TEXT.replace("\n", " ").split(" "))
    pieces = {w: [symbols[b] for b in (" " + w).encode()] for w in words if w}
    merges: list[tuple[str, str]] = []
    while len(merges) < count:
        pairs: Counter[tuple[str, str]] = Counter()
        for word, parts in pieces.items():
            for pair in itertools.pairwise(parts):
                pairs[pair] += words[word]
        if not pairs:
            break
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append(best)
        pieces = {word: _join(parts, best) for word, parts in pieces.items()}
    return merges


def _join(parts: list[str], pair: tuple[str, str]) -> list[str]:
    out: list[str] = []
    i = 0
    while i < len(parts):
        if tuple(parts[i : i + 2]) == pair:
            out.append(parts[i] + parts[i + 1])
            i += 2
        else:
            out.append(parts[i])
            i += 1
    return out


def vocabulary_metadata(n_vocab: int) -> dict[str, Value]:
    """The `tokenizer.*` keys of a vocabulary of `n_vocab` tokens (at least the specials and the bytes)."""
    specials = [*CONTROLS, *THINKING]
    fixed = len(specials) + 256
    if n_vocab < fixed:
        raise ValueError(f"n_vocab: expected at least {fixed}, found {n_vocab}")
    merges = learn_merges(min(n_vocab - fixed, MAX_MERGES))
    tokens = [*specials, *byte_symbols(), *(a + b for a, b in merges)]
    types = [_CONTROL] * len(CONTROLS) + [_USER_DEFINED] * len(THINKING) + [_NORMAL] * (256 + len(merges))
    fillers = n_vocab - len(tokens)
    tokens += [f"<|unused_{i}|>" for i in range(fillers)]
    types += [_UNUSED] * fillers
    return {
        "tokenizer.ggml.model": Value("string", "gpt2"),
        "tokenizer.ggml.pre": Value("string", "qwen35"),
        "tokenizer.ggml.tokens": Value("string", tokens),
        "tokenizer.ggml.token_type": Value("i32", types),
        "tokenizer.ggml.merges": Value("string", [f"{a} {b}" for a, b in merges]),
        "tokenizer.ggml.bos_token_id": Value("u32", EOS),
        "tokenizer.ggml.eos_token_id": Value("u32", END_OF_TURN),
        "tokenizer.ggml.padding_token_id": Value("u32", EOS),
        "tokenizer.ggml.add_bos_token": Value("bool", False),
        "tokenizer.chat_template": Value("string", CHAT_TEMPLATE),
    }
