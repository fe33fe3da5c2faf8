"""Apply unified diffs to files held in memory: exact context, moved hunks found, nothing guessed.

``patch`` and ``git`` need not be installed on the machine that builds, and a hunk whose context changed must fail loudly
instead of being fuzzed in. Only changes to existing files are accepted: a new file belongs into ``patches/src``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from buildtools.report import BuildError

_HUNK = re.compile(r"^@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")


@dataclass
class Hunk:
    """One hunk: ``start`` is the 1-based line of the old file, ``old`` and ``new`` are lines with their line ends."""

    start: int
    header: str
    old: list[str] = field(default_factory=list)
    new: list[str] = field(default_factory=list)


@dataclass
class FileDiff:
    """The hunks for one file, its path below the tree's root (first component of the diff's path removed)."""

    path: str
    hunks: list[Hunk] = field(default_factory=list)


def parse_diff(name: str, text: str) -> list[FileDiff]:
    """The file changes in a diff named ``name``. BuildError for anything but changes to existing files."""
    lines = _lines(text)
    diffs: list[FileDiff] = []
    i = 0
    while i < len(lines):
        line = lines[i]
        if line.startswith("--- ") and i + 1 < len(lines) and lines[i + 1].startswith("+++ "):
            old, new = _diff_path(line), _diff_path(lines[i + 1])
            if "/dev/null" in (old, new) or _strip(old) != _strip(new):
                raise BuildError(
                    f"{name}: expected a change to one existing file, found {old} -> {new}.\n"
                    "  A new file goes into patches/src/, at its place below the source root."
                )
            diffs.append(FileDiff(_strip(new)))
            i += 2
        elif match := _HUNK.match(line):
            if not diffs:
                raise BuildError(f"{name}: a hunk before any file name: {line.strip()}")
            hunk, i = _parse_hunk(name, lines, i, match)
            diffs[-1].hunks.append(hunk)
        else:
            i += 1
    if not diffs or any(not diff.hunks for diff in diffs):
        raise BuildError(f"{name}: expected a unified diff, found no hunk. Write it with `diff -u` or `git diff`.")
    return diffs


def apply_diff(name: str, text: str, files: dict[str, bytes]) -> list[str]:
    """Apply the diff ``text`` to ``files`` (path -> content) in place; returns the changed paths.

    A hunk may have moved by whole lines, its context may not have changed. BuildError names the patch and the hunk.
    """
    changed: list[str] = []
    for diff in parse_diff(name, text):
        if diff.path not in files:
            raise BuildError(f"{name}: expected {diff.path} in the source tree, found no such file.")
        content = _lines(files[diff.path].decode("utf-8", "surrogateescape"))
        files[diff.path] = "".join(_apply_hunks(name, diff, content)).encode("utf-8", "surrogateescape")
        changed.append(diff.path)
    return changed


def _apply_hunks(name: str, diff: FileDiff, content: list[str]) -> list[str]:
    result: list[str] = []
    done = 0
    moved = 0
    for number, hunk in enumerate(diff.hunks, start=1):
        nominal = hunk.start - (1 if hunk.old else 0)
        at = _find(content, hunk.old, nominal + moved, done)
        if at is None:
            raise BuildError(_misfit(name, diff, hunk, number, content, nominal + moved))
        moved = at - nominal
        result += content[done:at] + hunk.new
        done = at + len(hunk.old)
    return result + content[done:]


def _find(content: list[str], old: list[str], near: int, lowest: int) -> int | None:
    """The line index nearest to ``near`` and not below ``lowest`` where ``old`` stands."""
    highest = len(content) - len(old)
    for distance in range(max(abs(near - lowest), abs(highest - near)) + 1):
        for at in (near - distance, near + distance):
            if lowest <= at <= highest and content[at : at + len(old)] == old:
                return at
    return None


def _misfit(name: str, diff: FileDiff, hunk: Hunk, number: int, content: list[str], at: int) -> str:
    here = content[at : at + len(hunk.old)]
    wrong = next((i for i, want in enumerate(hunk.old) if here[i : i + 1] != [want]), 0)
    found = here[wrong].rstrip() if wrong < len(here) else "(end of file)"
    return (
        f"patch {name} does not apply: {diff.path}, hunk {number} of {len(diff.hunks)} ({hunk.header})\n"
        f"  expected at line {at + wrong + 1}: {hunk.old[wrong].rstrip() if hunk.old else ''}\n"
        f"  found:                {found}\n"
        "  Make the patch again for this source, or restore the pin that it was made for."
    )


def _parse_hunk(name: str, lines: list[str], i: int, match: re.Match[str]) -> tuple[Hunk, int]:
    hunk = Hunk(start=int(match[1]), header=lines[i].strip())
    n_old, n_new = int(match[2] or 1), int(match[4] or 1)
    i += 1
    while len(hunk.old) < n_old or len(hunk.new) < n_new or (i < len(lines) and lines[i].startswith("\\")):
        if i == len(lines):
            raise BuildError(f"{name}: the diff ends inside hunk {hunk.header}")
        mark, body = lines[i][:1], lines[i][1:]
        if mark == "\\":
            _drop_line_end(hunk, lines[i - 1][:1])
        elif mark in (" ", "-", "+", "\n"):
            body = body if mark != "\n" else "\n"
            hunk.old += [body] if mark != "+" else []
            hunk.new += [body] if mark != "-" else []
        else:
            raise BuildError(f"{name}: expected a line of hunk {hunk.header}, found {lines[i].rstrip()!r}")
        i += 1
    return hunk, i


def _drop_line_end(hunk: Hunk, mark: str) -> None:
    """The diff's note that the line before it has no line end."""
    if mark != "+":
        hunk.old[-1] = hunk.old[-1].rstrip("\n")
    if mark != "-":
        hunk.new[-1] = hunk.new[-1].rstrip("\n")


def _lines(text: str) -> list[str]:
    """Lines with their line ends. Only a line feed ends one (str.splitlines would also split at form feeds)."""
    *whole, rest = text.split("\n")
    return [line + "\n" for line in whole] + ([rest] if rest else [])


def _diff_path(line: str) -> str:
    return line[4:].split("\t", 1)[0].strip()


def _strip(path: str) -> str:
    return path.partition("/")[2]
