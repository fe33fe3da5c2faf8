"""`luce routes`, and `luce run --collect-routing`: tables written, refused and shown."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from cli.main import main
from pyluce.luce import Luce
from pyluce.memory.experts import route_shape
from pyluce.memory.facts import read_facts
from pyluce.options import LoadOptions
from pyluce.placement.counts import RouteShape
from pyluce.placement.table_file import read_routes, write_routes
from tests.support.models import luce_tiny_path

SHAPE = route_shape(read_facts(luce_tiny_path()).hparams)


@pytest.fixture
def luce(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LUCE_THREADS", "1")

    def call(*arguments: str) -> tuple[int, str, str]:
        code = main(arguments)
        out, err = capsys.readouterr()
        return code, out, err

    return call


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "What is a llama?"}\n{"tokens": [5, 6, 7, 8]}\n')
    return path


def test_collect_counts_every_row_and_adds(luce, prompts: Path, tmp_path: Path) -> None:
    table = tmp_path / "routes.csv"
    arguments = ("routes", "collect", "--prompts", str(prompts), "-o", str(table), "-n", "4", "-q", "--max-ctx", "256")
    code, out, err = luce(*arguments)
    assert (code, err) == (0, "")
    first = out.splitlines()[0]
    assert first.startswith(f"{table}: 2 prompts, ") and first.endswith(str(SHAPE))
    n_tokens = int(first.split(", ")[1].split()[0])
    shape, counts = read_routes(table)
    # of an answer's tokens the last is never computed
    assert shape == SHAPE and counts.sum(axis=1).tolist() == [(n_tokens - 2) * SHAPE.n_used] * SHAPE.n_layer
    code, _, err = luce(*arguments)
    assert code == 2 and "--output: expected no file there" in err
    assert luce(*arguments, "--add")[0] == 0
    assert np.array_equal(read_routes(table)[1], 2 * counts), "the same prompts pick the same"


def test_run_collects_through_a_park(luce, tmp_path: Path) -> None:
    table = tmp_path / "routes.csv"
    options = LoadOptions(
        max_ctx=256, threads=1, max_concurrency=1, prefix_cache_mib=0, verify_width=1, collect_routing=table
    )
    with Luce.load_with(None, options) as model:
        first = model.generate("Hi", max_tokens=3, ignore_end=True)
        assert model.park() and model.unpark()
        second = model.generate("Hi", max_tokens=3, ignore_end=True)
        assert not table.exists(), "written at the end, or after a minute"
    rows = 2 * (len(first.prompt_tokens) + 2)
    assert first.tokens == second.tokens
    assert read_routes(table)[1].sum(axis=1).tolist() == [rows * SHAPE.n_used] * SHAPE.n_layer


def test_tables_that_cannot_be_used_are_refused_before_loading(luce, tmp_path: Path) -> None:
    other = tmp_path / "other.csv"
    write_routes(other, RouteShape(2, 3, 1), np.zeros((2, 3), np.uint64))
    code, _, err = luce("run", "-p", "x", "--collect-routing", str(other))
    assert code == 1 and f"--collect-routing: {other}: expected the model's {SHAPE}; found 2 layers" in err
    assert "load: weights" not in err
    code, _, err = luce("run", "-p", "x", "--collect-routing", str(tmp_path / "none" / "x.csv"))
    assert code == 1 and "--collect-routing: expected a folder to write to, found none at" in err
    code, _, err = luce("plan", "--expert-device", "cuda:0", "--expert-placement", str(tmp_path / "none.csv"))
    assert code == 2 and "--expert-placement: expected auto, auto:FILE or the file of a routing table" in err
    code, _, err = luce("routes", "show", str(tmp_path / "none.csv"))
    assert code == 2 and "expected a routing table, found a file that cannot be read" in err


def test_show(luce, tmp_path: Path) -> None:
    table = tmp_path / "routes.csv"
    counts = np.ones((SHAPE.n_layer, SHAPE.n_expert), np.uint64)
    counts[0, 2] = SHAPE.n_expert + 1
    write_routes(table, SHAPE, counts)
    code, out, _ = luce("routes", "show", str(table))
    assert code == 0
    lines = out.splitlines()
    assert lines[0] == str(SHAPE)
    assert lines[1].split()[:2] == ["layer", "picks"] and lines[2].split()[:2] == ["0", str(2 * SHAPE.n_expert)]
    k = SHAPE.n_used
    assert lines[2].split()[2] == f"{(SHAPE.n_expert + k) / (2 * SHAPE.n_expert):.1%}"
    assert lines[3].split()[2] == f"{k / SHAPE.n_expert:.1%}" == lines[-1].split()[2]
    code, out, _ = luce(
        "routes", "show", str(table), "--model", str(luce_tiny_path()), "--expert-budget-mib", "1", "--json"
    )
    found = json.loads(out)
    assert code == 0 and 0 < found["hot"]["total_hot"] < SHAPE.n_layer * SHAPE.n_expert
    assert found["hot"]["total_hot"] == sum(found["hot"]["hot_counts"]) and found["hot"]["arch"] == "qwen4exp"
    assert found["hot"]["hot_expert_ids"][0][0] == 2, "the most picked one comes first"
    code, _, err = luce("routes", "show", str(table), "--expert-budget-mib", "1")
    assert code == 2 and "expected with --model or --like" in err
    code, _, err = luce("routes", "show", str(table), "--like", "ud-q4_k_xl")
    assert code == 2 and "expected the model's 48 layers of 512 experts" in err


def test_plot(luce, tmp_path: Path) -> None:
    table, plot = tmp_path / "routes.csv", tmp_path / "coverage.svg"
    write_routes(table, SHAPE, np.arange(SHAPE.n_layer * SHAPE.n_expert, dtype=np.uint64).reshape(SHAPE.n_layer, -1))
    code, _, err = luce("routes", "show", str(table), "--plot", str(plot))
    assert code == 0 and err == f"plot: {plot}\n"
    assert "<svg" in plot.read_text()[:2000]
    code, _, err = luce("routes", "show", str(table), "--plot", str(tmp_path / "coverage.none"))
    assert code == 1 and "--plot: " in err and "cannot be written" in err
