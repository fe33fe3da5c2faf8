"""Turns requests into tokens: who runs when, sampling, and the one thread that owns the native handles."""

from __future__ import annotations

from pyluce.engine.batch import BatchCore
from pyluce.engine.constraint import Constraint, ConstraintCompiler, ConstraintFactory
from pyluce.engine.errors import (
    ConstraintError,
    ContextLimitError,
    DeadlineError,
    EngineClosedError,
    EngineError,
    EngineForkedError,
    LogitsError,
    ParkedError,
    ParkError,
    QueueFullError,
    RequestCancelledError,
    RequestError,
    UnparkError,
)
from pyluce.engine.events import Event, FinishEvent, FinishReason, PrefillEvent, Timings, TokenEvent
from pyluce.engine.generate import Generation, GenerationRequest, Resources, generate
from pyluce.engine.hashing import StepHasher, hash_logits, hash_tokens
from pyluce.engine.idle import IdlePrompt
from pyluce.engine.parking import ParkableModel, ParkingCore
from pyluce.engine.protocols import Chain, Runner, Sampler, SequenceLike, TokenTable
from pyluce.engine.sampling import SamplingParams
from pyluce.engine.scheduler import Scheduler
from pyluce.engine.stats import Activity, EngineStats, Outcome, SlotState, SlotStats
from pyluce.engine.thread import Core, Engine
from pyluce.engine.ticket import Message, Ticket

__all__ = [
    "Activity",
    "BatchCore",
    "Chain",
    "Constraint",
    "ConstraintCompiler",
    "ConstraintError",
    "ConstraintFactory",
    "ContextLimitError",
    "Core",
    "DeadlineError",
    "Engine",
    "EngineClosedError",
    "EngineError",
    "EngineForkedError",
    "EngineStats",
    "Event",
    "FinishEvent",
    "FinishReason",
    "Generation",
    "GenerationRequest",
    "IdlePrompt",
    "LogitsError",
    "Message",
    "Outcome",
    "ParkError",
    "ParkableModel",
    "ParkedError",
    "ParkingCore",
    "PrefillEvent",
    "QueueFullError",
    "RequestCancelledError",
    "RequestError",
    "Resources",
    "Runner",
    "Sampler",
    "SamplingParams",
    "Scheduler",
    "SequenceLike",
    "SlotState",
    "SlotStats",
    "StepHasher",
    "Ticket",
    "Timings",
    "TokenEvent",
    "TokenTable",
    "UnparkError",
    "generate",
    "hash_logits",
    "hash_tokens",
]
