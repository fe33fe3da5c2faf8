"""Which pages of the attention pool belong to which sequence: plain bookkeeping, no native calls.

A page holds `PAGE_TOKENS` consecutive tokens of a sequence in every full-attention layer. A page may be shared by
sequences with the same prefix; whoever writes into a shared page first gets a copy of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

PAGE_TOKENS = 64


class OutOfPagesError(RuntimeError):
    """The pool has fewer free pages than a sequence needs."""


def pages_for(n_tokens: int) -> int:
    """Pages that hold `n_tokens` tokens."""
    return -(-n_tokens // PAGE_TOKENS)


@dataclass(slots=True)
class PageTable:
    """The pages of one sequence, in order of positions."""

    pages: list[int] = field(default_factory=list)


class PageAllocator:
    """Hands out pages and counts who holds them. The highest page is kept back as scratch for padding rows."""

    def __init__(self, n_pages: int) -> None:
        if n_pages < 2:
            raise ValueError(f"expected at least 2 pages (one of them scratch), found {n_pages}")
        self.n_pages = n_pages
        self.scratch_page = n_pages - 1
        self.copy_on_write = True  # tests switch it off to see sequences overwrite each other
        self.reclaim: Callable[[int], None] | None = None  # asked for pages when too few are free
        self._free = list(range(n_pages - 2, -1, -1))
        self._holders = [0] * n_pages

    @property
    def n_free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    def free_pages(self) -> list[int]:
        """The numbers of the free pages."""
        return list(self._free)

    def holders(self, page: int) -> int:
        """How many sequences hold the page."""
        return self._holders[page]

    def take(self) -> int:
        """A free page, held once. Raises OutOfPagesError."""
        if not self._free:
            raise OutOfPagesError(
                f"all {self.n_pages - 1} pages of {PAGE_TOKENS} tokens are in use; "
                "free a sequence or start with a larger context"
            )
        page = self._free.pop()
        self._holders[page] = 1
        return page

    def share(self, page: int) -> None:
        """One more holder of a page that is in use."""
        if self._holders[page] == 0:
            raise ValueError(f"page {page} is free, it cannot be shared")
        self._holders[page] += 1

    def drop(self, page: int) -> None:
        """One holder less; the last one frees the page."""
        if self._holders[page] == 0:
            raise ValueError(f"page {page} is free already")
        self._holders[page] -= 1
        if self._holders[page] == 0:
            self._free.append(page)

    def is_writable(self, table: PageTable, first: int, last: int) -> bool:
        """Positions first..last (inclusive) have pages that nobody else holds: `prepare_write` would do nothing."""
        pages, holders = table.pages, self._holders
        first_page, last_page = first // PAGE_TOKENS, last // PAGE_TOKENS
        if last_page >= len(pages):
            return False
        if first_page == last_page:
            return holders[pages[last_page]] == 1
        return all(holders[page] == 1 for page in pages[first_page : last_page + 1])

    def prepare_write(self, table: PageTable, first: int, last: int) -> list[tuple[int, int]]:
        """Make positions first..last (inclusive) of a sequence writable and return the page copies that it takes.

        Missing pages are added, shared ones replaced; a pair (from, to) means: copy the page's rows before writing.
        Raises OutOfPagesError before anything changes.
        """
        first_page, last_page = first // PAGE_TOKENS, last // PAGE_TOKENS
        written = range(first_page, min(last_page + 1, len(table.pages)))
        shared = [i for i in written if self.copy_on_write and self._holders[table.pages[i]] > 1]
        missing = max(0, last_page + 1 - len(table.pages))
        short = len(shared) + missing - len(self._free)
        if short > 0 and self.reclaim is not None:
            self.reclaim(short)
            shared = [i for i in shared if self._holders[table.pages[i]] > 1]
        if len(shared) + missing > len(self._free):
            raise OutOfPagesError(
                f"expected {len(shared) + missing} free pages of {PAGE_TOKENS} tokens for positions {first} to {last}, "
                f"found {len(self._free)} of {self.n_pages - 1}"
            )
        copies = []
        for i in shared:
            page = self.take()
            copies.append((table.pages[i], page))
            self.drop(table.pages[i])
            table.pages[i] = page
        table.pages.extend(self.take() for _ in range(missing))
        return copies

    def truncate(self, table: PageTable, n_tokens: int) -> None:
        """Give back the pages beyond the first `n_tokens` tokens."""
        keep = pages_for(n_tokens)
        for page in table.pages[keep:]:
            self.drop(page)
        del table.pages[keep:]
