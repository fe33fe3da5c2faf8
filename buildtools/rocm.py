"""A HIP compiler for AMD GPUs on a machine that has none: Debian's packages, unpacked into a folder.

Nothing is installed: apt gets a configuration of its own that starts from an empty system, and what it fetches is
unpacked below the folder. The suite is newer than most hosts, so the programs are pointed at the C library beside
them; the folder cannot be moved. rocBLAS (1 GB a version) is replaced by an empty library of its name, because
ggml-hip links against it and calls nothing of it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from buildtools.report import BuildError, Report

SUITE = "forky"
MARKER = "luce-toolchain.json"
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
# {v} is the LLVM version that the suite's hipcc is made for
CLOSURE = ("libllvm{v}", "libclang-cpp{v}", "lld-{v}", "patchelf")
COMPILER = ("clang-{v}", "libclang-common-{v}-dev", "llvm-{v}", "clang-tools-{v}", "rocm-device-libs-{v}")
HEADERS = ("libamdhip64-dev", "libhipblas-dev", "libhipblas-common-dev", "librocblas-dev")
LINKING = """
libamdhip64-6 libamd-comgr-dev libamd-comgr3 libhsa-runtime-dev libhsa-runtime64-1 libhipblas2 libclang-rt-{v}-dev
""".split()
PROGRAMS = """
clang clang-offload-bundler lld llvm-ar llvm-cxxfilt llvm-nm llvm-objcopy llvm-objdump llvm-readobj
""".split()
ALIASES = {"clang++": "clang", "ld.lld": "lld", "llvm-readelf": "llvm-readobj"}
LEFT_OUT = ("./usr/share/doc", "./usr/share/man", "./usr/share/locale", "*san*x86_64*", "*san*i386*", "*fuzzer*")


class ToolchainUnavailable(BuildError):
    """The packages cannot be had here (no Debian apt, no network): not a fault of the project."""


def ensure(folder: Path, report: Report, *, full: bool = False, mirror: str | None = None) -> Path:
    """Make ``folder`` a toolchain unless it is one already; ``full`` adds what CMake and a link on the host need.

    Returns ``folder``. ToolchainUnavailable when the packages cannot be fetched, BuildError when they do not fit.
    """
    folder = folder.resolve()
    found = _marker(folder)
    if found and found.get("folder") == str(folder) and (found.get("full") or not full):
        return folder
    if folder.is_dir() and not found and not (folder / ".apt").is_dir() and any(folder.iterdir()):
        raise BuildError(
            f"{folder}: expected a new folder or a toolchain of ours, found other files. Name another one."
        )
    apt = _Apt(folder / ".apt", mirror)
    started = time.monotonic()
    report.line(f"toolchain: clang, lld and HIP headers of Debian {SUITE} into {folder}, about 90 MB to download")
    shutil.rmtree(folder, ignore_errors=True)
    version = apt.update()
    names = [name.format(v=version) for name in [*COMPILER, *HEADERS, *(LINKING if full else [])]]
    archives = apt.download(sorted({*names, *apt.closure([name.format(v=version) for name in CLOSURE])}))
    for archive in archives:
        _unpack(archive, folder)
    _install_programs(folder, version)
    if full:
        _prepare_link(folder, version)
    text = {"folder": str(folder), "suite": SUITE, "llvm": version, "full": full}
    (folder / MARKER).write_text(json.dumps(text) + "\n", encoding="utf-8")
    shutil.rmtree(apt.folder)
    report.line(f"toolchain: {len(archives)} packages, LLVM {version} ({time.monotonic() - started:.0f} s)")
    return folder


def programs(folder: Path) -> Path:
    """The folder of clang++ and the LLVM tools in a toolchain of ours or a ROCm installation."""
    for below in ("llvm/bin", "lib/llvm/bin"):
        if os.access(folder / below / "clang++", os.X_OK):
            return folder / below
    raise BuildError(f"expected llvm/bin/clang++ in {folder}, found none. Name a ROCm folder, or a toolchain of ours.")


class _Apt:
    """apt with its state, lists and cache in a folder, for an empty system."""

    def __init__(self, folder: Path, mirror: str | None) -> None:
        if platform.machine() != "x86_64" or not shutil.which("apt-get") or not shutil.which("dpkg-deb"):
            raise ToolchainUnavailable("expected apt-get and dpkg-deb on x86-64, found none. Name a ROCm: --rocm DIR")
        if not KEYRING.is_file():
            raise ToolchainUnavailable(f"expected Debian's keys in {KEYRING}, found none. Name a ROCm: --rocm DIR")
        self.folder = folder
        self.mirror = mirror or host_mirror(Path("/etc/apt"))

    def update(self) -> str:
        """Write the configuration, fetch the suite's lists; the LLVM version of its hipcc."""
        for below in ("state/lists/partial", "cache/archives/partial", "etc/empty", "debs"):
            (self.folder / below).mkdir(parents=True, exist_ok=True)
        (self.folder / "status").touch()
        source = f"deb [signed-by={KEYRING}] {self.mirror} {SUITE} main\n"
        (self.folder / "etc" / "sources.list").write_text(source, encoding="utf-8")
        settings = {
            "Dir::State": self.folder / "state",
            "Dir::State::status": self.folder / "status",
            "Dir::Cache": self.folder / "cache",
            "Dir::Etc": self.folder / "etc",
            "Dir::Etc::sourceparts": self.folder / "etc" / "empty",
            "Dir::Etc::parts": self.folder / "etc" / "empty",
            "Dir::Etc::preferencesparts": self.folder / "etc" / "empty",
            "APT::Sandbox::User": "root" if os.geteuid() == 0 else "",
            "APT::Install-Recommends": "false",
            "APT::Update::Error-Mode": "any",
            "Acquire::Languages": "none",
            "Acquire::Retries": "3",
            # a mirror kept at one day is past the date until which its list counts as fresh; signatures still count
            "Acquire::Check-Valid-Until": "false",
            "Acquire::Check-Date": "false",
        }
        text = "".join(f'{name} "{value}";\n' for name, value in settings.items())
        (self.folder / "apt.conf").write_text(text, encoding="utf-8")
        try:
            self._run("apt-get", "-qq", "update")
        except BuildError as error:
            raise ToolchainUnavailable(f"apt could not fetch the lists of {SUITE}: {error}") from error
        match = re.search(r"clang-(\d+)", self._run("apt-cache", "depends", "hipcc"))
        if match is None:
            raise BuildError(f"expected hipcc of {SUITE} to depend on a clang-NN, found no such dependency.")
        return match[1]

    def closure(self, names: list[str]) -> list[str]:
        """``names`` and all they depend on."""
        return re.findall(r"^Inst (\S+)", self._run("apt-get", "-s", "install", *names), re.M)

    def download(self, names: list[str]) -> list[Path]:
        """The package files."""
        try:
            self._run("apt-get", "-qq", "download", *names)
        except BuildError as error:
            raise ToolchainUnavailable(f"apt could not fetch packages of {SUITE}: {error}") from error
        return sorted((self.folder / "debs").glob("*.deb"))

    def _run(self, *command: str) -> str:
        environment = os.environ | {"APT_CONFIG": str(self.folder / "apt.conf"), "LC_ALL": "C"}
        return _run(*command, cwd=self.folder / "debs", env=environment)


def host_mirror(etc_apt: Path) -> str:
    """The mirror that the host's own apt uses for Debian."""
    for name, pattern in (
        ("sources.list.d/debian.sources", r"^URIs:\s*(\S+)"),
        ("sources.list", r"^deb .*?(\w+://\S+)"),
    ):
        path = etc_apt / name
        match = re.search(pattern, path.read_text(encoding="utf-8"), re.M) if path.is_file() else None
        if match:
            return match[1]
    raise ToolchainUnavailable(f"expected a Debian mirror in {etc_apt}, found none. Name one: --mirror, or --rocm DIR")


def _run(*command: str, cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
    result = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False, cwd=cwd, env=env)
    if result.returncode != 0:
        tail = "\n".join("    " + line for line in result.stderr.splitlines()[-8:])
        raise BuildError(f"{' '.join(command)[:200]} failed ({result.returncode}):\n{tail}")
    return result.stdout


def _unpack(archive: Path, folder: Path) -> None:
    with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", str(archive)], stdout=subprocess.PIPE) as package:
        excluded = [f"--exclude={pattern}" for pattern in LEFT_OUT]
        tar = subprocess.run(["tar", "-x", "-C", str(folder), *excluded], stdin=package.stdout, check=False)
    if package.returncode != 0 or tar.returncode != 0:
        raise BuildError(f"{archive.name}: expected a readable package, found none. Is the disk full?")


def _install_programs(folder: Path, version: str) -> None:
    """Keep the programs that are used, point them at the C library of the suite, tell clang where its parts are."""
    usr, llvm = folder / "usr", folder / "usr" / "lib" / f"llvm-{version}"
    libraries = usr / "lib" / "x86_64-linux-gnu"
    loader = usr / "lib64" / "ld-linux-x86-64.so.2"
    # patchelf is of the suite too, so its loader is called by name until it has done its work
    patchelf = [str(loader), "--library-path", str(libraries), str(usr / "bin" / "patchelf")]
    kept = {name: (llvm / "bin" / name).resolve().read_bytes() for name in PROGRAMS}
    shutil.rmtree(llvm / "bin")
    (llvm / "bin").mkdir()
    for name, content in kept.items():
        program = llvm / "bin" / name
        program.write_bytes(content)
        program.chmod(0o755)
        paths = ["--set-interpreter", str(loader), "--set-rpath", str(libraries), "--force-rpath"]
        _run(*patchelf, *paths, str(program))
    for alias, name in ALIASES.items():
        (llvm / "bin" / alias).symlink_to(name)
    for pattern in ("libLLVM.so.*", "libclang-cpp.so.*"):
        for library in libraries.glob(pattern):
            if not library.is_symlink():
                _run(*patchelf, "--set-rpath", "$ORIGIN", "--force-rpath", str(library))
    device_libraries = f"{llvm}/lib/clang/{version}/amdgcn/bitcode"
    options = (f"--rocm-path={usr}", f"--rocm-device-lib-path={device_libraries}", "$-Wl,--allow-shlib-undefined")
    (llvm / "bin" / "clang++.cfg").write_text("".join(option + "\n" for option in options), encoding="utf-8")
    (folder / "llvm").symlink_to(f"usr/lib/llvm-{version}")


def _prepare_link(folder: Path, version: str) -> None:
    """What CMake's HIP language looks for, and an empty rocBLAS."""
    usr = folder / "usr"
    libraries = usr / "lib" / "x86_64-linux-gnu"
    target = libraries / "cmake" / "hip-lang" / "hip-lang-config.cmake"
    (usr / "lib" / "cmake" / "hip-lang").mkdir(parents=True, exist_ok=True)
    (usr / "lib" / "cmake" / "hip-lang" / target.name).write_text(f'include("{target}")\n', encoding="utf-8")
    (usr / "lib" / "libamdhip64.so").symlink_to(f"{libraries.name}/libamdhip64.so")
    texts = [path.read_text(encoding="utf-8") for path in (libraries / "cmake" / "rocblas").glob("*.cmake")]
    names = {name for text in texts for name in re.findall(r"librocblas\.so(?:\.\d+)+", text)}
    if not names:
        raise BuildError("expected rocBLAS's CMake files to name its library, found no name. Does the suite still fit?")
    full_name = max(names, key=len)
    soname = ".".join(full_name.split(".")[:3])
    empty = folder / ".empty.c"
    empty.write_text("", encoding="utf-8")
    clang = str(usr / "lib" / f"llvm-{version}" / "bin" / "clang")
    link = ["-shared", "-nostdlib", "-fuse-ld=lld", f"-Wl,-soname,{soname}", "-o", str(libraries / full_name)]
    _run(clang, str(empty), *link)
    empty.unlink()
    for name in {soname, "librocblas.so"} - {full_name}:
        (libraries / name).unlink(missing_ok=True)
        (libraries / name).symlink_to(full_name)


def _marker(folder: Path) -> dict[str, object]:
    try:
        value = json.loads((folder / MARKER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def main(argv: list[str] | None = None) -> int:
    """``python -m buildtools.rocm [DIR]``: fetch the toolchain."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path, nargs="?", default=Path("build/rocm"), help="default: build/rocm")
    parser.add_argument("--full", action="store_true", help="with what CMake and a link on the host need (make hip)")
    parser.add_argument("--mirror", metavar="URL", help="Debian mirror (default: the one this machine's apt uses)")
    arguments = parser.parse_args(argv)
    try:
        ensure(arguments.folder, Report(), full=arguments.full, mirror=arguments.mirror)
    except BuildError as error:
        print(f"buildtools.rocm: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
