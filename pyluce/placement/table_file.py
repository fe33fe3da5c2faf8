"""Routing counts as a CSV file: the reference system's format, one row a layer, one column an expert.

# hotness table: n_layer=48 n_expert=512 n_expert_used=10
# format: one row per layer, columns are expert activation counts (expert 0..N-1)
17,0,3,...
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

import numpy as np

from pyluce.placement.counts import Counts, RouteShape

HEADER: Final = re.compile(r"#\s*hotness table:\s*n_layer=(\d+)\s+n_expert=(\d+)\s+n_expert_used=(\d+)\s*")
FORMAT_LINE: Final = "# format: one row per layer, columns are expert activation counts (expert 0..N-1)"
USED_WITHOUT_HEADER: Final = 8
LARGEST_COUNT: Final = (1 << 64) - 1


class RoutesError(ValueError):
    """A routing table cannot be used; the message names the file, the line and the reason."""


def read_routes(path: str | os.PathLike[str]) -> tuple[RouteShape, Counts]:
    """The shape and the counts [n_layer, n_expert] of a file.

    Blank lines and further comments are skipped. Without a header the rows are the layers, and 8 experts are used. Raises RoutesError.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "no UTF-8 text"
        raise RoutesError(f"{path}: expected a routing table, found a file that cannot be read: {reason}") from error
    return parse_routes(str(path), text)


def parse_routes(name: str, text: str) -> tuple[RouteShape, Counts]:
    """As `read_routes`, of a text; `name` stands in messages."""
    header: RouteShape | None = None
    rows: list[list[int]] = []
    for number, raw in enumerate(text.splitlines(), 1):
        where, line = f"{name}, line {number}", raw.strip()
        if line.startswith("#"):
            header = _header(where, line, header)
        elif line:
            row = [_count(where, column, value) for column, value in enumerate(line.split(","))]
            if rows and len(row) != len(rows[0]):
                raise RoutesError(f"{where}: expected {len(rows[0])} counts as in the first row, found {len(row)}")
            if header is not None and len(row) != header.n_expert:
                raise RoutesError(f"{where}: expected {header.n_expert} counts as the header says, found {len(row)}")
            rows.append(row)
    if not rows:
        raise RoutesError(f"{name}: expected a row of counts for each layer, found none")
    shape = header or RouteShape(len(rows), len(rows[0]), USED_WITHOUT_HEADER)
    if (shape.n_layer, shape.n_expert) != (len(rows), len(rows[0])):
        raise RoutesError(
            f"{name}: expected {shape.n_layer} rows of {shape.n_expert} counts as the header says, "
            f"found {len(rows)} of {len(rows[0])}"
        )
    return shape, np.array(rows, np.uint64)


def read_routes_for(path: str | os.PathLike[str], shape: RouteShape) -> Counts:
    """The counts of a file for a model of this shape. Raises RoutesError, also for another shape."""
    found, counts = read_routes(path)
    if found != shape:
        raise RoutesError(f"{path}: expected the model's {shape}; found {found}")
    return counts


def format_routes(shape: RouteShape, counts: Counts) -> str:
    """The text of a file."""
    if counts.shape != (shape.n_layer, shape.n_expert):
        raise ValueError(f"expected counts [{shape.n_layer}, {shape.n_expert}], found {list(counts.shape)}")
    lines = [
        f"# hotness table: n_layer={shape.n_layer} n_expert={shape.n_expert} n_expert_used={shape.n_used}",
        FORMAT_LINE,
        *(",".join(map(str, row)) for row in counts.tolist()),
    ]
    return "\n".join(lines) + "\n"


def write_routes(path: str | os.PathLike[str], shape: RouteShape, counts: Counts) -> None:
    """Write a file so that at any moment either the old one or the whole new one is there. Raises OSError."""
    target = Path(path)
    made = target.with_name(f".{target.name}.{os.getpid()}")
    text = format_routes(shape, counts)
    try:
        with made.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        made.replace(target)
    finally:
        made.unlink(missing_ok=True)


def _header(where: str, line: str, before: RouteShape | None) -> RouteShape | None:
    if "hotness table" not in line:
        return before
    found = HEADER.fullmatch(line)
    if found is None:
        raise RoutesError(
            f"{where}: expected `# hotness table: n_layer=L n_expert=E n_expert_used=K`, found {line[:80]!r}"
        )
    shape = RouteShape(*map(int, found.groups()))
    if min(shape.n_layer, shape.n_expert, shape.n_used) < 1 or shape.n_used > shape.n_expert:
        raise RoutesError(f"{where}: expected positive numbers, and no more used experts than experts, found {shape}")
    if before is not None:
        raise RoutesError(f"{where}: expected one header, found a second one")
    return shape


def _count(where: str, column: int, text: str) -> int:
    digits = text.strip()
    if not (digits.isascii() and digits.isdigit()):
        raise RoutesError(f"{where}, expert {column}: expected a count, found {digits[:40]!r}")
    value = int(digits) if len(digits) <= 20 else LARGEST_COUNT + 1
    if value > LARGEST_COUNT:
        raise RoutesError(f"{where}, expert {column}: expected a count below 2^64, found {digits[:40]}")
    return value
