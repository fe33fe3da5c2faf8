"""States as plain bytes: taken out of a pool, and put into another one of the same layout."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pyluce.state.entry_file import Bytes, EntryHead, StateImage, read_pages, read_section
from pyluce.state.pages import PAGE_TOKENS, PageTable, pages_for
from pyluce.state.pool import StatePool
from pyluce.state.sequence_state import SequenceState
from pyluce.state.snapshot import Snapshot


def take_image(pool: StatePool, snapshot: Snapshot, first_page: int = 0) -> StateImage:
    """A copy of a snapshot's bytes, of its pages those from `first_page` on. What lies beyond its tokens is zero."""
    ends = (*snapshot.cuts, snapshot.length)
    return _image(pool, snapshot.tokens, ends, snapshot.pages, snapshot.recurrent, snapshot.logits, first_page)


def take_live_image(pool: StatePool, state: SequenceState) -> StateImage:
    """A copy of a running sequence's bytes, decoded tokens included: to go on with it later, and for nothing else."""
    recurrent = pool.capture(state.slot, state.length)
    return _image(pool, tuple(state.tokens), tuple(state.chunk_ends), state.pages, recurrent, None, 0)


def _image(
    pool: StatePool,
    tokens: tuple[int, ...],
    ends: tuple[int, ...],
    pages: Sequence[int],
    recurrent: Bytes,
    logits: npt.NDArray[np.float32] | None,
    first_page: int,
) -> StateImage:
    used = pages[first_page : pages_for(len(tokens))]
    out = np.empty((len(used), pool.page_bytes), np.uint8)
    for index, page in enumerate(used, first_page):
        pool.read_page(page, out[index - first_page], min(PAGE_TOKENS, len(tokens) - index * PAGE_TOKENS))
    return StateImage(
        tokens=tokens,
        ends=ends,
        first_page=first_page,
        pages=out,
        page_parts=pool.page_parts(),
        recurrent=recurrent,
        recurrent_parts=pool.recurrent_parts(len(tokens)),
        logits=logits,
    )


def load_snapshot(pool: StatePool, chain: Sequence[EntryHead], like: Sequence[Snapshot] = ()) -> Snapshot:
    """A snapshot of the last file of `chain`, each of which continues the one before; pages that it shares with one of `like` are shared.

    Raises DamagedError, OSError or OutOfPagesError with nothing kept.
    """
    head = chain[-1]
    recurrent = read_section(head, "recurrent")
    logits = read_section(head, "logits").view("<f4") if head.has_logits else None
    tokens, ends = tuple(head.tokens.tolist()), tuple(head.ends.tolist())
    if len(like) > 0:
        other, common = max(((s, common_tokens(tokens, ends, s)) for s in like), key=lambda pair: pair[1])
        n_shared = pool.settled_pages(common)
    else:
        other, n_shared = None, 0
    table = PageTable()
    try:
        for page in other.pages[:n_shared] if other is not None else ():
            pool.allocator.share(page)
            table.pages.append(page)
        if n_shared * PAGE_TOKENS < len(tokens):
            pool.allocator.prepare_write(table, n_shared * PAGE_TOKENS, len(tokens) - 1)
        _fill(pool, chain, table.pages, n_shared)
    except BaseException:
        pool.allocator.truncate(table, 0)
        raise
    return Snapshot(pool.allocator, tokens, ends[:-1], table.pages, recurrent.copy(), logits)


def _fill(pool: StatePool, chain: Sequence[EntryHead], pages: Sequence[int], first: int) -> None:
    """Read the pages from number `first` on, each from the last file that has it."""
    for head, following in zip(chain, [*chain[1:], None], strict=True):
        last = following.first_page if following is not None else head.first_page + head.n_pages
        if last <= first:
            continue
        data = np.empty((last - head.first_page, pool.page_bytes), np.uint8)
        read_pages(head, data, last)
        for number in range(max(first, head.first_page), last):
            pool.write_page(pages[number], data[number - head.first_page])


def restore_live(pool: StatePool, state: SequenceState, head: EntryHead) -> None:
    """Put a running sequence's file into an empty sequence. Raises DamagedError, OSError or OutOfPagesError."""
    if not head.length:
        return
    ends = tuple(head.ends.tolist())
    recurrent = read_section(head, "recurrent")
    table = PageTable()
    pool.allocator.prepare_write(table, 0, head.length - 1)
    snapshot = Snapshot(pool.allocator, tuple(head.tokens.tolist()), (), table.pages, recurrent, None)
    try:
        _fill(pool, [head], table.pages, 0)
        state.restore(snapshot)
        state.chunk_ends = list(ends)
    finally:
        snapshot.close()


def common_tokens(tokens: tuple[int, ...], ends: Sequence[int], other: Snapshot) -> int:
    """Tokens up to the last end of a chunk to which a state of `tokens`, computed in chunks that end at `ends`, equals a snapshot."""
    shared = 0
    for mine, theirs in zip(ends, (*other.cuts, other.length), strict=False):
        if mine != theirs or tokens[shared:mine] != other.tokens[shared:mine]:
            break
        shared = mine
    return shared
