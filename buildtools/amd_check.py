"""Compile our GPU kernels for AMD's targets and compare what each takes with the committed table.

    python -m buildtools.amd_check               # make amd-check; fetches a toolchain into build/rocm when needed
    python -m buildtools.amd_check --update      # make amd-check UPDATE=1; writes docs/amd-resources.txt
    python -m buildtools.amd_check --rocm /opt/rocm

No GPU is needed: code objects are made and read, not run. They and what was read are kept in build/amd-check by what they were
made of, so that a second call compiles only what changed, and `make amd-run` has them to execute. See docs/amd.md.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import build
from buildtools import amd_resources as resources
from buildtools import rocm
from buildtools.amd_resources import Kernel
from buildtools.report import BuildError, Report

ROOT = Path(__file__).resolve().parents[1]
TARGETS = ("gfx1151", "gfx1201")
KERNELS = Path("ggml") / "src" / "ggml-cuda" / "luce"
TABLE = Path("docs") / "amd-resources.txt"
CACHE_VERSION = "1"
# what ggml-hip's CMake files give its sources
DEFINES = """
GGML_USE_HIP GGML_HIP_GRAPHS GGML_HIP_NO_VMM GGML_BACKEND_BUILD GGML_BACKEND_SHARED GGML_SHARED
GGML_SCHED_MAX_COPIES=4 __HIP_PLATFORM_AMD__=1 _GNU_SOURCE _XOPEN_SOURCE=600
""".split()
FLAGS = ["-x", "hip", "--cuda-device-only", "--no-gpu-bundle-output", "-O3", "-DNDEBUG", "-std=gnu++17", "-fPIC"]
FLAGS += ["-fno-crash-diagnostics"]
# nvcc takes the parentheses of `#pragma unroll (n)` that clang warns of
WARNINGS = ("-Wall", "-Wextra", "-Wno-cuda-compat", "-Werror")


@dataclass
class Result:
    """One source on one target: its kernels, or the end of what the compiler said."""

    source: Path
    target: str
    kernels: list[Kernel] = field(default_factory=list)
    error: str = ""
    compiled: bool = False


class Checker:
    """Compiles with one toolchain. ``tree`` is the patched source tree (for upstream's headers)."""

    def __init__(self, toolchain: Path, tree: Path, cache: Path) -> None:
        self.bin = rocm.programs(toolchain)
        self.toolchain = toolchain.resolve()
        self.cache = cache
        self.compiler = self._run("clang++", "--version").splitlines()[0].strip()
        ggml = tree / "ggml"
        self.types = resources.ggml_types((ggml / "include" / "ggml.h").read_text(encoding="utf-8"))
        # upstream's headers are system headers: their warnings are not ours. The first folder is for "../common.cuh",
        # which is beside our sources in the patched tree but not in patches/src, from where they are compiled
        includes = [tree / KERNELS, ggml / "src" / "ggml-cuda", ggml / "src", ggml / "include"]
        self.options = [*FLAGS, *(f"-D{name}" for name in DEFINES), *WARNINGS]
        self.includes = [part for folder in includes for part in ("-isystem", str(folder))]
        cache.mkdir(parents=True, exist_ok=True)

    def check(self, source: Path, target: str) -> Result:
        """Compile and read one source, or take the kept result when nothing that it was made of has changed."""
        result = Result(source, target)
        entry = self.cache / f"{source.stem}.{target}.json"
        kept = self._kept(entry)
        if kept is not None:
            result.kernels = kept
            return result
        result.compiled = True
        entry.unlink(missing_ok=True)
        code, depends = entry.with_suffix(".co"), entry.with_suffix(".d")
        command = ["clang++", *self.options, f"--offload-arch={target}", *self.includes]
        # the driver writes no list of headers when it compiles for a GPU alone; the compiler below it does
        for option in ("-dependency-file", str(depends), "-MT", "code", "-sys-header-deps"):
            command += ["-Xclang", option]
        command += ["-c", str(source), "-o", str(code)]
        try:
            self._run(*command)
            result.kernels = self._read(code, source.name, target)
        except BuildError as error:
            result.error = str(error)
            return result
        made_of = {path: _digest(Path(path)) for path in self._dependencies(depends)}
        kernels = [kernel.to_json() for kernel in result.kernels]
        entry.write_text(json.dumps({"key": self._key(), "made_of": made_of, "kernels": kernels}), encoding="utf-8")
        depends.unlink()
        return result

    def _read(self, code: Path, source: str, target: str) -> list[Kernel]:
        notes = resources.parse_notes(self._run("llvm-readelf", "--notes", str(code)))
        counts = resources.parse_disassembly(self._run("llvm-objdump", "-d", "--no-show-raw-insn", str(code)))
        names = self._run("llvm-cxxfilt", *notes).splitlines() if notes else []
        found: list[Kernel] = []
        for (mangled, fields), name in zip(notes.items(), names, strict=True):
            if mangled not in counts:
                raise BuildError(f"{source}: expected the code of {mangled} in the disassembly, found none.")
            instructions, wmma = counts[mangled]
            short = resources.short_name(name, self.types)
            found.append(Kernel(target, source, short, wmma=wmma, instructions=instructions, **fields))
        return found

    def _kept(self, entry: Path) -> list[Kernel] | None:
        try:
            value: dict[str, Any] = json.loads(entry.read_text(encoding="utf-8"))
            if value["key"] != self._key() or any(_digest(Path(p)) != digest for p, digest in value["made_of"].items()):
                return None
            if not entry.with_suffix(".co").is_file():
                return None
            return [Kernel(**kernel) for kernel in value["kernels"]]
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _key(self) -> str:
        return " ".join([CACHE_VERSION, self.compiler, str(self.toolchain), *self.options])

    def _dependencies(self, depends: Path) -> list[str]:
        words = depends.read_text(encoding="utf-8").replace("\\\n", " ").split()
        return [word for word in words[1:] if not word.startswith(str(self.toolchain)) and not word.startswith("/usr/")]

    def _run(self, program: str, *arguments: str) -> str:
        command = [str(self.bin / program), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
        if done.returncode != 0:
            lines = [line for line in done.stderr.splitlines() if line.strip()]
            first = next((i for i, line in enumerate(lines) if "error" in line.lower()), 0)
            shown = "\n".join("    " + line[:300] for line in lines[first : first + 12])
            raise BuildError(f"{program} failed ({done.returncode}):\n{shown}")
        return done.stdout


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path.is_file() else ""


def compile_all(checker: Checker, sources: list[Path], targets: list[str], jobs: int, report: Report) -> list[Result]:
    """Every source on every target, large sources first so that the last compiler does not work alone."""
    work = [(source, target) for source in sources for target in targets]
    # the products' sources hold few lines and many instances
    work.sort(key=lambda item: ("mmv" not in item[0].name and "mmb" not in item[0].name, -item[0].stat().st_size))
    with ThreadPoolExecutor(jobs) as pool:
        running = [pool.submit(checker.check, *item) for item in work]
        results: list[Result] = []
        for number, future in enumerate(running, start=1):
            results.append(future.result())
            name = f"{results[-1].source.name} {results[-1].target}"
            report.progress(f"amd-check: [{number}/{len(work)}] {name}", last=number == len(work))
    return results


def judge(results: list[Result], table: Path, compiler: str, targets: list[str], *, update: bool) -> list[str]:
    """The faults, one a text; writes the table when ``update`` and nothing failed to compile."""
    found = [
        f"{result.source.name} does not compile for {result.target}: {result.error}"
        for result in results
        if result.error
    ]
    if found:
        return found
    kernels = [kernel for result in results for kernel in result.kernels]
    found = resources.faults(kernels, targets)
    now = resources.format_table(kernels, compiler)
    before = table.read_text(encoding="utf-8") if table.is_file() else ""
    if update:
        table.write_text(now, encoding="utf-8")
        return found
    changes = resources.table_changes(before, now, table.name)
    same_compiler = resources.table_compiler(before) == compiler
    if changes and same_compiler:
        found.append(f"the kernels are not as {table} says. If that is meant: make amd-check UPDATE=1\n{changes}")
    elif changes:
        print(
            f"{table} is of another compiler ({resources.table_compiler(before) or 'no table yet'}), not a fault:\n{changes}"
        )
    return found


def main(argv: list[str] | None = None) -> int:
    """0 when all is as the table says, 1 with the faults, 2 for a wrong option."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rocm", type=Path, metavar="DIR", help="a ROCm folder or toolchain (default: build/rocm)")
    parser.add_argument("--update", action="store_true", help=f"write {TABLE}")
    parser.add_argument("--optional", action="store_true", help="without a toolchain to be had: say so and succeed")
    parser.add_argument("--source", type=Path, nargs="+", metavar="FILE", help="only these files, not the table")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), metavar="N", help="compilers at once")
    parser.add_argument("--mirror", metavar="URL", help="Debian mirror (default: the one this machine's apt uses)")
    arguments = parser.parse_args(argv)
    if arguments.jobs < 1:
        parser.error("--jobs: expected 1 or more")
    if arguments.source and arguments.update:
        parser.error("--update: the table is of all sources, so not together with --source")
    report = Report()
    started = time.monotonic()
    try:
        folder = arguments.rocm or rocm.ensure(ROOT / "build" / "rocm", report, mirror=arguments.mirror)
        stamp = build.load_stamp(ROOT)
        with build.only_one(ROOT / "build", report):
            build.prepare_tree(ROOT, stamp, None, report, discard_edits=False)
        checker = Checker(folder, ROOT / "vendor" / "src", ROOT / "build" / "amd-check")
        sources = arguments.source or sorted((ROOT / "patches" / "src" / KERNELS).glob("*.cu"))
        results = compile_all(checker, sources, list(TARGETS), arguments.jobs, report)
        if arguments.source:
            kernels = [kernel for result in results for kernel in result.kernels]
            found = [f"{r.source.name} does not compile for {r.target}: {r.error}" for r in results if r.error]
            found += resources.faults(kernels, [])
            print(resources.format_table(kernels, checker.compiler))
        else:
            table = ROOT / TABLE
            found = judge(results, table, checker.compiler, list(TARGETS), update=arguments.update)
    except rocm.ToolchainUnavailable as error:
        report.line(f"amd-check: {'SKIPPED, ' if arguments.optional else ''}{error}")
        return 0 if arguments.optional else 1
    except BuildError as error:
        report.line(f"amd-check: {error}")
        return 1
    for text in found:
        print(f"amd-check: {text}")
    kernels = [kernel for result in results for kernel in result.kernels]
    compiled = sum(result.compiled for result in results)
    report.line(
        f"amd-check: {'FAILED, ' if found else ''}{len(kernels)} kernels of {len(results)} code objects, {compiled} of them "
        f"compiled now, {len(found)} faults ({time.monotonic() - started:.0f} s)"
    )
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
