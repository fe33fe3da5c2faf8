"""A table of choices: written and read whole, refused where it does not belong, one at a time on a device."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pyluce.native.structs import GGMLType
from pyluce.native.tune import DeviceChoices, TuneKind
from pyluce.tuning import Entry, Product, TuneError, TuneTable, Tuning, tune_device
from pyluce.tuning.apply import AUTO, OFF, Site, apply_table, choose_table, default_path, hold_device
from tests.tuning.fake import FakeChoices

SITE = Site("Some GPU", "gfx1201", "pin=1 patches=2")
PRODUCT = Product(GGMLType.Q8_0, 64, 128)
EXPERTS = Product(GGMLType.Q4_K, 256, 96, 4, 16)
ROW = Entry(TuneKind.ROW, *PRODUCT.key, 0, 4, {"1:4": 3.5})
CHUNK = Entry(TuneKind.CHUNK, *EXPERTS.key, 64, 2, {})
TABLE = TuneTable("Some GPU", "gfx1201", 12080, "pin=1 patches=2", "a model", (ROW, CHUNK))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    TABLE.save(tmp_path / "deep" / "table.json")
    return tmp_path / "deep" / "table.json"


def test_read_as_written(path: Path) -> None:
    assert TuneTable.load(path) == TABLE
    assert TuneTable.load(path).entries[0].microseconds == {"1:4": 3.5}
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_the_digest_is_of_what_bits_can_depend_on() -> None:
    same = (
        replace(TABLE, driver=1),
        replace(TABLE, entries=(CHUNK, ROW)),
        replace(TABLE, entries=(replace(ROW, microseconds={}), CHUNK)),
    )
    other = (
        replace(TABLE, libraries="x"),
        replace(TABLE, entries=(ROW,)),
        replace(TABLE, entries=(replace(ROW, value=2), CHUNK)),
    )
    assert {t.digest for t in same} == {TABLE.digest}
    assert TABLE.digest not in {t.digest for t in other}


def spoilt(change: Callable[[Any], Any]) -> str:
    found = json.loads(json.dumps(TABLE._plain()))
    changed = change(found)
    return json.dumps(found if changed is None else changed)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: [], "expected a table of format 1"),
        (lambda t: t.update(format=2), "expected a table of format 1"),
        (lambda t: t.update(extra=1), "expected no key 'extra'"),
        (lambda t: t.update(device=3), "device: expected a text, found 3"),
        (lambda t: t.update(driver="x"), "driver: expected a whole number"),
        (lambda t: t.update(entries={}), "entries: expected a list, found dict"),
        (lambda t: t["entries"][0].pop("k") and None, "entry 1: expected the keys"),
        (lambda t: t["entries"][0].update(kind="column"), "entry 1: expected a known kind and type, found COLUMN"),
        (lambda t: t["entries"][1].update(type="Q9"), "entry 2: expected a known kind and type, found Q9"),
        (lambda t: t["entries"][1].update(value=True), "entry 2: value: expected a whole number"),
        (lambda t: t["entries"][1].update(m=-1), "entry 2: m: expected a whole number"),
        (lambda t: t["entries"][1].update(microseconds=[]), "entry 2: microseconds"),
        (lambda t: t["entries"].append(t["entries"][0]), "entry 3: expected each product once"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(path: Path, change: Callable[[Any], Any], message: str) -> None:
    path.write_text(spoilt(change))
    with pytest.raises(TuneError, match=message) as raised:
        TuneTable.load(path)
    assert str(path) in str(raised.value)


def test_no_file_and_no_json(path: Path) -> None:
    with pytest.raises(TuneError, match="cannot be read"):
        TuneTable.load(path / "x")
    path.write_text("{")
    with pytest.raises(TuneError, match="expected JSON"):
        TuneTable.load(path)


@pytest.mark.parametrize("name", ["device", "architecture", "libraries"])
def test_a_table_of_something_else_is_refused(path: Path, name: str) -> None:
    with pytest.raises(TuneError, match=f"{name}: expected 'another', found a table of"):
        choose_table(str(path), replace(SITE, **{name: "another"}), [PRODUCT, EXPERTS])


def test_a_product_that_the_model_lacks_is_refused(path: Path) -> None:
    with pytest.raises(
        TuneError, match=r"expected products of this model, found chunk Q4_K \[256, 96\], 4 picks, up to 64 columns"
    ):
        choose_table(str(path), SITE, [PRODUCT])


def test_auto_takes_what_is_there_and_off_takes_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    products = [PRODUCT, EXPERTS]
    assert choose_table(AUTO, SITE, products) is None
    TABLE.save(default_path(SITE, products))
    assert choose_table(AUTO, SITE, products) == (default_path(SITE, products), TABLE)
    assert choose_table(OFF, SITE, products) is None
    for other in (replace(SITE, libraries="x"), replace(SITE, device="y")):
        assert choose_table(AUTO, other, products) is None, "another name"
    assert choose_table(AUTO, SITE, [PRODUCT]) is None


def test_a_choice_that_the_device_lacks_leaves_nothing_set(path: Path) -> None:
    choices = FakeChoices({TuneKind.ROW: [2, 4], TuneKind.CHUNK: [1]})
    with pytest.raises(TuneError, match="expected a choice that this device has, found 2"):
        apply_table(choices, path, TABLE)
    assert choices.chosen == {}
    choices = FakeChoices({TuneKind.ROW: [2, 4], TuneKind.CHUNK: [1, 2]})
    apply_table(choices, path, TABLE)
    assert sorted(choices.chosen.values()) == [2, 4]


def test_a_device_has_one_table_at_a_time() -> None:
    choices = FakeChoices({TuneKind.ROW: [4], TuneKind.CHUNK: [2]})
    mine, plain = Tuning("a.json", TABLE.digest, 2), Tuning()
    first = hold_device("cuda:7", mine, choices, TABLE)
    second = hold_device("cuda:7", mine, choices, TABLE)
    assert second.tuning == mine and len(choices.chosen) == 2
    first.close()
    first.close()
    with pytest.raises(TuneError, match=r"expected the table of the model that is loaded there \(a.json\), found none"):
        hold_device("cuda:7", plain, choices, None)
    hold_device("cuda:8", plain, choices, None).close()
    second.close()
    third = hold_device("cuda:7", plain, choices, None)
    assert choices.chosen == {} and third.tuning == plain
    third.close()


def test_the_cpu_has_nothing_to_choose(path: Path) -> None:
    for choice in (AUTO, OFF):
        tuned = tune_device("cpu", choice, [PRODUCT])
        assert tuned.tuning == Tuning()
        tuned.close()
    with pytest.raises(TuneError, match="found the CPU, which has nothing to choose"):
        tune_device("cpu", str(path), [PRODUCT])
    with pytest.raises(ValueError, match="one kernel for each product"):
        DeviceChoices("cpu")
