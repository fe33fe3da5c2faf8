"""Page bookkeeping against a naive model: who holds what, what is copied, nothing lost."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyluce.state.pages import PAGE_TOKENS, OutOfPagesError, PageAllocator, PageTable, pages_for


def test_pages_for_counts_partial_pages() -> None:
    assert [pages_for(n) for n in (0, 1, PAGE_TOKENS, PAGE_TOKENS + 1)] == [0, 1, 1, 2]


def test_scratch_page_is_never_handed_out() -> None:
    allocator = PageAllocator(4)
    assert allocator.scratch_page not in [allocator.take() for _ in range(3)]
    with pytest.raises(OutOfPagesError, match="all 3 pages"):
        allocator.take()


def test_prepare_write_changes_nothing_when_pages_run_out() -> None:
    allocator, table = PageAllocator(3), PageTable()
    allocator.prepare_write(table, 0, PAGE_TOKENS - 1)
    before = list(table.pages)
    with pytest.raises(OutOfPagesError, match="expected 2 free pages"):
        allocator.prepare_write(table, PAGE_TOKENS, 3 * PAGE_TOKENS - 1)
    assert table.pages == before and allocator.n_free == 1


def test_a_shared_page_is_copied_once_by_its_first_writer() -> None:
    allocator, mine = PageAllocator(8), PageTable()
    allocator.prepare_write(mine, 0, PAGE_TOKENS + 5)
    other = PageTable(list(mine.pages))
    for page in mine.pages:
        allocator.share(page)
    old = mine.pages[1]
    copies = allocator.prepare_write(mine, PAGE_TOKENS + 6, PAGE_TOKENS + 6)
    assert copies == [(old, mine.pages[1])] and mine.pages[1] != old
    assert other.pages[1] == old and allocator.holders(old) == 1
    assert allocator.prepare_write(other, PAGE_TOKENS + 6, PAGE_TOKENS + 6) == []


def test_a_page_is_freed_by_its_last_holder_only() -> None:
    allocator = PageAllocator(3)
    page = allocator.take()
    allocator.share(page)
    allocator.drop(page)
    assert allocator.n_free == 1
    allocator.drop(page)
    assert allocator.n_free == 2
    with pytest.raises(ValueError, match="free already"):
        allocator.drop(page)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from("wrc"), st.integers(1, 100)), max_size=40))
def test_pages_are_held_exactly_by_the_tables_that_list_them(steps: list[tuple[int, str, int]]) -> None:
    allocator = PageAllocator(12)
    tables, lengths = [PageTable() for _ in range(3)], [0, 0, 0]
    for who, what, count in steps:
        table = tables[who]
        if what == "w":
            try:
                allocator.prepare_write(table, lengths[who], lengths[who] + count - 1)
            except OutOfPagesError:
                continue
            lengths[who] += count
        elif what == "r":
            lengths[who] = max(0, lengths[who] - count)
            allocator.truncate(table, lengths[who])
        else:
            target = tables[(who + 1) % 3]
            allocator.truncate(target, 0)
            for page in table.pages:
                allocator.share(page)
            target.pages, lengths[(who + 1) % 3] = list(table.pages), lengths[who]
        for table, length in zip(tables, lengths, strict=True):
            assert len(table.pages) == pages_for(length)
        held = [page for table in tables for page in table.pages]
        assert all(allocator.holders(page) == held.count(page) for page in set(held))
        assert allocator.n_free == 11 - len(set(held)) and allocator.scratch_page not in held


@pytest.mark.parametrize("first, last", [(0, 0), (70, 70), (60, 70), (130, 130), (100, 200), (0, 191), (150, 192)])
@pytest.mark.parametrize("shared", [(), (0,), (1,), (2,)])
def test_writable_means_that_nothing_is_to_be_prepared(first: int, last: int, shared: tuple[int, ...]) -> None:
    allocator, table = PageAllocator(16), PageTable()
    allocator.prepare_write(table, 0, 3 * PAGE_TOKENS - 1)
    for index in shared:
        allocator.share(table.pages[index])
    said, before = allocator.is_writable(table, first, last), list(table.pages)
    copies = allocator.prepare_write(table, first, last)
    assert said == (not copies and table.pages == before)
