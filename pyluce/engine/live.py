"""A request in a slot."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from pyluce.engine.generate import Generation
from pyluce.engine.plan import Chunk
from pyluce.engine.protocols import Expecting, Runner, SequenceLike
from pyluce.engine.ticket import Ticket
from pyluce.spec.speculator import Candidate

S = TypeVar("S", bound=SequenceLike)


@dataclass(slots=True)
class Live(Generic[S]):
    """A request in a slot. `next_token` was chosen and is not in the state yet."""

    ticket: Ticket
    generation: Generation
    state: S
    next_token: int = -1

    def candidate(self, n_ctx: int) -> Candidate[S]:
        """What a row graph needs to know of it, in a context of `n_ctx`."""
        length = self.state.length
        room = min(self.generation.remaining, n_ctx - length) - 1
        return Candidate(self.ticket.id, self.state, self.next_token, self.ticket.request.prompt, length, room)


def announce(runner: Runner[S], live: Mapping[int, Live[S]], coming: Chunk | None) -> None:
    """Tell a runner that prepares chunks which one comes after the one it is about to compute."""
    if coming is not None and coming.sequence in live and isinstance(runner, Expecting):
        runner.expect(live[coming.sequence].ticket.request.prompt, coming.begin, coming.end)
