"""Decides each token of one answer: given by the thinking budget, or chosen by the sampler from what the constraint allows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pyluce.engine.errors import ConstraintError
from pyluce.engine.protocols import Row, Sampler
from pyluce.engine.sampling import GreedySampler
from pyluce.engine.thinking import ThinkingBudget, reasoning_limit

if TYPE_CHECKING:
    from pyluce.engine.generate import GenerationRequest


class TokenChooser:
    """For each token: `choose` it, step the text, then `note` what the text became. `close` it once."""

    def __init__(self, request: GenerationRequest, max_tokens: int, sampler: Sampler) -> None:
        """`max_tokens`: of this answer. The sampler belongs to the chooser from now on."""
        limit = reasoning_limit(request.thinking_budget, max_tokens, len(request.thinking_end))
        self._sampler = sampler
        self._thinking = ThinkingBudget(limit, request.thinking_end)
        self._marker = request.reasoning.end.encode() if request.reasoning else b""
        self._recent = b""  # of the reasoning: as much as may begin its end marker
        self._constraint = request.constraint() if request.constraint else None
        self._constrained = False
        self._start = request.reasoning_start  # None from the second token on
        if self._constraint is not None and not (request.reasoning and request.starts_in_reasoning):
            self._begin(b"", line_breaks=False)

    @property
    def complete(self) -> bool:
        """The constraint lets nothing but the end follow."""
        return self._constrained and self._constraint is not None and self._constraint.is_complete

    @property
    def wants_logits(self) -> bool:
        """A token cannot be chosen by the largest logit alone."""
        return self._constraint is not None or not (isinstance(self._sampler, GreedySampler) and self._sampler.is_plain)

    @property
    def reasoning_tokens(self) -> int:
        """Tokens of the reasoning so far, its end marker included."""
        return self._thinking.count

    def choose(self, row: Row, in_reasoning: bool) -> int:
        """The next token, from logits [n_vocab] that are not changed, or, unless it `wants_logits`, from the largest one's id.

        `in_reasoning`: the text so far ends inside the reasoning. Raises ConstraintError when no token is allowed.
        """
        given = self._thinking.next_token(in_reasoning)
        if given is not None:
            self._sampler.accept(given)
            return given
        if isinstance(row, int):
            return row
        if self._constraint is None:
            return self._sampler.sample(row)
        allowed = row.copy()
        if not self._constrained:
            self._constraint.mask_ends(allowed)
        else:
            self._constraint.mask(allowed)
            if self._start is not None:
                allowed[self._start] = row[self._start]
        if allowed.max() == -np.inf:
            raise ConstraintError("the answer's grammar allows no token that the model can write here")
        token = self._sampler.sample(allowed)
        self._constrained = self._constrained and token != self._start
        self._start = None
        if self._constrained:
            self._constraint.accept(token)
        return token

    def note(self, data: bytes, in_reasoning: bool) -> None:
        """The chosen token added `data` to the text, which is now inside the reasoning or not."""
        if self._constraint is None or self._constrained:
            return
        text = self._recent + data
        self._recent = text[-len(self._marker) :]
        if in_reasoning or self._thinking.giving:
            return
        after = text.partition(self._marker)[2]
        self._begin(after.lstrip(b"\n"), line_breaks=not after)

    def close(self) -> None:
        """Free the sampler and the constraint."""
        try:
            if self._constraint is not None:
                self._constraint.close()
        finally:
            self._sampler.close()

    def _begin(self, head: bytes, line_breaks: bool) -> None:
        assert self._constraint is not None
        self._constrained = True
        self._constraint.begin(head, line_breaks)
