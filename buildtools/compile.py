"""Configure with CMake, build with Ninja, and say in one file beside the libraries what they were built from."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from buildtools.report import BuildError, Report, log_tail

BACKENDS = ("cpu", "cuda", "hip")
DEFAULT_ARCH = {"cpu": "", "cuda": "90a", "hip": "gfx1151;gfx1201"}
LIBRARIES = ("libggml-base.so", "libggml-cpu.so", "libggml-rpc.so", "libggml.so", "libllama.so")
BENCH_PROGRAM = "llama-bench"
CONFIGURE_NAME = "luce-configure.json"
COMPILER_VARIABLES = ("CC", "CXX", "CFLAGS", "CXXFLAGS", "LDFLAGS", "CUDACXX", "CUDAFLAGS", "HIPCXX", "HIPFLAGS")
COMMON_SETTINGS = {
    "CMAKE_BUILD_TYPE": "Release",
    "BUILD_SHARED_LIBS": "ON",
    # one plain file a library, found beside its neighbours: the folder can be moved and packed into a wheel
    "CMAKE_PLATFORM_NO_VERSIONED_SONAME": "ON",
    "CMAKE_BUILD_WITH_INSTALL_RPATH": "ON",
    "CMAKE_INSTALL_RPATH": "$ORIGIN",
    "GGML_BACKEND_DL": "OFF",
    "GGML_RPC": "ON",
    "GGML_RPC_RDMA": "OFF",
    "LLAMA_OPENSSL": "OFF",
    "LLAMA_BUILD_TESTS": "OFF",
    "LLAMA_BUILD_EXAMPLES": "OFF",
    "LLAMA_BUILD_SERVER": "OFF",
    "LLAMA_BUILD_APP": "OFF",
    # these two keep the commit of this repository out of the libraries: every commit would rebuild files
    "GIT_EXE": "OFF",
    "LLAMA_BUILD_NUMBER": "0",
}


@dataclass(frozen=True)
class Options:
    """What is to be built. ``arch`` names GPU targets, ``toolkit`` the CUDA or ROCm folder (None: from PATH)."""

    backend: str
    arch: str
    toolkit: Path | None
    portable: bool
    bench: bool
    jobs: int

    def code_settings(self) -> dict[str, str]:
        """The CMake settings that change the machine code: they are the stamp's ``flags``."""
        settings = {"GGML_NATIVE": "OFF" if self.portable else "ON", "GGML_OPENMP": "OFF"}
        if self.backend == "cuda":
            settings |= {"GGML_CUDA": "ON", "GGML_CUDA_NCCL": "OFF", "CMAKE_CUDA_ARCHITECTURES": self.arch}
        if self.backend == "hip":
            settings |= {"GGML_HIP": "ON", "CMAKE_HIP_ARCHITECTURES": self.arch}
        return settings

    def flags(self) -> str:
        """The settings as one line of text for the stamp."""
        return " ".join([self.backend, *(f"{name}={value}" for name, value in self.code_settings().items())])

    def libraries(self) -> tuple[str, ...]:
        """The libraries that the build leaves in ``build/<backend>/bin``."""
        return LIBRARIES if self.backend == "cpu" else (*LIBRARIES, f"libggml-{self.backend}.so")


def find_tool(root: Path, name: str) -> str:
    """CMake or Ninja: of the running Python's environment, of the project's ``.venv``, or on PATH."""
    for folder in (Path(sys.executable).parent, root / ".venv" / "bin"):
        if os.access(folder / name, os.X_OK):
            return str(folder / name)
    found = shutil.which(name)
    if found is None:
        raise BuildError(f"expected {name}, found none. Install it: {sys.executable} -m pip install cmake ninja")
    return found


def describe_compilers(options: Options) -> str:
    """The first version line of each compiler that the backend needs; BuildError says what to install."""
    names = [os.environ["CXX"].split()[0]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    cxx = next((path for path in map(shutil.which, names) if path), None)
    if cxx is None:
        raise BuildError(
            f"expected a C++ compiler ({', '.join(names)}) on PATH, found none. Install one:\n"
            "  Debian, Ubuntu: apt-get install g++     Fedora: dnf install gcc-c++     Arch: pacman -S gcc\n"
            "  or name it: CXX=/path/to/c++ CC=/path/to/cc python build.py"
        )
    versions = [_version_line(cxx, first=True)]
    if options.backend == "cuda":
        versions.append(_version_line(str(cuda_compiler(options)), first=False))
    if options.backend == "hip":
        versions.append(_version_line(str(hip_compiler(options)), first=True))
    return "; ".join(versions)


def cuda_compiler(options: Options) -> Path:
    """nvcc of the toolkit folder, or on PATH."""
    found = str(options.toolkit / "bin" / "nvcc") if options.toolkit else shutil.which("nvcc")
    if found is None or not os.access(found, os.X_OK):
        raise BuildError(
            f"expected nvcc {'in ' + found if found else 'on PATH'}, found none. Install the CUDA toolkit (12.4 or later)\n"
            "  and put its bin folder on PATH, or name its folder: python build.py --backend cuda --cuda-toolkit DIR"
        )
    return Path(found)


def hip_compiler(options: Options) -> Path:
    """clang++ of the ROCm folder: a ROCm installation's layout, or Debian's LLVM beside its ROCm packages."""
    root = options.toolkit or Path(os.environ.get("ROCM_PATH", "/opt/rocm"))
    for below in ("llvm/bin/clang++", "lib/llvm/bin/clang++"):
        if os.access(root / below, os.X_OK):
            return root / below
    raise BuildError(
        f"expected llvm/bin/clang++ in {root}, found none. Install ROCm 6.1 or later (hip, hipblas and rocblas with\n"
        "  their development files), or name its folder: python build.py --backend hip --rocm DIR"
    )


def configure(root: Path, options: Options, compiler: str, tag: str, report: Report) -> Path:
    """Run CMake when the settings, the compiler or its environment changed. Returns ``build/<backend>``.

    ``tag``: the upstream build, which the libraries give as their commit.
    """
    build = root / "build" / options.backend
    environment = {name: os.environ[name] for name in COMPILER_VARIABLES if name in os.environ}
    before = _read_json(build / CONFIGURE_NAME)
    if before and (before.get("compiler") != compiler or before.get("environment") != environment):
        report.line(f"configure: another compiler than before, {build.relative_to(root)} starts anew")
        shutil.rmtree(build)
        before = {}
    bench = options.bench or bool(before.get("bench"))
    settings = COMMON_SETTINGS | options.code_settings() | _toolchain_settings(options)
    settings |= {"LLAMA_BUILD_COMMON": _on(bench), "LLAMA_BUILD_TOOLS": _on(bench), "LLAMA_BUILD_COMMIT": tag}
    now: dict[str, Any] = {"compiler": compiler, "environment": environment, "bench": bench, "settings": settings}
    # Ninja calls the CMake that configured; one from a build environment of pip is gone by now
    cmake = before.pop("cmake", None)
    if before == now and (build / "build.ninja").is_file() and Path(str(cmake)).is_file():
        return build
    report.progress("configure: CMake")
    build.mkdir(parents=True, exist_ok=True)
    (build / CONFIGURE_NAME).unlink(missing_ok=True)
    now["cmake"] = find_tool(root, "cmake")
    command = [now["cmake"], "-S", str(root / "vendor" / "src"), "-B", str(build), "-G", "Ninja"]
    command += [f"-DCMAKE_MAKE_PROGRAM={find_tool(root, 'ninja')}"]
    command += [f"-D{name}={value}" for name, value in settings.items()]
    log = build / "configure.log"
    with log.open("w", encoding="utf-8") as out:
        code = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, check=False).returncode
    if code != 0:
        raise BuildError(f"CMake failed ({code}). The end of {log}:\n{log_tail(log)}")
    (build / CONFIGURE_NAME).write_text(json.dumps(now, indent=1), encoding="utf-8")
    report.line(f"configure: {options.flags()}")
    return build


def compile_libraries(root: Path, build: Path, options: Options, report: Report) -> int:
    """Run Ninja for the needed targets only, showing [done/all]. Returns the number of steps that it ran."""
    targets = ["ggml", "llama"] + ([BENCH_PROGRAM] if options.bench else [])
    command = [find_tool(root, "ninja"), "-C", str(build), f"-j{options.jobs}", *targets]
    log = build / "build.log"
    steps = 0
    with log.open("w", encoding="utf-8", buffering=1) as out:
        environment = os.environ | {"NINJA_STATUS": "[%f/%t] "}
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", env=environment
        )
        with process:
            for line in process.stdout or ():
                out.write(line)
                if step := re.match(r"\[(\d+)/(\d+)\] (.*)", line):
                    steps = int(step[1])
                    name = step[3].split()[-1].rsplit(".dir/", 1)[-1].removesuffix(".o")
                    report.progress(f"build: [{step[1]}/{step[2]}] {name}", last=step[1] == step[2])
    if process.returncode != 0:
        raise BuildError(_ninja_failure(log, process.returncode))
    missing = [name for name in options.libraries() if not (build / "bin" / name).is_file()]
    if missing:
        raise BuildError(f"the build ended without {', '.join(missing)} in {build / 'bin'}. See {log}.")
    return steps


def build_info(build: Path, options: Options, stamp: str, pin: dict[str, str]) -> dict[str, object]:
    """What ``luce-build.json`` says: the stamp, the pin, and size and digest of each library."""
    files = {name: _file_identity(build / "bin" / name) for name in options.libraries()}
    return {"stamp": stamp, "backend": options.backend, "arch": options.arch, **pin, "libraries": files}


def changed_libraries(build: Path, info: dict[str, object]) -> list[str]:
    """The libraries that are not the files which ``luce-build.json`` describes."""
    recorded = info.get("libraries")
    if not isinstance(recorded, dict):
        return ["luce-build.json: names no libraries"]
    found: list[str] = []
    for name, identity in recorded.items():
        path = build / "bin" / str(name)
        if not path.is_file():
            found.append(f"{path}: missing")
        elif _file_identity(path) != identity:
            found.append(f"{path}: not the file that build.py left")
    return found


def _toolchain_settings(options: Options) -> dict[str, str]:
    if options.backend == "cuda":
        compiler = cuda_compiler(options)
        folder = options.toolkit or compiler.resolve().parent.parent
        return {"CMAKE_CUDA_COMPILER": str(compiler), "CUDAToolkit_ROOT": str(folder)}
    if options.backend == "hip":
        folder = options.toolkit or Path(os.environ.get("ROCM_PATH", "/opt/rocm"))
        prefixes = [str(folder), str(folder / "usr"), str(folder / "usr" / "lib" / "x86_64-linux-gnu")]
        return {
            "CMAKE_HIP_COMPILER": str(hip_compiler(options)),
            "CMAKE_HIP_COMPILER_ROCM_ROOT": str(folder / "usr" if (folder / "usr").is_dir() else folder),
            "CMAKE_PREFIX_PATH": ";".join(prefixes),
        }
    return {}


def _ninja_failure(log: Path, code: int) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    first = next((i for i, line in enumerate(lines) if line.startswith("FAILED:")), max(0, len(lines) - 30))
    shown = [line[:400] for line in lines[first : first + 40]]
    full = any("No space left on device" in line for line in lines)
    return (
        f"the compiler run failed (ninja: {code}). The first failure in {log}:\n"
        + "\n".join("    " + line for line in shown)
        + ("\n  The disk is full: free some space and run again." if full else "")
    )


def _version_line(program: str, *, first: bool) -> str:
    try:
        result = subprocess.run([program, "--version"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise BuildError(f"{program} --version: expected a working compiler, found: {error}") from error
    lines: Sequence[str] = [line for line in result.stdout.splitlines() if line.strip()]
    return lines[0 if first else -1].strip() if lines else program


def _file_identity(path: Path) -> list[object]:
    return [path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest()]


def _read_json(path: Path) -> dict[str, object]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _on(value: bool) -> str:
    return "ON" if value else "OFF"
