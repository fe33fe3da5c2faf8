"""Checks the `tokenizer.*` keys before libllama reads them: it indexes some arrays by token without looking."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from pyluce.weights.errors import refuse
from pyluce.weights.gguf_reader import GgufArray, MetaValue

_PREFIX: Final = "tokenizer.ggml."
_TEXTS: Final = (_PREFIX + "model", _PREFIX + "pre", "tokenizer.chat_template")
_ARRAYS: Final = {
    "tokens": ("string",),
    "merges": ("string",),
    "scores": ("f32",),
    "token_type": ("u32", "i32"),
}
_PER_TOKEN: Final = ("scores", "token_type")


def check_vocabulary(metadata: Mapping[str, MetaValue], path: str, n_vocab: int) -> list[str]:
    """Warnings about the vocabulary; `ModelError` for a key of the wrong type or an array of the wrong length."""
    for key in _TEXTS:
        text = metadata.get(key)
        if text is not None and not isinstance(text, str):
            refuse(path, key, expected="text", found=text)
    for name, kinds in _ARRAYS.items():
        array = metadata.get(_PREFIX + name)
        if array is None:
            continue
        length = n_vocab if name in _PER_TOKEN and _PREFIX + "tokens" in metadata else None
        if not isinstance(array, GgufArray) or array.kind not in kinds or length not in (None, array.length):
            each = "" if length is None else f"{n_vocab} "
            refuse(path, _PREFIX + name, expected=f"an array of {each}{' or '.join(kinds)}", found=array)
    warnings = []
    for key, value in metadata.items():
        if not key.startswith(_PREFIX):
            continue
        if key.endswith("_token_id"):
            if isinstance(value, bool) or not isinstance(value, int):
                refuse(path, key, expected="the id of a token", found=value)
            if not 0 <= value < n_vocab:
                warnings.append(f"{path}: {key} is {value}, which is no token of the {n_vocab}; ignored")
        elif key.startswith(_PREFIX + "add_") and not isinstance(value, bool):
            refuse(path, key, expected="true or false", found=value)
    return warnings
