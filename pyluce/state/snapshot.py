"""A sequence's state at one position, kept apart from any slot."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pyluce.state.pages import PageAllocator


class Snapshot:
    """What `SequenceState.snapshot` keeps; `close()` lets the pages go.

    The tokens, where the chunks that computed them were cut, the pages (held, shared with whoever else holds them), the
    recurrent state, the logits that follow.
    """

    __slots__ = ("_allocator", "cuts", "logits", "pages", "recurrent", "tokens")

    def __init__(
        self,
        allocator: PageAllocator,
        tokens: tuple[int, ...],
        cuts: tuple[int, ...],
        pages: list[int],
        recurrent: npt.NDArray[np.uint8],
        logits: npt.NDArray[np.float32] | None,
    ) -> None:
        self._allocator = allocator
        self.tokens = tokens
        self.cuts = cuts
        self.pages = pages
        self.recurrent = recurrent
        self.logits = None if logits is None else logits.copy()

    @property
    def length(self) -> int:
        """Tokens in it."""
        return len(self.tokens)

    @property
    def own_bytes(self) -> int:
        """Bytes beside the pages."""
        return self.recurrent.nbytes + (self.logits.nbytes if self.logits is not None else 0)

    def close(self) -> None:
        """Let the pages go. Idempotent."""
        for page in self.pages:
            self._allocator.drop(page)
        self.pages = []
