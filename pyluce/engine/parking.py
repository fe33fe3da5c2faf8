"""A core that can be parked: everything that the model takes is released, and later loaded again as if nothing had been.

While parked, requests that are running wait (their states lie in files), and new ones are refused, or, when that was asked for, bring the
model back. Everything here runs on the engine thread but `reserve` and `stats`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Generic, NoReturn, Protocol, TypeVar

from pyluce.engine.batch import BatchCore
from pyluce.engine.errors import ParkedError, ParkError, UnparkError
from pyluce.engine.generate import GenerationRequest, Resources
from pyluce.engine.idle import IdlePrompt
from pyluce.engine.protocols import PrefixStore, Runner, SequenceLike, Start
from pyluce.engine.stats import Activity, EngineStats
from pyluce.engine.ticket import Ticket

S = TypeVar("S", bound=SequenceLike)

RETRY_S: Final = 5.0
ASKED: Final = "it was asked for"

log = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]


class ParkableModel(Protocol[S]):
    """What holds the memory (`pyluce.keeping.ModelKeeper`)."""

    def park(self, live: Mapping[int, S], discard: bool) -> Mapping[int, S]:
        """Write what would be lost, release everything, and return what stands in for each running sequence until `resume`.

        `discard`: the prefix cache may be lost, running sequences never. Raises ParkError with nothing released.
        """

    def trim(self) -> None:
        """Called after `park`, when nothing refers to the runner any more."""

    def left(self) -> Mapping[str, object]:
        """What is still taken while parked, for the memory report."""

    def unpark(self, progress: Progress) -> tuple[Runner[S], PrefixStore[S]]:
        """Load again. Whatever it raises, nothing is left allocated."""

    def resume(self, stand_in: S) -> S:
        """The running sequence again, in a slot."""


@dataclass(frozen=True, slots=True)
class NowhereStart:
    """A sequence starts from nothing."""

    length: int = 0
    logits: None = None


class NoModel:
    """Runner and store of a parked core."""

    n_free_slots = 0
    graphs_built = 0

    def __init__(self, vocab_size: int, left: Callable[[], Mapping[str, object]]) -> None:
        self.vocab_size = vocab_size
        self._left = left

    def memory_report(self) -> dict[str, object]:
        """Nothing of the model is allocated."""
        return dict(self._left())

    def close(self) -> None:
        """Nothing is held."""

    def new_sequence(self) -> NoReturn:
        """Nobody asks."""
        raise ParkedError(ASKED, RETRY_S)

    def prefill(self, *_: Any, **__: Any) -> NoReturn:
        """Nobody asks."""
        raise ParkedError(ASKED, RETRY_S)

    def decode(self, *_: Any) -> NoReturn:
        """Nobody asks."""
        raise ParkedError(ASKED, RETRY_S)

    def decode_rows(self, *_: Any) -> NoReturn:
        """Nobody asks."""
        raise ParkedError(ASKED, RETRY_S)

    def draft(self, *_: Any) -> NoReturn:
        """Nobody asks."""
        raise ParkedError(ASKED, RETRY_S)

    def start(self, state: SequenceLike, prompt: Sequence[int], boundaries: Collection[int]) -> Start:
        """Nothing is kept."""
        return NowhereStart()

    def offer(self, state: SequenceLike, logits: Any = None) -> None:
        """Nothing is kept."""

    def end(self, state: SequenceLike) -> None:
        """Nothing is kept."""


class ParkingCore(Generic[S]):
    """A `Core` around a `BatchCore`; see the module."""

    def __init__(
        self,
        core: BatchCore[S],
        model: ParkableModel[S],
        *,
        park_after_s: float | None = None,
        unpark_on_request: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`park_after_s`: park when nothing was to do for so long."""
        self.core = core
        self._model = model
        self._park_after_s = park_after_s
        self._on_request = unpark_on_request
        self._clock = clock
        self._why: str | None = None
        self._loading = False
        self._since = self._beat_at = self._worked_at = clock()
        self._refused_idle = self._busy = False
        self._arrived: list[int] = []

    @property
    def resources(self) -> Resources[S]:
        """What the core works with now."""
        return self.core.resources

    # from any thread

    def reserve(self, request: GenerationRequest) -> Callable[[], None]:
        """See `Core.reserve`. Raises ParkedError while parked, unless requests bring the model back."""
        why = self._why
        if why is not None and not self._on_request:
            raise ParkedError(why, RETRY_S)
        return self.core.reserve(request)

    def stats(self) -> EngineStats:
        """The core's, with what parking makes of them."""
        stats = self.core.stats()
        if self._why is None or stats.activity is Activity.CLOSED:
            return stats
        activity = Activity.LOADING if self._loading else Activity.PARKED
        return replace(
            stats,
            activity=activity,
            activity_since=self._since,
            heartbeat=self._beat_at,
            parked=self._why,
            unparks_on_request=self._on_request,
        )

    # on the engine thread

    def admit(self, ticket: Ticket) -> None:
        """Queue a request; while parked it is refused, or noted as a reason to load."""
        self.core.admit(ticket)
        self._busy = True
        if self._why is None:
            return
        if self._on_request:
            self._arrived.append(ticket.id)
        else:  # it was on its way here when the model was parked
            self.core.refuse([ticket.id], ParkedError(self._why, RETRY_S))

    def warm(self, prompt: IdlePrompt) -> None:
        """See `Core.warm`; while parked it waits."""
        self.core.warm(prompt)

    def step(self) -> bool:
        """See `Core.step`."""
        self._beat_at = self._clock()
        if self._why is not None and self._arrived:
            arrived, self._arrived = self._arrived, []
            try:
                self.unpark()
            except UnparkError as error:
                self.core.refuse(arrived, error)
        if self._why is not None:
            self.core.sweep()
            return False
        busy = self.core.step()
        if busy or self._busy:  # a step may be a look at the inbox, too
            self._worked_at = self._clock()
            self._refused_idle = False
        self._busy = busy
        return busy

    def idle(self) -> None:
        """See `Core.idle`; park when it was quiet for long enough."""
        now = self._beat_at = self._clock()
        if self._why is not None:
            self.core.sweep()
            return
        self.core.idle()
        if self._park_after_s is None or self._refused_idle or now - self._worked_at < self._park_after_s:
            return
        try:
            self.park(why=f"nothing was to do for {self._park_after_s:g} s")
        except ParkError as error:
            self._refused_idle = True  # ask again after the next request, not every second
            log.warning("%s", error)

    def park(self, *, discard: bool = False, why: str = ASKED) -> bool:
        """Release the model. False when it is parked already. Raises ParkError with everything as it was."""
        if self._why is not None:
            return False
        self.core.pause()
        stand_ins = self._model.park(self.core.running(), discard)
        nothing = NoModel(self.core.resources.runner.vocab_size, self._model.left)
        self.core.exchange(nothing, nothing, stand_ins)
        self._model.trim()
        self.core.exchange(nothing, nothing, {})  # publishes what is left
        self._since = self._beat_at = self._clock()
        self._why = why
        log.info("parked: %s", why)
        return True

    def unpark(self) -> bool:
        """Load the model again and go on with the requests that were running. False when it is not parked.

        Raises UnparkError with everything released.
        """
        if self._why is None:
            return False
        self._since, self._loading = self._clock(), True
        try:
            runner, store = self._model.unpark(self._note_progress)
        except Exception as error:
            self._why = f"it could not be loaded again: {error or type(error).__name__}"
            log.error("parked: %s", self._why)
            raise UnparkError(f"the model is still parked: {self._why}") from error
        finally:
            self._loading, self._since = False, self._clock()
        states: dict[int, S] = {}
        lost: dict[int, Exception] = {}
        for number, stand_in in self.core.running().items():
            try:
                states[number] = self._model.resume(stand_in)
            except Exception as error:
                lost[number] = error
        self.core.exchange(runner, store, states)
        for number, failure in lost.items():
            self.core.refuse([number], UnparkError(f"the request's state could not be read again: {failure}"))
        self._why = None
        self._worked_at = self._clock()
        log.info("loaded again")
        return True

    def drop_all(self, error: BaseException) -> None:
        """See `Core.drop_all`."""
        self.core.drop_all(error)

    def close(self) -> None:
        """See `Core.close`."""
        self.core.close()

    def _note_progress(self, stage: str, done: int, total: int, /) -> None:
        self._beat_at = self._clock()
