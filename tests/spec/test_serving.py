"""The engine's speculator in simulated serving: where drafts do not pay it costs next to nothing, where they do it finds out."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.spec_serving import CPU, GPU, Device, serve

PROSE = (0.76, 0.81, 0.81, 0.93, 0.88, 0.66, 0.87)
"""luce-tiny's rates, which on its CPU do not pay for a row and a draft step."""


@pytest.mark.parametrize("n_slots", [1, 2, 4, 8])
def test_where_drafts_do_not_pay(n_slots: int) -> None:
    """Graphs that are built and all that is tried included, once the first steps have shown it, against no drafts at all."""
    adaptive, off = (serve(CPU, lambda _: PROSE, width, n_slots, 900, seed=n_slots, after=200) for width in (0, 1))
    assert off.drafted_steps == 0
    assert adaptive.drafted_steps > 0
    assert adaptive.rate >= 0.98 * off.rate, f"{adaptive.rate / off.rate:.3f}"


def test_control_every_step_drafting_is_seen() -> None:
    always, off = (serve(CPU, lambda _: PROSE, width, 4, 300, seed=4) for width in (2, 1))
    assert always.rate < 0.95 * off.rate


def test_fewer_tries_the_more_slots() -> None:
    few, many = (serve(CPU, lambda _: (0.1,) * 7, 0, n_slots, 900, seed=3, after=200) for n_slots in (1, 8))
    assert many.drafted_steps < few.drafted_steps


@pytest.mark.parametrize(("n_slots", "share"), [(1, 0.95), (4, 0.93)])
def test_where_drafts_pay(n_slots: int, share: float) -> None:
    """Against the best fixed width, on a device whose graphs are there."""
    device = Device(GPU.row, GPU.draft, GPU.beside, build=0.0)
    adaptive = serve(device, lambda _: PROSE, 0, n_slots, 800, seed=5).rate
    best = max(serve(device, lambda _: PROSE, width, n_slots, 400, seed=5).rate for width in (2, 3, 4, 6))
    assert adaptive >= share * best, f"{adaptive / best:.3f}"


def test_texts_of_many_kinds() -> None:
    """Answers of which some never repeat and some always do: better than any one width for all of them."""
    device = Device(GPU.row, GPU.draft, GPU.beside, build=0.0)

    def kind(rng: np.random.Generator) -> tuple[float, ...]:
        return ((0.1,) * 7, (0.95,) * 7)[int(rng.integers(2))]

    adaptive = serve(device, kind, 0, 1, 900, seed=6, length=120).rate
    best = max(serve(device, kind, width, 1, 900, seed=6, length=120).rate for width in (1, 2, 3, 5, 8))
    assert adaptive >= best, f"{adaptive / best:.3f}"
