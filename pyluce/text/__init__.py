"""Turns messages into tokens and tokens into text."""

from __future__ import annotations

from pyluce.text.stream import Channel, ReasoningMarkers, TextDelta, TextStream, split_text
from pyluce.text.template import ChatTemplate, RenderedPrompt, TemplateError
from pyluce.text.tokenizer import Tokenizer, VocabularyLike

__all__ = [
    "Channel",
    "ChatTemplate",
    "ReasoningMarkers",
    "RenderedPrompt",
    "TemplateError",
    "TextDelta",
    "TextStream",
    "Tokenizer",
    "VocabularyLike",
    "split_text",
]
