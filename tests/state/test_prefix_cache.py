"""The prefix cache over plain pages: what is found, what is evicted, what it counts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyluce.state.pages import PAGE_TOKENS, OutOfPagesError, PageAllocator, PageTable, pages_for
from pyluce.state.prefix_cache import PrefixCache
from pyluce.state.snapshot import Snapshot

PAGE_BYTES = 1000
OWN = 100


def snapshot(
    allocator: PageAllocator,
    tokens: list[int],
    table: PageTable | None = None,
    logits: bool = False,
    cuts: tuple[int, ...] = (),
) -> Snapshot:
    """A snapshot of `tokens`; without a table it gets pages of its own, which only it holds."""
    own = table is None
    table = table or PageTable()
    if own:
        allocator.prepare_write(table, 0, len(tokens) - 1)
    else:
        for page in table.pages[: pages_for(len(tokens))]:
            allocator.share(page)
    pages = list(table.pages[: pages_for(len(tokens))])
    row = np.zeros(3, np.float32) if logits else None
    return Snapshot(allocator, tuple(tokens), cuts, pages, np.zeros(OWN, np.uint8), row)


def test_the_longest_prefix_at_a_boundary_of_the_request_is_found() -> None:
    allocator, cache = PageAllocator(64), PrefixCache(PAGE_BYTES, 10**6)
    for n in (10, 20, 30):
        cache.insert(snapshot(allocator, list(range(n)), cuts=tuple(range(10, n, 10))))
    request = list(range(40))
    assert cache.find(request, {10, 20, 25, 40}).snapshot.length == 20  # type: ignore[union-attr]
    assert cache.find(request, {10}).snapshot.length == 10  # type: ignore[union-attr]
    assert cache.find(request, {5, 40}) is None
    assert cache.find(request, {5, 20}) is None, "computed in other chunks than this request's cold run"
    assert cache.find([9, *request[1:]], {10, 20, 30}) is None


def test_a_whole_prompt_needs_its_logits() -> None:
    allocator, cache = PageAllocator(64), PrefixCache(PAGE_BYTES, 10**6)
    cache.insert(snapshot(allocator, [1, 2, 3]))
    assert cache.find([1, 2, 3], {3}) is None and cache.wants([1, 2, 3], (), needs_logits=True)
    cache.insert(snapshot(allocator, [1, 2, 3], logits=True))
    assert cache.find([1, 2, 3], {3}) is not None and not cache.wants([1, 2, 3], (), needs_logits=True)


def test_the_oldest_leaf_goes_first_and_shared_prefixes_stay() -> None:
    allocator = PageAllocator(64)
    cache = PrefixCache(PAGE_BYTES, 4 * (PAGE_BYTES + OWN))
    cache.insert(snapshot(allocator, [1, 2]))
    cache.insert(snapshot(allocator, [1, 2, 3], cuts=(2,)))
    cache.insert(snapshot(allocator, [1, 2, 4], cuts=(2,)))
    cache.insert(snapshot(allocator, [7, 7]))
    cache.insert(snapshot(allocator, [8, 8]))
    left = cache.find([1, 2, 3, 9], {2, 3})
    assert left is not None and left.snapshot.length == 2, "the leaf used longest ago is gone"
    assert cache.find([1, 2, 9], {2}) is not None, "older, but the other leaf extends it"
    assert cache.stats().evictions == 1


def test_an_entry_that_a_live_sequence_came_from_stays() -> None:
    allocator = PageAllocator(64)
    cache = PrefixCache(PAGE_BYTES, 2 * (PAGE_BYTES + OWN))
    cache.insert(snapshot(allocator, [1]))
    cache.insert(snapshot(allocator, [2]))
    pinned = cache.find([1, 5], {1})
    assert pinned is not None
    cache.insert(snapshot(allocator, [3]))
    assert cache.find([2, 5], {1}) is None and cache.find([1, 6], {1}) is pinned
    cache.release(pinned)
    cache.release(pinned)
    with pytest.raises(ValueError, match="not pinned"):
        cache.release(pinned)


def test_prompts_that_only_look_alike_do_not_protect_each_other() -> None:
    allocator, cache = PageAllocator(64), PrefixCache(PAGE_BYTES, 2 * (PAGE_BYTES + OWN))
    for n in range(1, 9):
        assert cache.insert(snapshot(allocator, list(range(n))))
    assert cache.stats().entries == 2 and cache.find(list(range(9)), {8}) is not None


def test_the_deepest_point_takes_the_place_of_what_it_extends() -> None:
    allocator, cache = PageAllocator(64), PrefixCache(PAGE_BYTES, 3 * (PAGE_BYTES + OWN))
    for n in range(1, 9):
        assert cache.insert(snapshot(allocator, list(range(n)), cuts=tuple(range(1, n))))
    assert cache.find(list(range(9)), set(range(1, 9))).snapshot.length == 8  # type: ignore[union-attr]
    pinned = cache.find([0, 1, 2, 3, 4, 5, 6, 99], set(range(1, 9)))
    assert pinned is not None and pinned.snapshot.length == 7
    for n in range(9, 12):
        assert cache.insert(snapshot(allocator, list(range(n)), cuts=tuple(range(1, n))))
        assert pinned in cache.entries()


def test_what_does_not_fit_is_refused_and_let_go() -> None:
    allocator, cache = PageAllocator(64), PrefixCache(PAGE_BYTES, PAGE_BYTES)
    free = allocator.n_free
    assert not cache.insert(snapshot(allocator, [1]))
    assert allocator.n_free == free and cache.stats().refused == 1 and cache.n_bytes == 0


def test_shared_pages_are_counted_once() -> None:
    allocator, cache = PageAllocator(64), PrefixCache(PAGE_BYTES, 10**6)
    table, tokens = PageTable(), list(range(3 * PAGE_TOKENS))
    allocator.prepare_write(table, 0, len(tokens) - 1)
    for n in (PAGE_TOKENS, 2 * PAGE_TOKENS, 3 * PAGE_TOKENS):
        cache.insert(snapshot(allocator, tokens[:n], table, cuts=tuple(range(PAGE_TOKENS, n, PAGE_TOKENS))))
    assert cache.n_bytes == 3 * PAGE_BYTES + 3 * OWN
    cache.clear()
    assert cache.n_bytes == 0 and allocator.n_free == 63 - 3


def test_live_sequences_get_pages_back_from_the_cache() -> None:
    allocator, cache = PageAllocator(5), PrefixCache(PAGE_BYTES, 10**6)
    allocator.reclaim = cache.reclaim
    for first in (1, 2, 3, 4):
        cache.insert(snapshot(allocator, [first]))
    table = PageTable()
    allocator.prepare_write(table, 0, 2 * PAGE_TOKENS - 1)
    assert len(table.pages) == 2 and cache.stats().entries == 2
    with pytest.raises(OutOfPagesError):
        allocator.prepare_write(PageTable(), 0, 3 * PAGE_TOKENS - 1)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("ifrc"), st.lists(st.integers(0, 2), min_size=1, max_size=6)), max_size=40))
def test_bytes_never_exceed_the_budget_and_pages_are_never_lost(steps: list[tuple[str, list[int]]]) -> None:
    allocator = PageAllocator(40)
    budget = 6 * (PAGE_BYTES + OWN)
    cache = PrefixCache(PAGE_BYTES, budget)
    allocator.reclaim = cache.reclaim
    pinned = []
    for what, tokens in steps:
        if what == "i":
            cache.insert(snapshot(allocator, tokens))
        elif what == "f":
            entry = cache.find([*tokens, 9], {len(tokens)})
            if entry is not None:
                assert entry.snapshot.tokens == tuple(tokens[: entry.snapshot.length])
                pinned.append(entry)
        elif what == "r" and pinned:
            cache.release(pinned.pop())
        elif what == "c":
            cache.clear()
        assert cache.n_bytes <= budget
        held = {page for entry in cache._entries.values() for page in entry.snapshot.pages}
        assert allocator.n_free == 39 - len(held)
