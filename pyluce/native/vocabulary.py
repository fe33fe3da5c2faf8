"""A model file's vocabulary, through libllama: text to token ids and back."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable, Sequence

from pyluce.native import llama, log
from pyluce.native.errors import NativeError
from pyluce.native.library import load_libraries
from pyluce.native.llama import TokenAttr, VocabType
from pyluce.native.owner import Owner
from pyluce.native.thread import owned_by_thread

_META_BYTES = 4096
_PIECE_BYTES = 64
_INT32_MIN = -(2**31)


class Vocabulary(Owner):
    """The tokenizer and the metadata of a GGUF file; no weights are read.

    Raises FileNotFoundError, or NativeError with the log tail for a file whose vocabulary libllama cannot read.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__()
        load_libraries()
        self.path = os.fspath(path)
        if not os.path.isfile(self.path):
            raise FileNotFoundError(f"expected a model file, found nothing at {self.path}")
        params = llama.llama_model_default_params()
        params.vocab_only = True
        params.n_gpu_layers = 0
        model = llama.llama_model_load_from_file(os.fsencode(self.path), params)
        failure = f"expected a model file with a vocabulary, libllama cannot read {self.path}"
        address = self._own("llama_model_load_from_file", model, llama.llama_model_free, failure=failure)
        try:
            self._vocab = llama.llama_model_get_vocab(address)
            self.n_tokens = llama.llama_vocab_n_tokens(self._vocab)
            if self.n_tokens <= 0:
                raise NativeError(f"expected a vocabulary with tokens in {self.path}, found none", log.take())
        except BaseException:
            self.close()
            raise

    @property
    def vocab_ptr(self) -> int:
        """The ``llama_vocab`` address (part of the model)."""
        self.ptr  # noqa: B018  (checks that it is open and that this thread owns it)
        return self._vocab

    @property
    def kind(self) -> VocabType:
        """The kind of tokenizer."""
        return VocabType(llama.llama_vocab_type(self.vocab_ptr))

    @property
    def bos(self) -> int | None:
        """The token that begins a text, or None."""
        return _token(llama.llama_vocab_bos(self.vocab_ptr))

    @property
    def eos(self) -> int | None:
        """The token that ends a text, or None."""
        return _token(llama.llama_vocab_eos(self.vocab_ptr))

    @property
    def eot(self) -> int | None:
        """The token that ends a turn, or None."""
        return _token(llama.llama_vocab_eot(self.vocab_ptr))

    @property
    def newline(self) -> int | None:
        """The token of a line end, or None."""
        return _token(llama.llama_vocab_nl(self.vocab_ptr))

    @property
    def pad(self) -> int | None:
        """The token that pads, or None."""
        return _token(llama.llama_vocab_pad(self.vocab_ptr))

    @property
    def adds_bos(self) -> bool:
        """Whether ``add_special`` puts ``bos`` in front."""
        return llama.llama_vocab_get_add_bos(self.vocab_ptr)

    @property
    def adds_eos(self) -> bool:
        """Whether ``add_special`` puts ``eos`` at the end."""
        return llama.llama_vocab_get_add_eos(self.vocab_ptr)

    @property
    def chat_template(self) -> str | None:
        """The file's default chat template, or None."""
        return self.named_chat_template(None)

    def named_chat_template(self, name: str | None) -> str | None:
        """The chat template of that name (None: the default one), or None when the file has none."""
        raw = llama.llama_model_chat_template(self.ptr, name.encode() if name is not None else None)
        return raw.decode("utf-8", "replace") if raw is not None else None

    @owned_by_thread
    def tokenize(self, text: str, *, add_special: bool = False, parse_special: bool = False) -> list[int]:
        """Token ids of a text. ``add_special`` adds bos and eos where the model wants them; ``parse_special`` makes
        tokens of the special texts in it. Raises ValueError for a text that is not valid Unicode."""
        vocab = self.vocab_ptr
        try:
            raw = text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(f"expected valid Unicode, found a lone surrogate at index {error.start}") from error
        if len(raw) >= 2**31:
            raise ValueError(f"expected a text shorter than 2 GiB, found {len(raw)} bytes")
        capacity = len(raw) // 3 + 16
        while True:
            tokens = (ctypes.c_int32 * capacity)()
            count = llama.llama_tokenize(vocab, raw, len(raw), tokens, capacity, add_special, parse_special)
            if count >= 0:
                return tokens[:count]
            if count == _INT32_MIN:
                raise NativeError("llama_tokenize: the text has too many tokens", log.take())
            if -count <= capacity:
                raise NativeError(f"llama_tokenize failed ({count})", log.take())
            capacity = -count

    @owned_by_thread
    def detokenize(
        self, tokens: Sequence[int], *, remove_special: bool = False, unparse_special: bool = False
    ) -> bytes:
        """The bytes of a run of tokens (UTF-8, perhaps cut inside a character). ``unparse_special`` spells special
        tokens; ``remove_special`` drops bos and eos at the ends. libllama removes spaces before punctuation here when
        the file's ``tokenizer.ggml.clean_spaces`` is true or absent; the joined ``piece`` bytes are exact."""
        vocab = self.vocab_ptr
        ids = (ctypes.c_int32 * len(tokens))(*(self._checked(token) for token in tokens))
        capacity = len(tokens) * 8 + 16
        while True:
            text = ctypes.create_string_buffer(capacity)
            count = llama.llama_detokenize(vocab, ids, len(tokens), text, capacity, remove_special, unparse_special)
            if count >= 0:
                return text.raw[:count]
            if -count <= capacity:
                raise NativeError(f"llama_detokenize failed ({count})", log.take())
            capacity = -count

    @owned_by_thread
    def piece(self, token: int, *, special: bool = True) -> bytes:
        """The bytes of one token; a special token's text only with ``special``."""
        vocab = self.vocab_ptr
        self._checked(token)
        capacity = _PIECE_BYTES
        while True:
            text = ctypes.create_string_buffer(capacity)
            count = llama.llama_token_to_piece(vocab, token, text, capacity, 0, special)
            if count >= 0:
                return text.raw[:count]
            if -count <= capacity:
                raise NativeError(f"llama_token_to_piece failed ({count})", log.take())
            capacity = -count

    def text(self, token: int) -> str:
        """The token as the vocabulary writes it (byte-level BPE spelling, not text)."""
        return (llama.llama_vocab_get_text(self.vocab_ptr, self._checked(token)) or b"").decode("utf-8", "replace")

    def attributes(self, token: int) -> TokenAttr:
        """What kind of token it is."""
        return TokenAttr(llama.llama_vocab_get_attr(self.vocab_ptr, self._checked(token)))

    def is_eog(self, token: int) -> bool:
        """Whether the token ends a generation."""
        return llama.llama_vocab_is_eog(self.vocab_ptr, self._checked(token))

    def is_control(self, token: int) -> bool:
        """Whether the token is a control token, not text."""
        return llama.llama_vocab_is_control(self.vocab_ptr, self._checked(token))

    def eog_tokens(self) -> list[int]:
        """Every token that ends a generation."""
        return [token for token in range(self.n_tokens) if self.is_eog(token)]

    def meta(self, key: str) -> str | None:
        """A scalar metadata value as text, or None."""
        return _read_text(functools.partial(llama.llama_model_meta_val_str, self.ptr, key.encode()))

    def metadata(self) -> dict[str, str]:
        """Every metadata value by key, as text."""
        model = self.ptr
        found: dict[str, str] = {}
        for index in range(llama.llama_model_meta_count(model)):
            key = _read_text(functools.partial(llama.llama_model_meta_key_by_index, model, index))
            value = _read_text(functools.partial(llama.llama_model_meta_val_str_by_index, model, index))
            if key is not None and value is not None:
                found[key] = value
        return found

    def _checked(self, token: int) -> int:
        if not 0 <= token < self.n_tokens:
            raise ValueError(f"expected a token id from 0 to {self.n_tokens - 1}, found {token}")
        return token


def _token(token: int) -> int | None:
    return None if token == llama.LLAMA_TOKEN_NULL else token


def _read_text(read: Callable[[ctypes.Array[ctypes.c_char], int], int]) -> str | None:
    """A string that C writes into a buffer, returning its length (which may be longer), or a negative number."""
    capacity = _META_BYTES
    while True:
        buffer = ctypes.create_string_buffer(capacity)
        length = read(buffer, capacity)
        if length < 0:
            return None
        if length < capacity:
            return buffer.raw[:length].decode("utf-8", "replace")
        capacity = length + 1
