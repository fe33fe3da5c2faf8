"""Builds ggml-hip against the fake runtime: the real host code and the real code objects, no driver and no GPU.

    python -m tests.rdna.fakehip.build [--rocm DIR] [--upstream quick|all|none] [--jobs N]

``build/fakehip/bin`` gets ``libamdhip64.so`` (fakehip.cpp), ``libggml-hip.so`` (ggml-cuda.cu, our kernels, and the
files of upstream that are asked for), a ``libggml.so`` that registers it, and copies of the CPU's libraries, so that
``LUCE_LIBRARY_DIR`` may name it. Functions of upstream files that were left out are there by name and end the process.

Code objects of our kernels are those of ``python -m buildtools.amd_check``, which is called first; only the host's half is compiled
here. Ninja keeps what has not changed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

from buildtools import amd_check, rocm
from buildtools.report import BuildError, Report

ROOT = Path(__file__).resolve().parents[3]
HERE = Path(__file__).resolve().parent
OUT = ROOT / "build" / "fakehip"
CPU = ROOT / "build" / "cpu" / "bin"
CPU_LIBRARIES = ("ggml-base", "ggml-cpu", "ggml-rpc", "llama")
ALWAYS = ("ggml-cuda.cu",)
QUICK = ("norm.cu", "dsv4-hc.cu", "gated_delta_net.cu", "rope.cu", "top-k.cu", "argsort.cu")
ROWS = (*QUICK, "mmvq.cu", "quantize.cu", "fwht.cu", "mmvf.cu")
ALL = (
    *(*ROWS, "mmq.cu", "mmid.cu", "mmf.cu"),
    *("template-instances/mmq-instance-q8_0.cu", "template-instances/mmf-instance-ncols_16.cu"),
)
UPSTREAM: dict[str, tuple[str, ...]] = {"none": (), "quick": QUICK, "rows": ROWS, "all": ALL}
HOST = ["-x", "hip", "--cuda-host-only", "-O1", "-DNDEBUG", "-std=gnu++17", "-fPIC", "-w"]
RULES = """
rule device
  command = $clang -x hip --cuda-device-only --no-gpu-bundle-output --offload-arch=$target -O3 -DNDEBUG -std=gnu++17 -fPIC -w $
      $defines $includes -Xclang -dependency-file -Xclang $out.d -Xclang -MT -Xclang $out -c $in -o $out
  depfile = $out.d
rule bundle
  command = $bundler -type=o -bundle-align=4096 -targets=host-x86_64-unknown-linux-gnu,$ids -input=/dev/null $inputs -output=$out
rule host
  command = $clang $host $defines $includes -Xclang -fcuda-include-gpubinary -Xclang $bundle -MD -MF $out.d -c $source -o $out
  depfile = $out.d
rule cxx
  command = $cxx -O1 -std=gnu++17 -fPIC -w $flags -MD -MF $out.d -c $in -o $out
  depfile = $out.d
rule link
  command = $cxx -shared -Wl,-soname,$soname -Wl,-rpath,'$$ORIGIN' -o $out $in $libraries
rule stubs
  command = $python -m tests.rdna.fakehip.stubs --nm $nm --cxx $cxx --out $out --objects $in --libraries $given
rule copy
  command = cp -f $in $out
"""


def ninja_file(toolchain: Path, tree: Path, sources: list[Path], upstream: list[Path], code: Path) -> str:
    """The text of build.ninja. ``code``: the folder of amd_check's code objects; ``tree``: the patched source."""
    ggml = tree / "ggml"
    programs = rocm.programs(toolchain)
    defines = [f"-D{name}" for name in amd_check.DEFINES]
    folders = [tree / amd_check.KERNELS, ggml / "src" / "ggml-cuda", ggml / "src", ggml / "include"]
    include = toolchain / ("usr/include" if (toolchain / "usr/include/hip").is_dir() else "include")
    lines = [
        f"builddir = {OUT}",
        f"clang = {programs / 'clang++'}",
        f"bundler = {programs / 'clang-offload-bundler'}",
        f"nm = {programs / 'llvm-nm'}",
        f"cxx = {os.environ.get('CXX', 'g++')}",
        f"python = {sys.executable}",
        f"defines = {' '.join(defines)}",
        f"includes = {' '.join(f'-I{folder}' for folder in folders)}",
        f"host = {' '.join(HOST)}",
        RULES,
    ]
    objects, binaries = [], OUT / "bin"
    for source in [*sources, *upstream]:
        stem = OUT / "obj" / source.stem
        codes = []
        for target in amd_check.TARGETS:
            kept = code / f"{source.stem}.{target}.co"
            if source in upstream:
                kept = Path(f"{stem}.{target}.co")
                lines += [f"build {kept}: device {source}", f"  target = {target}"]
            codes.append(kept)
        ids = ",".join(f"hipv4-amdgcn-amd-amdhsa--{target}" for target in amd_check.TARGETS)
        lines += [f"build {stem}.hipfb: bundle {' '.join(map(str, codes))}", f"  ids = {ids}"]
        lines += [f"  inputs = {' '.join(f'-input={path}' for path in codes)}"]
        lines += [f"build {stem}.o: host {source} {stem}.hipfb", f"  source = {source}", f"  bundle = {stem}.hipfb"]
        objects.append(f"{stem}.o")
    hip = f"-D__HIP_PLATFORM_AMD__=1 -isystem {include}"
    registry = f"-DGGML_USE_CUDA -DGGML_USE_CPU -DGGML_SHARED -DGGML_BUILD -DGGML_BACKEND_SHARED -I{ggml / 'include'} -I{ggml / 'src'}"
    cpu = [str(binaries / f"lib{name}.so") for name in CPU_LIBRARIES]
    fake, gpu = binaries / "libamdhip64.so", binaries / "libggml-hip.so"
    lines += [f"build {OUT / 'obj' / 'fakehip.o'}: cxx {HERE / 'fakehip.cpp'}", f"  flags = {hip}"]
    lines += [f"build {fake}: link {OUT / 'obj' / 'fakehip.o'}", f"  soname = {fake.name}"]
    for name in CPU_LIBRARIES:
        lines += [f"build {binaries / f'lib{name}.so'}: copy {CPU / f'lib{name}.so'}"]
    lines += [f"build {binaries / 'luce-build.json'}: copy {CPU / 'luce-build.json'}"]
    stubs = OUT / "obj" / "stubs.s"
    lines += [
        f"build {stubs}: stubs {' '.join(objects)} | {fake} {cpu[0]} {HERE / 'stubs.py'}",
        f"  given = {fake} {cpu[0]}",
    ]
    lines += [f"build {OUT / 'obj' / 'stubs.o'}: cxx {stubs}", "  flags = -x assembler"]
    lines += [
        f"build {gpu}: link {' '.join(objects)} {OUT / 'obj' / 'stubs.o'} | {fake} {cpu[0]}",
        f"  soname = {gpu.name}",
    ]
    lines += [f"  libraries = {fake} {cpu[0]}"]
    parts = []
    for name in ("ggml-backend-reg", "ggml-backend-dl"):
        parts.append(str(OUT / "obj" / f"{name}.o"))
        lines += [f"build {parts[-1]}: cxx {ggml / 'src' / f'{name}.cpp'}", f"  flags = {registry}"]
    whole = binaries / "libggml.so"
    lines += [f"build {whole}: link {' '.join(parts)} | {gpu} {cpu[0]} {cpu[1]}", f"  soname = {whole.name}"]
    lines += [f"  libraries = {gpu} {cpu[0]} {cpu[1]} -ldl"]
    return "\n".join(lines) + "\n"


def build(toolchain: Path, upstream: str, jobs: int, report: Report) -> Path:
    """Build into ``build/fakehip``; the folder of the libraries. BuildError with the end of what failed."""
    tree = ROOT / "vendor" / "src"
    if not (CPU / "libggml-base.so").is_file():
        raise BuildError(f"expected the CPU's libraries in {CPU}, found none. Build them: python build.py")
    ours = sorted((ROOT / "patches" / "src" / amd_check.KERNELS).glob("*.cu"))
    checker = amd_check.Checker(toolchain, tree, ROOT / "build" / "amd-check")
    results = amd_check.compile_all(checker, ours, list(amd_check.TARGETS), jobs, report)
    errors = [result.error for result in results if result.error]
    if errors:
        raise BuildError(errors[0])
    names = [*ALWAYS, *UPSTREAM[upstream]]
    theirs = [tree / "ggml" / "src" / "ggml-cuda" / name for name in names]
    (OUT / "obj").mkdir(parents=True, exist_ok=True)
    (OUT / "bin").mkdir(exist_ok=True)
    text = ninja_file(toolchain, tree, ours, theirs, checker.cache)
    (OUT / "build.ninja").write_text(text, encoding="utf-8")
    (OUT / "upstream.txt").unlink(missing_ok=True)
    ninja = shutil.which("ninja", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if ninja is None:
        raise BuildError("expected ninja, found none. Install it: pip install ninja")
    done = subprocess.run([ninja, "-C", str(ROOT), "-f", str(OUT / "build.ninja"), "-j", str(jobs)], check=False)
    if done.returncode != 0:
        raise BuildError(f"fakehip: ninja failed ({done.returncode}), see above")
    (OUT / "upstream.txt").write_text("".join(f"{name}\n" for name in names), encoding="utf-8")
    return OUT / "bin"


def built() -> list[str]:
    """The files of upstream that the libraries hold."""
    listed = OUT / "upstream.txt"
    return listed.read_text(encoding="utf-8").split() if listed.is_file() else []


def main(argv: list[str] | None = None) -> int:
    """0 when the libraries are there; 1 with the reason."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rocm", type=Path, metavar="DIR", help="a ROCm folder or toolchain (default: build/rocm)")
    parser.add_argument(
        "--upstream", choices=sorted(UPSTREAM), default="quick", help="files of upstream (default: quick)"
    )
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), metavar="N", help="compilers at once")
    parser.add_argument("--optional", action="store_true", help="without a toolchain to be had: say so and succeed")
    arguments = parser.parse_args(argv)
    report = Report()
    try:
        folder = arguments.rocm or rocm.ensure(ROOT / "build" / "rocm", report)
        bin_ = build(folder.resolve(), arguments.upstream, arguments.jobs, report)
    except rocm.ToolchainUnavailable as error:
        report.line(f"fakehip: {'SKIPPED, ' if arguments.optional else ''}{error}")
        return 0 if arguments.optional else 1
    except BuildError as error:
        report.line(f"fakehip: {error}")
        return 1
    report.line(f"fakehip: {bin_}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
