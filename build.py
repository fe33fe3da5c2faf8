#!/usr/bin/env python3
"""Build the native libraries: fetch the pinned source, verify, unpack, patch, configure, build, stamp.

    python build.py                       # the CPU libraries, in build/cpu/bin
    python build.py --backend cuda        # ggml-cuda too (nvcc); --backend hip: ggml-hip (ROCm)
    python build.py --check               # says whether the libraries are current, builds nothing

Standard library only. A second call takes a second or two. See docs/building.md.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import importlib.util
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from buildtools import compile as compiling
from buildtools import sources
from buildtools.report import BuildError, Report

ROOT = Path(__file__).resolve().parent
STAMP_HEADER = Path("ggml") / "src" / "ggml-luce-stamp.h"


def load_stamp(root: Path = ROOT) -> ModuleType:
    """``pyluce/native/stamp.py``, loaded by path: the loader and the build must agree on every digest."""
    path = root / "pyluce" / "native" / "stamp.py"
    spec = importlib.util.spec_from_file_location("luce_stamp", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise BuildError(f"expected {path}, found none. This folder is not a whole pyluce source tree.")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def prepare_tree(root: Path, stamp: ModuleType, source: Path | None, report: Report, *, discard_edits: bool) -> None:
    """Bring ``vendor/src`` to the pinned and patched state; nothing is read or written when it is there already."""
    pin = sources.load_pin(root, stamp)
    if not sources.tree_differences(root, stamp):
        return
    archive = sources.fetch(root, pin, source, report)
    report.progress(f"unpack: {archive.name}")
    wanted = sources.patched(root, sources.unpack(archive, pin), stamp)
    written = sources.sync_tree(root, wanted, stamp, discard_edits=discard_edits)
    count = len(stamp.read_series(root / "patches"))
    report.line(f"source: {pin.package} {pin.version} ({pin.tag}), {count} patches, {written} files written")


def build(root: Path, options: compiling.Options, source: Path | None, report: Report, *, discard_edits: bool) -> None:
    """All steps for one backend."""
    stamp = load_stamp(root)
    compiler = compiling.describe_compilers(options)
    for tool in ("cmake", "ninja"):
        compiling.find_tool(root, tool)
    prepare_tree(root, stamp, source, report, discard_edits=discard_edits)
    pin = stamp.read_pin(root / "vendor" / "pin.toml")
    folder = compiling.configure(root, options, compiler, pin["tag"], report)
    line = expected_stamp(root, stamp, options, compiler)
    header = f'// Written by build.py: what this library is built from.\n#define GGML_LUCE_STAMP "{line}"\n'
    _write_if_changed(folder / STAMP_HEADER, header)
    compiling.compile_libraries(root, folder, options, report)
    info = compiling.build_info(folder, options, line, {name: pin[name] for name in ("package", "version", "tag")})
    _write_if_changed(folder / "bin" / stamp.BUILD_INFO_NAME, json.dumps(info, indent=1) + "\n")


def check(root: Path, options: compiling.Options) -> list[str]:
    """What would have to be built; empty when the libraries are current. Writes nothing."""
    stamp = load_stamp(root)
    folder = root / "build" / options.backend
    try:
        info = json.loads((folder / "bin" / stamp.BUILD_INFO_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return [f"{folder / 'bin' / stamp.BUILD_INFO_NAME}: no finished build"]
    found = stamp.parse_stamp(info.get("stamp", ""))
    wanted = stamp.parse_stamp(expected_stamp(root, stamp, options, compiling.describe_compilers(options)))
    differences = [
        f"{name}: expected {wanted[name]}, built from {found.get(name, 'nothing')}"
        for name in stamp.STAMP_PARTS
        if found.get(name) != wanted[name]
    ]
    if options.bench and not (folder / "bin" / compiling.BENCH_PROGRAM).is_file():
        differences.append(f"{folder / 'bin' / compiling.BENCH_PROGRAM}: missing")
    return differences + sources.tree_differences(root, stamp) + compiling.changed_libraries(folder, info)


def expected_stamp(root: Path, stamp: ModuleType, options: compiling.Options, compiler: str) -> str:
    """The stamp of a library built now."""
    text = stamp.format_stamp(stamp.pin_digest(root), stamp.patches_digest(root), options.flags(), compiler)
    return str(text)


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--backend", choices=compiling.BACKENDS, default="cpu", help="what to build (default: cpu)")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), metavar="N", help="compilers at once")
    parser.add_argument("--source", type=Path, metavar="FILE", help="use this source archive, fetch nothing")
    parser.add_argument("--check", action="store_true", help="build nothing; exit 1 and say what differs")
    parser.add_argument("--bench", action="store_true", help="build upstream's llama-bench too")
    parser.add_argument("--portable", action="store_true", help="no instructions that only this machine's CPU has")
    parser.add_argument("--arch", metavar="LIST", help="GPU targets (cuda: 90a; hip: gfx1151;gfx1201)")
    parser.add_argument("--cuda-toolkit", type=Path, metavar="DIR", help="the CUDA toolkit (default: nvcc on PATH)")
    parser.add_argument("--rocm", type=Path, metavar="DIR", help="the ROCm folder (default: $ROCM_PATH, /opt/rocm)")
    parser.add_argument("--discard-edits", action="store_true", help="overwrite files in vendor/src changed by hand")
    arguments = parser.parse_args(argv)
    if arguments.jobs < 1:
        parser.error("--jobs: expected 1 or more")
    return arguments


def main(argv: list[str] | None = None) -> int:
    """Run the command line; 0 when all is built (or current), 1 with a message otherwise."""
    arguments = parse_arguments(argv)
    toolkit = {"cpu": None, "cuda": arguments.cuda_toolkit, "hip": arguments.rocm}[arguments.backend]
    options = compiling.Options(
        backend=arguments.backend,
        arch=arguments.arch or compiling.DEFAULT_ARCH[arguments.backend],
        toolkit=toolkit.resolve() if toolkit else None,
        portable=arguments.portable,
        bench=arguments.bench,
        jobs=arguments.jobs,
    )
    report = Report()
    started = time.monotonic()
    try:
        if arguments.check:
            differences = check(ROOT, options)
            for line in differences:
                print(line)
            print(f"build/{options.backend}: " + ("not current, run: python build.py" if differences else "current"))
            return 1 if differences else 0
        with only_one(ROOT / "build", report):
            build(ROOT, options, arguments.source, report, discard_edits=arguments.discard_edits)
    except BuildError as error:
        report.line(f"build.py: {error}")
        return 1
    except KeyboardInterrupt:
        report.line("build.py: stopped; run it again to go on from here")
        return 130
    report.line(f"ready: build/{options.backend}/bin ({time.monotonic() - started:.1f} s)")
    return 0


@contextlib.contextmanager
def only_one(folder: Path, report: Report) -> Iterator[None]:
    """Two builds at once would write the same files: the second one waits."""
    folder.mkdir(exist_ok=True)
    with (folder / ".lock").open("w", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report.line("another build.py is at work here; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _write_if_changed(path: Path, text: str) -> None:
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
