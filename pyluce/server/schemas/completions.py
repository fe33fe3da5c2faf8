"""POST /v1/completions, /tokenize and /detokenize."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from pyluce.server.schemas.chat import ChatMessage, Tool
from pyluce.server.schemas.common import SamplingFields, StreamOptions, Strict


class CompletionRequest(SamplingFields):
    """A continuation of plain text: no chat template, nothing in the text is a special token."""

    model: str | None = None
    prompt: str | list[str] | list[int] | list[list[int]]
    n: int | None = Field(None, ge=1, le=16)
    stop: str | list[str] | None = None
    max_tokens: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: Literal[False] | None = None
    suffix: Literal[""] | None = None
    best_of: Literal[1] | None = None
    user: str | None = None


class TokenizeRequest(Strict):
    """Text, or a conversation as the chat template writes it."""

    content: str | None = None
    messages: list[ChatMessage] | None = None
    tools: list[Tool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special: bool = Field(False, description="Add what the model starts a text with.")
    with_pieces: bool = Field(False, description="Return each token's text too.")


class DetokenizeRequest(Strict):
    """Token ids."""

    tokens: list[int]
