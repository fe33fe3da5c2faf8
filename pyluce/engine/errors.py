"""What can go wrong with a request, and with the engine."""

from __future__ import annotations


class RequestError(ValueError):
    """A request that cannot be served as it is; raised before any work. The message names the field."""


class ContextLimitError(RequestError):
    """The prompt, or the prompt and the answer that was asked for, do not fit into the context."""


class LogitsError(RuntimeError):
    """The model produced logits that no token can be chosen from (NaN, or no finite value). It ends one request."""


class EngineError(RuntimeError):
    """The engine itself failed or is gone; no request can be served."""


class EngineClosedError(EngineError):
    """The engine was closed."""


class EngineForkedError(EngineError):
    """The engine was used in a process forked from the one that started it."""
