"""The CSV file: what is written, what is refused and how, and the recorder that keeps it."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from pyluce.placement.counts import RouteShape
from pyluce.placement.recorder import RouteRecorder
from pyluce.placement.table_file import RoutesError, parse_routes, read_routes, read_routes_for, write_routes

SHAPE = RouteShape(2, 3, 1)
TEXT = """# hotness table: n_layer=2 n_expert=3 n_expert_used=1
# format: one row per layer, columns are expert activation counts (expert 0..N-1)
1,0,18446744073709551615
4,5,6
"""


def test_written_as_documented_and_read_again(tmp_path: Path) -> None:
    path = tmp_path / "routes.csv"
    write_routes(path, SHAPE, np.array([[1, 0, 2**64 - 1], [4, 5, 6]], np.uint64))
    assert path.read_text() == TEXT
    shape, counts = read_routes(path)
    assert shape == SHAPE and counts.tolist() == [[1, 0, 2**64 - 1], [4, 5, 6]]
    assert [p.name for p in tmp_path.iterdir()] == ["routes.csv"], "no temporary file is left"


def test_without_a_header() -> None:
    shape, counts = parse_routes("x", "\n# a note\n 1, 2 ,3\n\n4,5,6\n")
    assert shape == RouteShape(2, 3, 8) and counts.tolist() == [[1, 2, 3], [4, 5, 6]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "x: expected a row of counts for each layer, found none"),
        (TEXT.replace("4,5,6", "4,5"), "x, line 4: expected 3 counts as in the first row, found 2"),
        (TEXT.replace("4,5,6", "4,-5,6"), "x, line 4, expert 1: expected a count, found '-5'"),
        (TEXT.replace("4,5,6", "4,5,"), "x, line 4, expert 2: expected a count, found ''"),
        (TEXT.replace("4,5,6", "4,5.0,6"), "x, line 4, expert 1: expected a count, found '5.0'"),
        (TEXT.replace("615", "616"), "x, line 3, expert 2: expected a count below 2"),
        (TEXT.replace("615", "6" * 30), "x, line 3, expert 2: expected a count below 2"),
        (TEXT.replace("4,5,6\n", ""), "x: expected 2 rows of 3 counts as the header says, found 1 of 3"),
        (TEXT.replace("n_expert=3", "n_expert=4"), "x, line 3: expected 4 counts as the header says, found 3"),
        (TEXT.replace("n_expert_used=1", "n_used=1"), "x, line 1: expected `# hotness table: n_layer=L"),
        (TEXT.replace("n_expert_used=1", "n_expert_used=9"), "x, line 1: expected positive numbers"),
        (TEXT + TEXT, "x, line 5: expected one header, found a second one"),
        ("1,2\n1,2,3\n", "x, line 2: expected 2 counts as in the first row, found 3"),
    ],
)
def test_malformed_files_are_refused(text: str, message: str) -> None:
    with pytest.raises(RoutesError) as caught:
        parse_routes("x", text)
    assert str(caught.value).startswith(message)


def test_mismatching_and_unreadable_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "routes.csv"
    path.write_text(TEXT)
    assert read_routes_for(path, SHAPE).shape == (2, 3)
    with pytest.raises(RoutesError, match="expected the model's 48 layers of 512 .* found 2 layers of 3 experts"):
        read_routes_for(path, RouteShape(48, 512, 10))
    with pytest.raises(RoutesError, match="cannot be read: No such file"):
        read_routes(tmp_path / "none.csv")
    path.write_bytes(b"\xff\xfe1,2")
    with pytest.raises(RoutesError, match="no UTF-8 text"):
        read_routes(path)


PICKS = np.array([[[2]], [[0]]], np.int32)


def test_the_recorder_writes_and_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "routes.csv"
    recorder = RouteRecorder(path, SHAPE)
    recorder.add(PICKS)
    recorder.add(PICKS)
    assert not path.exists()
    recorder.close()
    recorder.close()
    assert read_routes(path)[1].tolist() == [[0, 0, 2], [2, 0, 0]]
    again = RouteRecorder(path, SHAPE)
    again.add(PICKS)
    again.close()
    assert read_routes(path)[1].tolist() == [[0, 0, 3], [3, 0, 0]]
    assert again.n_rows == 1


def test_the_recorder_writes_now_and_then(tmp_path: Path) -> None:
    path = tmp_path / "routes.csv"
    recorder = RouteRecorder(path, SHAPE, save_every_s=0.02)
    recorder.add(PICKS)
    until = time.monotonic() + 20.0
    while not path.exists() and time.monotonic() < until:
        time.sleep(0.02)
    assert read_routes(path)[1].sum() == 2, "written while the recorder is open"
    recorder.close()


def test_the_recorder_refuses_before_any_work(tmp_path: Path) -> None:
    path = tmp_path / "routes.csv"
    path.write_text(TEXT)
    with pytest.raises(RoutesError, match="expected the model's"):
        RouteRecorder(path, RouteShape(2, 4, 1))
    with pytest.raises(NotADirectoryError, match="found none at"):
        RouteRecorder(tmp_path / "missing" / "routes.csv", SHAPE)
    assert path.read_text() == TEXT
