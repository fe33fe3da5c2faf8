"""Runs the AMD code: builds ggml-hip on the fake runtime, then executes its kernels on the interpreter.

    python -m tests.rdna.amd_run             # make amd-run, part of .ci/run: small shapes, upstream's small kernels
    python -m tests.rdna.amd_run --all       # make amd-run ALL=1: larger shapes, upstream's row and chunk products too

One process a test file and architecture, ``--jobs`` at once: each loads the libraries anew.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from buildtools import amd_check, rocm
from buildtools.report import BuildError, Report
from tests.rdna.fakehip.build import build

ROOT = Path(__file__).resolve().parents[2]
TESTS = Path("tests") / "rdna"


@dataclass(frozen=True)
class Task:
    """One pytest process: files, and the architecture that the fake device has (both when empty)."""

    files: tuple[str, ...]
    arch: str = ""

    def __str__(self) -> str:
        return " ".join(part for part in (*(Path(name).stem for name in self.files), self.arch) if part)


def tasks() -> list[Task]:
    """The tests of kernels, longest first, and those of the interpreter itself."""
    kernels = sorted((ROOT / TESTS / "kernels").glob("test_*.py"))
    order = ("test_products", "test_ops", "test_rows")
    kernels.sort(key=lambda path: order.index(path.stem) if path.stem in order else len(order))
    own = sorted(str(path.relative_to(ROOT)) for path in (ROOT / TESTS).glob("test_*.py"))
    found = [Task((str(path.relative_to(ROOT)),), arch) for path in kernels for arch in amd_check.TARGETS]
    return [*found, *(Task((name,)) for name in own)]


def execute(task: Task, folder: Path, libraries: Path, everything: bool) -> tuple[Task, int, str, float]:
    """Task, exit status of pytest, what it printed, seconds."""
    started = time.monotonic()
    environment = os.environ | {"LUCE_LIBRARY_DIR": str(libraries), "LUCE_ROCM": str(folder)}
    if task.arch:
        environment["FAKEHIP_ARCHS"] = task.arch
    else:
        environment.pop("LUCE_LIBRARY_DIR")
    if everything:
        environment["LUCE_TEST_SLOW"] = "1"
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider", *task.files]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    return task, done.returncode, done.stdout + done.stderr, time.monotonic() - started


def main(argv: list[str] | None = None) -> int:
    """0 when every test passed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rocm", type=Path, metavar="DIR", help="a ROCm folder or toolchain (default: build/rocm)")
    parser.add_argument("--all", action="store_true", help="what takes long too")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), metavar="N", help="processes at once")
    parser.add_argument("--optional", action="store_true", help="without a toolchain or tinygrad to be had: say so and succeed")
    arguments = parser.parse_args(argv)
    if arguments.jobs < 1:
        parser.error("--jobs: expected 1 or more")
    report = Report()
    started = time.monotonic()
    if importlib.util.find_spec("tinygrad") is None:
        missing = "the tables of instructions are tinygrad's, which the test extra installs for Python 3.11 and later: not found"
        report.line(f"amd-run: {'SKIPPED, ' if arguments.optional else ''}{missing}")
        return 0 if arguments.optional else 1
    try:
        folder = (arguments.rocm or rocm.ensure(ROOT / "build" / "rocm", report)).resolve()
        libraries = build(folder, "all" if arguments.all else "quick", arguments.jobs, report)
    except rocm.ToolchainUnavailable as error:
        report.line(f"amd-run: {'SKIPPED, ' if arguments.optional else ''}{error}")
        return 0 if arguments.optional else 1
    except BuildError as error:
        report.line(f"amd-run: {error}")
        return 1
    failed = 0
    with ThreadPoolExecutor(arguments.jobs) as pool:
        running = [pool.submit(execute, task, folder, libraries, arguments.all) for task in tasks()]
        for future in running:
            task, status, text, seconds = future.result()
            summary = text.strip().splitlines()[-1] if text.strip() else f"exit status {status}"
            report.line(f"amd-run: {task}: {summary.strip('= ')} ({seconds:.0f} s)")
            if status != 0:
                failed += 1
                print(text)
    report.line(f"amd-run: {f'{failed} FAILED' if failed else 'all passed'} ({time.monotonic() - started:.0f} s)")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
