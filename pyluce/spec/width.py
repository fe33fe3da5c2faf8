"""The width of one sequence alone, by its acceptance and measured costs: the reference system's controller."""

from __future__ import annotations

from pyluce.spec.acceptance import CARRIED_TRIALS, Acceptance
from pyluce.spec.cost import CostMemory, StepCosts
from pyluce.spec.options import MAX_WIDTH
from pyluce.spec.planner import Offer, Planner


class AdaptiveSpecWidth:
    """Chooses how many rows to verify next (the next token and its drafts), 1 to `max_width`.

    It is the joint planner with one sequence, the cost of drafting being part of the step's. `next_width` and `observe` take turns.
    """

    def __init__(self, max_width: int = MAX_WIDTH, costs: CostMemory | None = None, n_tokens: int = 0) -> None:
        """`costs`: remembered from earlier requests; `n_tokens`: the context that the request begins with."""
        self._max_width = max_width
        self._planner = Planner(budget=max_width)
        self._memory = costs if costs is not None else CostMemory()
        self._n_tokens = n_tokens
        self._clean = False
        self.acceptance = Acceptance(max_width - 1)

    def next_width(self, proposed: int | None = None) -> int:
        """Rows to verify, at most `proposed`."""
        limit = (self._max_width if proposed is None else min(proposed, self._max_width)) - 1
        offer = Offer(self.acceptance.survival(limit), limit, drafted=False, clean=self._clean)
        return 1 + self._planner.plan([offer], self._costs)[0]

    def observe(self, accepted: int, offered: int, seconds: float | None) -> None:
        """Of `offered` drafts so many were accepted. `seconds`: of the step, None when it built a graph."""
        self.acceptance.observe(accepted, offered)
        self._clean = 0 < offered == accepted
        if seconds is not None:
            self._costs.verify.observe(1 + offered, seconds)
        self._n_tokens += accepted + 1

    def next_request(self, n_tokens: int = 0) -> None:
        """Another request begins: costs stay, acceptance counts as `CARRIED_TRIALS` at most."""
        self.acceptance = self.acceptance.carry(CARRIED_TRIALS)
        self._clean = False
        self._n_tokens = n_tokens

    @property
    def _costs(self) -> StepCosts:
        return self._memory.at(self._n_tokens)
