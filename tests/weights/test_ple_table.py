"""Rows of the PLE table: right values, each read once, nothing kept in memory, errors that leave it usable."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from pyluce.native import load_libraries
from pyluce.weights import ModelError, ModelFile, PleTable, open_model, ple_row_ids, ple_table
from pyluce.weights.ggml_types import TYPES_BY_NAME
from pyluce.weights.ple_reader import plain_reader
from pyluce.weights.tensors import PLE_TABLE
from tests.weights.conftest import Draft, make_draft
from tools.synth import MICRO, Quantiser, find_library, write_model

LARGE = replace(MICRO, ple_base=40009)
"""A table of 160,044 rows of 16 floats and more: over 9 MiB in F32."""

WIDE = replace(MICRO, n_embd=1024, n_head=4, ple_base=61)
"""Rows of 256 values, which every type fits."""


@pytest.fixture(params=["native", "plain"], autouse=True)
def reader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every test with the library's reader and with the one that needs no library."""
    if request.param == "plain":
        monkeypatch.setattr(ple_table, "row_reader", plain_reader)
    elif find_library() is None:
        pytest.skip("native libraries are not built")
    else:
        load_libraries()
    return str(request.param)


def whole_table(model: ModelFile) -> np.ndarray:
    """All rows, through another path than PleTable's."""
    info = model.tensors[PLE_TABLE]
    raw = model.read(info).reshape(info.ne[1], info.row_bytes)
    return np.asarray(dequantize(raw, GGMLQuantizationType(info.type_id)), np.float32)


@pytest.fixture(scope="module")
def large_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("large") / "large.gguf", LARGE)[0]


@pytest.mark.parametrize("n_rows", [1, 2, 63, 512, 513, 4000])
@pytest.mark.parametrize("threads", [1, 4])
def test_rows_equal_direct_reads(large_path: Path, n_rows: int, threads: int) -> None:
    """One row on the serial path (which once left rows zero: work split for more workers than ran), up to many."""
    with open_model(large_path) as model, PleTable(model, threads) as table:
        ids = np.random.default_rng(n_rows).integers(0, table.n_rows, n_rows)
        rows = table.gather(ids)
        assert rows.dtype == np.float32 and rows.shape == (n_rows, LARGE.ple_head_dim)
        assert np.array_equal(rows, whole_table(model)[ids])
        assert np.all(rows.any(axis=1))


@pytest.mark.parametrize("type_name", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "IQ4_NL", "Q4_K", "Q6_K"])
def test_every_kind_of_type(tmp_path: Path, micro: Draft, type_name: str) -> None:
    if type_name not in ("F32", "F16", "BF16", "Q8_0") and find_library() is None:
        pytest.skip("native libraries are not built")
    width, n_rows = 256, 300
    draft = make_draft(replace(WIDE, n_vocab=320, n_ff_exp=32, n_expert=2, ple_heads=2))
    values = np.random.default_rng(5).standard_normal((n_rows, width), np.float32)
    raw = Quantiser().convert(values, type_name)
    old = draft.tensors[PLE_TABLE]
    assert old.ne[0] == width
    type_id = TYPES_BY_NAME[type_name].id
    draft.tensors[PLE_TABLE] = replace(old, ne=(width, n_rows), type_id=type_id, data=lambda: iter([raw]))
    with open_model(draft.write(tmp_path / "m.gguf")) as model, PleTable(model) as table:
        rows = table.gather([299, 0, 5, 5])
        expected = np.asarray(dequantize(raw, GGMLQuantizationType(type_id)), np.float32)
        assert np.array_equal(rows, expected[[299, 0, 5, 5]])
        assert np.abs(rows - values[[299, 0, 5, 5]]).max() < 0.5


def test_each_distinct_row_is_read_once(large_path: Path) -> None:
    with open_model(large_path) as model, PleTable(model) as table:
        rows = table.gather([7, 7, 9, 7, 100, 9])
        assert (table.rows_read, table.rows_requested, table.reads) == (3, 6, 3)
        assert np.array_equal(rows, whole_table(model)[[7, 7, 9, 7, 100, 9]])
        table.gather([7])
        assert table.rows_read == 4, "nothing is cached between calls"


def test_a_token_reads_one_row_a_head(large_path: Path) -> None:
    """The same bytes as in the map, too."""
    with open_model(large_path) as model, PleTable(model) as table:
        ple, info = model.hparams.ple, model.tensors[PLE_TABLE]
        assert ple is not None
        ids = ple_row_ids(ple, [7], [3, 5])
        rows = table.gather(ids)
        assert table.rows_read == ple.n_heads == rows.shape[0]
        mapped = model.shards[info.shard].mapped[info.offset : info.offset + info.nbytes].view(np.float32)
        assert np.array_equal(rows, mapped.reshape(-1, table.width)[ids[0]])
        del mapped


def test_neighbours_are_read_together(large_path: Path) -> None:
    with open_model(large_path) as model, PleTable(model) as table:
        rows = table.gather([12, 11, 10, 40, 13])
        assert (table.rows_read, table.reads) == (5, 2)
        assert np.array_equal(rows, whole_table(model)[[12, 11, 10, 40, 13]])


def test_shape_of_the_request_does_not_matter(large_path: Path) -> None:
    with open_model(large_path) as model, PleTable(model) as table:
        ids = np.arange(24).reshape(3, 8) * 31
        assert np.array_equal(table.gather(ids), table.gather(ids.ravel()))
        assert table.gather([]).shape == (0, LARGE.ple_head_dim)


@pytest.mark.parametrize("row", [-1, 10**9])
def test_rows_outside_the_table(large_path: Path, row: int) -> None:
    with (
        open_model(large_path) as model,
        PleTable(model) as table,
        pytest.raises(IndexError, match=rf"expected 0 to \d+, found {row}"),
    ):
        table.gather([3, row])


def test_truncated_after_load(tmp_path: Path) -> None:
    """The last rows are gone: an error that says so; the others can still be read, on both paths."""
    path = write_model(tmp_path / "m.gguf", LARGE)[0]
    with open_model(path) as model, PleTable(model) as table:
        info = model.tensors[PLE_TABLE]
        good = np.arange(0, 900, 3)
        before = table.gather(good)
        os.truncate(path, info.offset + 1000 * info.row_bytes + 7)
        for bad in ([1000], [5, 1000, 2000], np.arange(900, 1100)):
            with pytest.raises(ModelError, match=r"row \d+ of per_layer_token_embd.weight: expected .*truncated"):
                table.gather(bad)
        assert np.array_equal(table.gather(good), before)
        assert np.array_equal(table.gather([999])[0], table.gather([998, 999])[1])


def test_deleted_after_load(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", MICRO)[0]
    with open_model(path) as model, PleTable(model) as table:
        before = table.gather([1, 2, 3])
        path.unlink()
        assert np.array_equal(table.gather([1, 2, 3]), before)


def test_outlives_the_model_and_closes(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", MICRO)[0]
    model = open_model(path)
    table = PleTable(model)
    model.close()
    assert table.gather([1]).shape == (1, MICRO.ple_head_dim)
    table.close()
    table.close()
    with pytest.raises(ValueError, match="closed"):
        table.gather([1])


def test_a_model_without_a_table(opened: Callable[[Draft], ModelFile]) -> None:
    model = opened(make_draft(replace(MICRO, ple_layer=None)))
    assert model.hparams.ple is None
    with pytest.raises(ModelError, match="expected a PLE table"):
        PleTable(model)


MEASURE = """
import sys, numpy as np, psutil
from pyluce.weights import PleTable, open_model
from pyluce.weights.tensors import PLE_TABLE
def resident():
    maps = psutil.Process().memory_maps(grouped=False)
    return psutil.Process().memory_info().rss, sum(m.rss for m in maps if m.path == sys.argv[1])
before, _ = resident()
model = open_model(sys.argv[1])
table = PleTable(model)
table.gather(np.arange(0, table.n_rows, 160))
after, mapped = resident()
print(model.tensors[PLE_TABLE].nbytes, after - before, mapped)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_the_table_is_not_in_memory(large_path: Path) -> None:
    """Opened, and 1,001 rows from all over the table read: what is resident is far smaller than the table."""
    command = [sys.executable, "-c", MEASURE, str(large_path)]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    table_bytes, growth, mapped = map(int, output.split())
    assert table_bytes > 8 << 20
    assert mapped < 1 << 20, "the map of the file"
    assert growth < table_bytes // 2, "the process"


def test_short_reads_are_continued(large_path: Path, monkeypatch: pytest.MonkeyPatch, reader: str) -> None:
    if reader == "native":
        pytest.skip("the library's own loop")
    wanted = [40, 12, 11, 10, 13, 40]
    with open_model(large_path) as model, PleTable(model) as table:
        whole = table.gather(wanted)
        real, calls = os.preadv, []

        def short(fd: int, parts: list[memoryview], offset: int) -> int:
            calls.append(offset)
            return real(fd, [parts[0][:7]], offset) if len(calls) % 3 else real(fd, parts, offset)

        monkeypatch.setattr(os, "preadv", short)
        assert np.array_equal(table.gather(wanted), whole)
        assert len(calls) > 2
        assert (table.rows_requested, table.rows_read, table.reads) == (12, 10, 4)


@pytest.mark.parametrize("threads", [1, 3, 4])
def test_repeated_rows_and_runs_across_slices(large_path: Path, threads: int) -> None:
    """Rows asked for again and again, runs longer than a buffer, one row thousands of times: each still read once."""
    rng = np.random.default_rng(1)
    with open_model(large_path) as model, PleTable(model, threads) as table:
        expected = whole_table(model)
        for ids in (
            np.concatenate([np.arange(500, 7000), np.arange(300, 3000)[::-1]]),
            np.repeat(77, 3000),
            rng.integers(0, 700, 5000),
            np.concatenate([np.repeat(5, 2000), rng.integers(0, table.n_rows, 2000)]),
        ):
            before = table.rows_read
            assert np.array_equal(table.gather(ids), expected[ids])
            assert table.rows_read - before == np.unique(ids).size


def test_many_gathers_at_once(large_path: Path) -> None:
    with open_model(large_path) as model, PleTable(model, 4) as table, ThreadPoolExecutor(4) as threads:
        expected = whole_table(model)
        wanted = [np.random.default_rng(i).integers(0, table.n_rows, 40 + 900 * (i % 3)) for i in range(24)]
        for ids, rows in zip(wanted, threads.map(table.gather, wanted), strict=True):
            assert np.array_equal(rows, expected[ids])
        assert table.rows_requested == sum(ids.size for ids in wanted)
        assert table.rows_read == sum(np.unique(ids).size for ids in wanted)


def test_into_an_array_and_counted_when_used(large_path: Path) -> None:
    with open_model(large_path) as model, PleTable(model) as table:
        out = np.full((4, 2 * table.width), np.nan, np.float32)
        counts = table.gather_into([[3, 9], [9, 4]], out[1:3])
        assert np.array_equal(out[1:3].reshape(4, -1), whole_table(model)[[3, 9, 9, 4]])
        assert np.isnan(out[[0, 3]]).all(), "nothing beside it"
        assert (table.rows_requested, table.rows_read, table.reads) == (0, 0, 0)
        table.count(counts)
        assert (table.rows_requested, table.rows_read, table.reads) == (4, 3, 2)
        for wrong in (out[:1], out[:, ::2][:2], out[:2].astype(np.float64)):
            with pytest.raises(ValueError, match="expected contiguous float32 for 4 rows"):
                table.gather_into([1, 2, 3, 4], wrong)


@pytest.mark.parametrize("n_rows", [1, 3000])
def test_a_file_that_cannot_be_read(large_path: Path, n_rows: int) -> None:
    """The descriptor is gone: an error of every slice, the first one raised, and all threads done with the array."""
    with open_model(large_path) as model, PleTable(model, 4) as table:
        file, table._fd = table._fd, os.open(large_path, os.O_WRONLY)
        try:
            with pytest.raises(ModelError, match=r"rows? \d+.* of per_layer_token_embd.weight cannot be read: "):
                table.gather(np.arange(n_rows))
            assert table.rows_read == 0
        finally:
            os.close(table._fd)
            table._fd = file
        assert table.gather([1]).any()


def test_few_rows_by_list(large_path: Path, reader: str) -> None:
    """`gather_few` is `gather_into` of a list, with the same counts and refusals."""
    if reader == "plain":
        pytest.skip("reads by the library only")
    with open_model(large_path) as model, PleTable(model) as table:
        ids = [7, 7, 9, 8, 100, 9, 0, table.n_rows - 1]
        few, many = (np.empty((len(ids), table.width), np.float32) for _ in range(2))
        assert table.gather_few(ids, few.ctypes.data) == table.gather_into(ids, many)
        assert few.tobytes() == many.tobytes()
        assert table.gather_few([5], few.ctypes.data).calls == 1
        for bad in (-1, table.n_rows):
            with pytest.raises(IndexError, match=f"found {bad}"):
                table.gather_few([3, bad, 4], few.ctypes.data)
        table.close()
        with pytest.raises(ValueError, match="is closed"):
            table.gather_few([1], few.ctypes.data)
