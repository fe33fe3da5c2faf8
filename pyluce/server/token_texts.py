"""The texts of tokens for log probabilities, fetched from the vocabulary's thread and remembered."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pyluce.engine import TokenEvent
from pyluce.server.bridge import run_text
from pyluce.server.protocols import Service
from pyluce.server.reply import Piece, Token

NOTHING = -9999.0
"""OpenAI's number for a probability of zero, whose logarithm JSON cannot hold."""


class TokenTexts:
    """Bytes by token id. `learn` first, then the other methods, which wait for nothing."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._bytes: dict[int, bytes] = {}

    async def learn(self, pieces: Iterable[Piece]) -> None:
        """Fetch what is missing for the tokens in `pieces`."""
        wanted = {token for piece in pieces if isinstance(piece, Token) for token in tokens_of(piece.event)}
        missing = sorted(wanted.difference(self._bytes))
        if missing:
            found = await run_text(
                self._service, lambda tools: [tools.tokenizer.token_bytes(token) for token in missing]
            )
            self._bytes.update(zip(missing, found, strict=True))

    def text(self, token: int) -> str:
        """A token's text; what is no complete character alone becomes U+FFFD."""
        return self._bytes[token].decode("utf-8", "replace")

    def chat_entry(self, event: TokenEvent, n_top: int) -> dict[str, Any]:
        """An entry of `logprobs.content` of a chat completion."""
        top = [self._entry(token, logprob) for token, logprob in event.top_logprobs[:n_top]]
        return {**self._entry(event.token, event.logprob), "top_logprobs": top}

    def top_by_text(self, event: TokenEvent, n_top: int) -> dict[str, float]:
        """The alternatives of a text completion: logarithms by text, the more probable of two tokens with one text."""
        best: dict[str, float] = {}
        for token, logprob in event.top_logprobs[:n_top]:
            best.setdefault(self.text(token), finite(logprob))
        return best

    def _entry(self, token: int, logprob: float | None) -> dict[str, Any]:
        return {"token": self.text(token), "logprob": finite(logprob), "bytes": list(self._bytes[token])}


def tokens_of(event: TokenEvent) -> list[int]:
    """The ids that an event names."""
    return [event.token, *(token for token, _ in event.top_logprobs)]


def finite(logprob: float | None) -> float:
    """A logarithm that JSON can hold."""
    return NOTHING if logprob is None or logprob < NOTHING else float(logprob)
