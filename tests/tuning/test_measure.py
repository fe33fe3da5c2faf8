"""What is measured, how it is decided, and that the timer runs every product of a real model (on the CPU, whose times say nothing)."""

from __future__ import annotations

from dataclasses import replace
from types import TracebackType

import pytest

from pyluce.memory.facts import load_published, read_facts
from pyluce.native.backend import Backend
from pyluce.native.luce import Phase
from pyluce.native.structs import GGMLType
from pyluce.native.tune import TuneKind
from pyluce.tuning import Product, TuneTable, model_products
from pyluce.tuning import measure as module
from pyluce.tuning.apply import Site
from pyluce.tuning.measure import ProductTimer, measure
from tests.support.models import luce_tiny_path
from tests.support.real_model import require_libraries
from tests.tuning.fake import FakeChoices

SITE = Site("Some GPU", "gfx1201", "pin=1 patches=2")
DENSE = Product(GGMLType.Q8_0, 64, 128)
EXPERTS = Product(GGMLType.Q4_K, 256, 96, 4, 16)
HEAD = Product(GGMLType.Q6_K, 256, 4096, last_rows=True)
VALUES = {TuneKind.ROW: [1, 2, 4], TuneKind.CHUNK: [1, 2]}


class FakeTimer:
    """`seconds` of (product, rows, choice), the default being 0."""

    def __init__(self, choices: FakeChoices) -> None:
        self.choices = choices
        self.timed: list[tuple[Product, Phase, int]] = []
        self.gain: dict[tuple[Product, Phase, int], float] = {}

    def __call__(self, product: Product, phase: Phase, n_rows: int) -> FakeTimer:
        self.timed.append((product, phase, n_rows))
        return self

    def seconds(self) -> float:
        product, phase, _ = self.timed[-1]
        chosen = next(iter(self.choices.chosen.values()), 0)
        return 1e-5 * (1.0 - self.gain.get((product, phase, chosen), 0.0))

    def __enter__(self) -> FakeTimer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        pass


def run(
    gain: dict[tuple[Product, Phase, int], float], products: list[Product], chunk: int = 64
) -> tuple[TuneTable, FakeTimer]:
    choices = FakeChoices(VALUES)
    timer = FakeTimer(choices)
    timer.gain = gain
    table = measure(products, choices, timer, SITE, model="m", chunk=chunk)
    assert choices.chosen == {}
    return table, timer


def test_the_fastest_candidate_is_chosen_and_noise_is_not() -> None:
    gain = {
        (DENSE, Phase.ROW, 2): 0.10,
        (DENSE, Phase.ROW, 4): 0.30,
        (EXPERTS, Phase.ROW, 1): 0.01,
        (EXPERTS, Phase.CHUNK, 2): 0.5,
    }
    table, _ = run(gain, [DENSE, EXPERTS])
    found = {(e.kind, e.type_id, e.rows): e.value for e in table.entries}
    assert found == {
        (TuneKind.ROW, GGMLType.Q8_0, 0): 4,
        **{(TuneKind.CHUNK, GGMLType.Q4_K, rows): 2 for rows in (16, 32, 64)},
    }
    times = next(e for e in table.entries if e.kind is TuneKind.ROW).microseconds
    assert times["1:default"] == pytest.approx(10.0) and times["8:4"] == pytest.approx(7.0)
    assert len(times) == 4 * (1 + 3)
    assert (table.device, table.libraries, table.driver) == ("Some GPU", "pin=1 patches=2", 12080)


def test_one_choice_for_every_number_of_rows_and_one_for_each_power_of_two_of_columns() -> None:
    _, timer = run({}, [DENSE, HEAD], chunk=100)
    dense = [(phase, n) for product, phase, n in timer.timed if product == DENSE]
    assert dense == [*((Phase.ROW, n) for n in (1, 2, 4, 8)), *((Phase.CHUNK, n) for n in (16, 32, 64, 128))]
    head = [(phase, n) for product, phase, n in timer.timed if product == HEAD]
    assert head == [*((Phase.ROW, n) for n in (1, 2, 4, 8)), (Phase.CHUNK, 16)]


def test_without_a_choice_nothing_is_timed() -> None:
    choices = FakeChoices({TuneKind.ROW: [3], TuneKind.CHUNK: []})
    timer = FakeTimer(choices)
    assert measure([DENSE], choices, timer, SITE, model="m", chunk=64).entries == ()
    assert timer.timed == []


def test_the_products_of_a_published_model() -> None:
    """Every kind of matrix is there once, the embedding and the n-gram table are not."""
    facts = load_published("ud-q4_k_xl")
    known = [replace(t, type_id=GGMLType.Q8_0) if t.type_id is None else t for t in facts.tensors.values()]
    found = model_products(facts.hparams, known)
    assert len({p.key for p in found}) == len(found)
    h = facts.hparams
    assert [p for p in found if p.last_rows and p.m == h.n_vocab]
    assert {(p.k, p.m) for p in found if not p.n_expert} >= {
        (h.n_embd, h.n_expert),
        (h.hc_low_rank, h.hc_count * h.n_embd),
    }
    assert not any(p.m == 1 and p.k == h.head_dim for p in found), "a gain"


def test_the_timer_runs_every_product_of_luce_tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    require_libraries()
    for name, value in {"WEIGHT_BYTES": 1 << 16, "MAX_WEIGHTS": 3, "WARM_UPS": 1, "ROUNDS": 1, "REPLAYS": 1}.items():
        monkeypatch.setattr(module, name, value)
    facts = read_facts(luce_tiny_path())
    products = model_products(facts.hparams, facts.tensors.values())
    assert len(products) >= 15 and {p.each_input for p in products} == {False, True}
    with Backend("cpu") as backend:
        for product in products:
            for phase, rows in ((Phase.ROW, 1), (Phase.ROW, 2), (Phase.CHUNK, 16)):
                with ProductTimer(backend, product, phase, rows) as timer:
                    assert 1 <= timer.n_products <= 4
                    assert timer.seconds() > 0.0
