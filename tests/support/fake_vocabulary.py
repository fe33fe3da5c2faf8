"""A byte-level vocabulary in plain Python: 256 bytes, some merged words, some control tokens."""

from __future__ import annotations

from collections.abc import Sequence

DEFAULT_CONTROLS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
DEFAULT_USER_DEFINED = ("<think>", "</think>")
DEFAULT_WORDS = ("the ", "and", "ing", "hello", " world", "\n\n")

CHAT_TEMPLATE = """
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' and message.reasoning_content %}
{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}
{%- endif %}
{{- message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}
{{- '<think>\\n\\n</think>\\n\\n' }}
{%- else %}
{{- '<think>\\n' }}
{%- endif %}
{%- endif %}
"""


class FakeVocabulary:
    """Ids 0..255 are bytes, then words, then user-defined tokens, then control tokens. The first control token is bos, eos and pad."""

    def __init__(
        self,
        *,
        controls: Sequence[str] = DEFAULT_CONTROLS,
        user_defined: Sequence[str] = DEFAULT_USER_DEFINED,
        words: Sequence[str] = DEFAULT_WORDS,
        chat_template: str | None = CHAT_TEMPLATE,
    ) -> None:
        self._bytes = [bytes([value]) for value in range(256)]
        self._bytes += [text.encode() for text in (*words, *user_defined, *controls)]
        self._words = {text.encode(): 256 + index for index, text in enumerate(words)}
        first_user = 256 + len(words)
        self._user = {text.encode(): first_user + index for index, text in enumerate(user_defined)}
        first_control = first_user + len(user_defined)
        self._control = {text.encode(): first_control + index for index, text in enumerate(controls)}
        self._end = {self._control[text] for text in self._control if text in (b"<|endoftext|>", b"<|im_end|>")}
        self.chat_template = chat_template
        self.bos = self.eos = self.pad = first_control if controls else None

    @property
    def n_tokens(self) -> int:
        return len(self._bytes)

    def token(self, text: str) -> int:
        for table in (self._control, self._user, self._words):
            if text.encode() in table:
                return table[text.encode()]
        raise KeyError(text)

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        known = {**self._words, **self._user, **(self._control if parse_special else {})}
        by_length = sorted(known, key=lambda piece: -len(piece))
        data = text.encode()
        tokens: list[int] = []
        position = 0
        while position < len(data):
            piece = next((piece for piece in by_length if data.startswith(piece, position)), None)
            tokens.append(known[piece] if piece else data[position])
            position += len(piece) if piece else 1
        return tokens

    def piece(self, token: int, *, special: bool) -> bytes:
        if not special and self.is_control(token):
            return b""
        return self._bytes[token]

    def is_control(self, token: int) -> bool:
        return token >= len(self._bytes) - len(self._control)

    def is_eog(self, token: int) -> bool:
        return token in self._end
