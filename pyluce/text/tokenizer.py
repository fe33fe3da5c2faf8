"""Text to token ids and back, over libllama's vocabulary."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from pyluce.text.marking import SpecialTexts
from pyluce.text.stream import ReasoningMarkers
from pyluce.text.template import ChatTemplate, RenderedPrompt, TemplateError


class VocabularyLike(Protocol):
    """What the tokenizer needs of a vocabulary (`pyluce.native.Vocabulary` has it)."""

    @property
    def n_tokens(self) -> int: ...
    @property
    def bos(self) -> int | None: ...
    @property
    def eos(self) -> int | None: ...
    @property
    def pad(self) -> int | None: ...
    @property
    def chat_template(self) -> str | None: ...
    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]: ...
    def piece(self, token: int, *, special: bool) -> bytes: ...
    def is_control(self, token: int) -> bool: ...
    def is_eog(self, token: int) -> bool: ...


class Tokenizer:
    """Encodes prompts and decodes tokens of one model.

    Special tokens are parsed only where they were meant: in the markup that the chat template itself wrote, never in supplied text.
    """

    def __init__(self, vocabulary: VocabularyLike, reasoning: ReasoningMarkers | None = None) -> None:
        self._vocabulary = vocabulary
        self.reasoning = reasoning if reasoning is not None else ReasoningMarkers()
        self.n_tokens = vocabulary.n_tokens
        controls = [token for token in range(self.n_tokens) if vocabulary.is_control(token)]
        spelled = {token: vocabulary.piece(token, special=True).decode("utf-8", "replace") for token in controls}
        self._control_ids = {text: token for token, text in reversed(spelled.items())}
        self.special = SpecialTexts(spelled.values())
        self._pieces: dict[int, bytes] = {
            # a marker that the vocabulary declares a control token is still text of the answer
            token: text.encode() if text in (self.reasoning.start, self.reasoning.end) else b""
            for token, text in spelled.items()
        }

    def encode_text(self, text: str, *, add_special: bool = True) -> list[int]:
        """Token ids of plain text; nothing in it is parsed as a special token. `add_special` adds what the model starts a text with."""
        return self._vocabulary.tokenize(text, add_special=add_special, parse_special=False)

    def encode_prompt(self, prompt: RenderedPrompt) -> list[int]:
        """Token ids of a rendered chat prompt; the template wrote every special token, so nothing is added."""
        if not prompt.literal:
            return self._vocabulary.tokenize(prompt.text, add_special=False, parse_special=True)
        tokens: list[int] = []
        literal = set(prompt.literal)
        begin = 0
        for start, end in self.special.find(prompt.text):
            if (start, end) in literal:
                continue
            tokens += self._encode_between(prompt.text[begin:start])
            tokens.append(self._control_ids[prompt.text[start:end]])
            begin = end
        return tokens + self._encode_between(prompt.text[begin:])

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token adds to the answer's text: none for a control token, unless it is a reasoning marker."""
        piece = self._pieces.get(token)
        if piece is None:
            piece = self._pieces[token] = self._vocabulary.piece(token, special=False)
        return piece

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of a run of tokens, without control tokens; bytes that are not UTF-8 become U+FFFD."""
        return b"".join(self.token_bytes(token) for token in tokens).decode("utf-8", "replace")

    def is_end(self, token: int) -> bool:
        """The token ends an answer (end of generation, of turn or of text)."""
        return self._vocabulary.is_eog(token)

    def check_tokens(self, tokens: Sequence[int]) -> None:
        """Raise ValueError for the first id that is not in the vocabulary."""
        for index, token in enumerate(tokens):
            if isinstance(token, bool) or not isinstance(token, int):
                raise ValueError(f"tokens[{index}]: expected an integer, found {type(token).__name__}")
            if not 0 <= token < self.n_tokens:
                raise ValueError(f"tokens[{index}]: expected an id from 0 to {self.n_tokens - 1}, found {token}")

    def chat_template(self, source: str | None = None) -> ChatTemplate:
        """The model's chat template, compiled; `source` replaces the file's. Raises TemplateError when there is none."""
        source = source if source is not None else self._vocabulary.chat_template
        if not source:
            raise TemplateError(
                "the model file has no chat template (tokenizer.chat_template): give a plain prompt (--raw) or a template of your own"
            )
        return ChatTemplate(source, special=self.special, names=self._special_names(), reasoning=self.reasoning)

    def _encode_between(self, text: str) -> list[int]:
        return self._vocabulary.tokenize(text, add_special=False, parse_special=False) if text else []

    def _special_names(self) -> dict[str, str]:
        vocabulary = self._vocabulary
        ids = {"bos_token": vocabulary.bos, "eos_token": vocabulary.eos, "pad_token": vocabulary.pad}
        return {
            name: vocabulary.piece(token, special=True).decode("utf-8", "replace")
            for name, token in ids.items()
            if token is not None
        }
