"""Tables on a real GPU (`LUCE_TEST_DEVICE=cuda:0`): chunk choices change no bit, row choices change some, and no row sees another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pyluce.graph import RunnerOptions, TrunkRunner
from pyluce.memory.facts import read_facts
from pyluce.native.backend import Backend
from pyluce.native.tune import DeviceChoices, TuneKind
from pyluce.tuning import Entry, TuneError, TuneTable, model_products
from pyluce.tuning.apply import this_site
from pyluce.tuning.measure import ProductTimer, measure
from tests.support.device import DEVICE, ON_GPU
from tests.support.models import luce_tiny_path

pytestmark = pytest.mark.skipif(not ON_GPU, reason="the CPU has nothing to choose")

CHUNK = 64
OPTIONS = RunnerOptions(n_ctx=512, n_slots=4, chunk_tokens=CHUNK, device=DEVICE)
Pick = Callable[[Sequence[int]], int]


def table(kind: TuneKind, pick: Pick) -> TuneTable:
    """A choice for every product of luce-tiny that has one."""
    facts, choices, site = read_facts(luce_tiny_path()), DeviceChoices(DEVICE), this_site(DEVICE)
    rows = [0] if kind is TuneKind.ROW else [16, 32, 64]
    entries = []
    for product in model_products(facts.hparams, facts.tensors.values()):
        for n in rows:
            candidates = choices.candidates(kind, *product.key, n)
            if len(candidates) > 1:
                entries.append(Entry(kind, *product.key, n, pick(candidates)))
    assert entries, "no product has a choice"
    return TuneTable(site.device, site.architecture, choices.driver, site.libraries, "luce-tiny", tuple(entries))


def computed(tune: str) -> tuple[bytes, list[bytes]]:
    """Logits of chunks, and of rows: alone, four sequences together, several of one sequence."""
    tokens = [int(t) for t in np.random.default_rng(5).integers(1, 4000, 150)]
    with TrunkRunner(luce_tiny_path(), replace(OPTIONS, tune=tune)) as runner:
        states = [runner.new_sequence() for _ in range(4)]
        chunks = np.asarray(runner.prefill(states[0], tokens[:130], want="all")).tobytes()
        for state in states[1:]:
            runner.prefill(state, tokens[:130])
        alone = np.concatenate([runner.decode([(states[0], t)]) for t in tokens[130:134]]).tobytes()
        together = np.stack([runner.decode([(s, t) for s in states[1:]])[1] for t in tokens[130:134]]).tobytes()
        states[0].rollback(4)
        verified = runner.decode([(states[0], t) for t in tokens[130:134]]).tobytes()
        return chunks, [alone, together, verified]


@pytest.mark.parametrize("which", [0, -1])
def test_choices(which: int, tmp_path: Path) -> None:
    chunks, rows = computed("off")
    assert rows[0] == rows[1] == rows[2]
    path = tmp_path / "t.json"
    table(TuneKind.CHUNK, lambda values: values[which]).save(path)
    assert computed(str(path)) == (chunks, rows), "chunk choices change no bit"
    table(TuneKind.ROW, lambda values: values[which]).save(path)
    other_chunks, other_rows = computed(str(path))
    assert other_rows[0] == other_rows[1] == other_rows[2], "whatever the choice, no row sees another"
    assert other_chunks == chunks
    if which == 0:
        assert other_rows != rows, "control: the table had an effect"


def test_a_table_that_does_not_belong_is_refused_before_loading(tmp_path: Path) -> None:
    made = table(TuneKind.ROW, lambda values: values[0])
    path = tmp_path / "t.json"
    for wrong, message in (
        (replace(made, device="another"), "device: expected"),
        (replace(made, libraries="another"), "libraries: expected"),
        (
            replace(made, entries=(replace(made.entries[0], value=63),)),
            "expected a choice that this device has, found 63",
        ),
        (replace(made, entries=(replace(made.entries[0], m=7),)), "expected products of this model"),
    ):
        wrong.save(path)
        with pytest.raises(TuneError, match=message):
            TrunkRunner(luce_tiny_path(), replace(OPTIONS, tune=str(path)))


def test_measured(tmp_path: Path) -> None:
    """The whole of `luce tune`, with few columns: a table that loads."""
    facts = read_facts(luce_tiny_path())
    products = model_products(facts.hparams, facts.tensors.values())[:4]
    with Backend(DEVICE) as backend:
        made = measure(
            products,
            DeviceChoices(DEVICE),
            lambda product, phase, rows: ProductTimer(backend, product, phase, rows),
            this_site(DEVICE),
            model=facts.name,
            chunk=32,
        )
    path = tmp_path / "t.json"
    made.save(path)
    with TrunkRunner(luce_tiny_path(), replace(OPTIONS, tune=str(path))) as runner:
        assert runner.tuned.tuning.digest == made.digest
