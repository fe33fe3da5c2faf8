"""What can go wrong with a request, and with the engine."""

from __future__ import annotations


class RequestError(ValueError):
    """A request that cannot be served as it is; raised before any work. The message names the field."""


class ContextLimitError(RequestError):
    """The prompt, or the prompt and the answer that was asked for, do not fit into the context."""


class QueueFullError(RuntimeError):
    """Every slot and every place in the queue is taken; raised before any work. `retry_after_s`: when a place should be free."""

    def __init__(self, n_slots: int, max_queue: int, retry_after_s: float) -> None:
        super().__init__(
            f"all {n_slots} slots and all {max_queue} places in the queue are taken; try again in {retry_after_s:.0f} s"
        )
        self.retry_after_s = retry_after_s


class RequestCancelledError(RuntimeError):
    """The request was cancelled before its answer was complete."""


class DeadlineError(RuntimeError):
    """The request's time was over before its answer was complete."""


class LogitsError(RuntimeError):
    """The model produced logits that no token can be chosen from (NaN, or no finite value). It ends one request."""


class ConstraintError(RuntimeError):
    """The answer cannot keep to its grammar: no token is allowed, or the grammar takes too much work. It ends one request."""


class EngineError(RuntimeError):
    """The engine itself failed or is gone; no request can be served."""


class EngineClosedError(EngineError):
    """The engine was closed."""


class EngineForkedError(EngineError):
    """The engine was used in a process forked from the one that started it."""


class ParkError(RuntimeError):
    """The model cannot be parked now, as something would be lost; it goes on as before."""


class ParkedError(EngineError):
    """The model is parked, so the request was refused before any work. `retry_after_s`: when to ask again."""

    def __init__(self, why: str, retry_after_s: float) -> None:
        super().__init__(f"the model is parked ({why}); `luce unpark` or POST /unpark loads it again")
        self.retry_after_s = retry_after_s


class UnparkError(EngineError):
    """A parked model could not be loaded again; everything stays released."""
