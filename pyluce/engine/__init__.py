"""Turns requests into tokens: sampling, the generation loop, and the one thread that owns the native handles."""

from __future__ import annotations

from pyluce.engine.errors import (
    ContextLimitError,
    EngineClosedError,
    EngineError,
    EngineForkedError,
    LogitsError,
    RequestError,
)
from pyluce.engine.events import Event, FinishEvent, FinishReason, PrefillEvent, Timings, TokenEvent
from pyluce.engine.generate import Generation, GenerationRequest, Resources, generate
from pyluce.engine.hashing import StepHasher, hash_logits, hash_tokens
from pyluce.engine.protocols import Chain, Runner, Sampler, SequenceLike, TokenTable
from pyluce.engine.sampling import SamplingParams
from pyluce.engine.serial import SerialCore
from pyluce.engine.thread import Core, Engine, Ticket

__all__ = [
    "Chain",
    "ContextLimitError",
    "Core",
    "Engine",
    "EngineClosedError",
    "EngineError",
    "EngineForkedError",
    "Event",
    "FinishEvent",
    "FinishReason",
    "Generation",
    "GenerationRequest",
    "LogitsError",
    "PrefillEvent",
    "RequestError",
    "Resources",
    "Runner",
    "Sampler",
    "SamplingParams",
    "SequenceLike",
    "SerialCore",
    "StepHasher",
    "Ticket",
    "Timings",
    "TokenEvent",
    "TokenTable",
    "generate",
    "hash_logits",
    "hash_tokens",
]
