"""Owners without C: order of freeing, closing twice, threads, forks, half-made objects. The frees are recorded in a list."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable

import pytest

from pyluce.native import ClosedError, ForkedError, NativeError, ThreadGuard, WrongThreadError, owned_by_thread
from pyluce.native import thread as thread_module
from pyluce.native.owner import Owner, close_all


class Probe(Owner):
    """An owner of a number; freeing appends the number to ``freed``."""

    def __init__(self, number: int | None, freed: list[int], parent: Owner | None = None) -> None:
        super().__init__()
        self._own("make_probe", number, freed.append, parent=parent)

    @owned_by_thread
    def twice(self, factor: int = 2) -> int:
        return self.ptr * factor


class HalfMade(Probe):
    """Fails after it owns something."""

    def __init__(self, freed: list[int]) -> None:
        super().__init__(7, freed)
        raise RuntimeError("half-way")


def in_thread(work: Callable[[], object]) -> BaseException | None:
    """Run work in another thread; return what it raised."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, name="other")
    thread.start()
    thread.join()
    return raised[0] if raised else None


def test_children_are_freed_before_the_parent_newest_first() -> None:
    freed: list[int] = []
    parent = Probe(1, freed)
    first, second = Probe(2, freed, parent), Probe(3, freed, parent)
    grandchild = Probe(4, freed, first)
    parent.close()
    assert freed == [3, 4, 2, 1]
    assert all(owner.closed for owner in (parent, first, second, grandchild))
    with pytest.raises(ClosedError, match="Probe was used after close"):
        _ = grandchild.ptr


def test_closing_twice_frees_once() -> None:
    freed: list[int] = []
    parent = Probe(1, freed)
    child = Probe(2, freed, parent)
    child.close()
    child.close()
    parent.close()
    parent.close()
    assert freed == [2, 1]


def test_a_child_keeps_its_parent_open() -> None:
    freed: list[int] = []
    child = Probe(2, freed, Probe(1, freed))
    gc.collect()
    assert freed == []
    del child
    gc.collect()
    assert freed == [2, 1]


def test_a_lost_cycle_is_freed_in_order() -> None:
    freed: list[int] = []
    parent = Probe(1, freed)
    child = Probe(2, freed, parent)
    parent.loop = child  # type: ignore[attr-defined]
    child.loop = parent  # type: ignore[attr-defined]
    del parent, child
    gc.collect()
    assert freed == [2, 1]


def test_context_manager_closes_after_an_exception() -> None:
    freed: list[int] = []
    with pytest.raises(KeyError), Probe(1, freed):
        raise KeyError("inside")
    assert freed == [1]


def test_null_is_an_error_naming_the_constructor() -> None:
    freed: list[int] = []
    for null in (None, 0):
        with pytest.raises(NativeError, match="make_probe returned NULL for Probe"):
            Probe(null, freed)
    assert freed == []


def test_a_half_made_owner_leaves_nothing() -> None:
    freed: list[int] = []
    with pytest.raises(RuntimeError, match="half-way"):
        HalfMade(freed)
    gc.collect()
    assert freed == [7]


def test_another_thread_is_refused() -> None:
    freed: list[int] = []
    owner = Probe(21, freed)
    for use in (lambda: owner.ptr, owner.twice, owner.close):
        error = in_thread(use)
        assert isinstance(error, WrongThreadError), use
        assert "belongs to the thread 'MainThread', it was used from 'other'" in str(error)
    assert (owner.twice(), freed) == (42, [])
    owner.close()
    assert freed == [21]


def test_what_a_finished_thread_left_open_can_be_closed_but_not_used() -> None:
    freed: list[int] = []
    made: list[Probe] = []
    assert in_thread(lambda: made.append(Probe(5, freed))) is None
    with pytest.raises(WrongThreadError):
        _ = made[0].ptr
    made[0].close()
    assert freed == [5]


def test_in_a_forked_child_use_is_an_error_and_close_frees_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    freed: list[int] = []
    owner = Probe(9, freed)
    monkeypatch.setattr(thread_module, "_generation", thread_module._generation + 1)
    with pytest.raises(ForkedError, match="do not survive a fork"):
        owner.twice()
    owner.close()
    assert (owner.closed, freed) == (True, [])


def test_exit_frees_newest_first_and_leaves_a_running_threads_handles_alone() -> None:
    freed: list[int] = []
    ready, done = threading.Event(), threading.Event()
    other: list[Probe] = []

    def work() -> None:
        other.append(Probe(100, freed))
        ready.set()
        done.wait()

    thread = threading.Thread(target=work)
    thread.start()
    ready.wait()
    mine = [Probe(1, freed), Probe(2, freed)]
    close_all()
    assert freed == [2, 1] and all(owner.closed for owner in mine)
    done.set()
    thread.join()
    close_all()
    assert freed == [2, 1, 100]


def test_guard_of_any_object() -> None:
    class Engine:
        def __init__(self) -> None:
            self.thread_guard = ThreadGuard("Engine")

        @owned_by_thread
        def add(self, a: int, *, b: int) -> int:
            return a + b

    engine = Engine()
    assert engine.add(1, b=2) == 3
    assert isinstance(in_thread(lambda: engine.add(1, b=2)), WrongThreadError)
