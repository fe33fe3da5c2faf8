"""Finding and loading the native libraries, and refusing those that were built from something else.

The libraries are looked for in this order: the directory in the environment variable ``LUCE_LIBRARY_DIR``;
``pyluce/native/lib/<backend>`` (an installed package); ``build/<backend>/bin`` (a project tree). A set of libraries
is that of one backend; those of a GPU hold the CPU backend too, so they serve whoever asks for the CPU.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

from pyluce.native import callbacks, declare, llama, stamp
from pyluce.native.errors import LibraryMismatchError, NativeError

LIBRARY_DIR_VARIABLE = "LUCE_LIBRARY_DIR"
STAMP_SYMBOL = "ggml_luce_stamp"
GPU_BACKENDS = ("cuda", "hip")
EVERYWHERE = ("cpu", "rpc")
"""What every set of libraries has."""

_lock = threading.Lock()
_libraries: Libraries | None = None


@dataclass(frozen=True, slots=True)
class Libraries:
    """The loaded libraries: where they are, what they were built from. ``backend``: "cpu", or the GPU's beside it."""

    backend: str
    directory: Path
    stamp: str
    handles: dict[str, ctypes.CDLL]


def load_libraries(backend: str = "cpu", *, _check_stamp: bool = True) -> Libraries:
    """Load the native libraries once, check their stamp, bind every declared function and capture the native log.

    A process loads one set: later calls return the same object. Raises NativeError when the libraries are missing, cannot
    be loaded, lack a symbol or (already loaded) lack the backend; LibraryMismatchError when they were built from another
    source; all name the command that helps. ``_check_stamp`` is for this project's tests.
    """
    global _libraries
    if _libraries is None:
        with _lock:
            if _libraries is None:
                _libraries = _load("cpu" if backend in EVERYWHERE else backend, _check_stamp)
    if backend not in (*EVERYWHERE, _libraries.backend):
        raise NativeError(
            f"expected one set of libraries in a process: that of {_libraries.backend!r} is loaded from "
            f"{_libraries.directory}, {backend!r} was asked for; load it first in another process, or let "
            f"{LIBRARY_DIR_VARIABLE} name its folder"
        )
    return _libraries


def library_names(backend: str) -> list[str]:
    """The libraries of a backend, dependencies first."""
    device = [] if backend == "cpu" else [f"ggml-{backend}"]
    return ["ggml-base", "ggml-cpu", "ggml-rpc", *device, "ggml", "llama"]


def search_path(backend: str) -> list[Path]:
    """The directories where the libraries may be, in order."""
    named = os.environ.get(LIBRARY_DIR_VARIABLE)
    if named:
        return [Path(named)]
    root = stamp.project_root()
    installed = Path(__file__).resolve().parent / "lib" / backend
    return [installed] if root is None else [installed, root / "build" / backend / "bin"]


def find_directory(backend: str) -> Path:
    """The first directory of the search path that holds the backend's library. Raises NativeError with what was searched."""
    directories = search_path(backend)
    wanted = "ggml-base" if backend == "cpu" else f"ggml-{backend}"
    for directory in directories:
        if _file(directory, wanted).is_file():
            return directory
    raise NativeError(
        f"expected the native libraries ({_file(Path(), wanted).name} and others) for the backend {backend!r} in "
        f"{' or '.join(str(d) for d in directories)}; found none. Build them: {build_command(backend)}"
    )


def build_command(backend: str) -> str:
    """The command that builds the libraries of a backend."""
    return f"`python build.py --backend {backend}`"


def check_stamp(found: str | None, directory: Path, backend: str) -> None:
    """Raise LibraryMismatchError unless the library's stamp belongs to the project tree, or to the installed package.

    In a project tree the pin and the patches are hashed again; elsewhere the stamp must be the one that the build
    wrote beside the libraries.
    """
    if found is None:
        raise LibraryMismatchError(
            f"expected libraries with this project's patches in {directory}, found libraries without a stamp "
            f"(no {STAMP_SYMBOL}): they were built without the patches. Build them: {build_command(backend)}"
        )
    root = stamp.project_root()
    if root is not None:
        reason = stamp.mismatch(found, root)
    else:
        written = _written_stamp(directory)
        reason = None if written == found else f"expected {written!r} ({stamp.BUILD_INFO_NAME}), found {found!r}"
    if reason is not None:
        raise LibraryMismatchError(
            f"the libraries in {directory} were built from another source. {reason}. "
            f"Build them: {build_command(backend)}"
        )


def _load(backend: str, check: bool) -> Libraries:
    directory = find_directory(backend)
    if backend == "cpu":
        backend = next((name for name in GPU_BACKENDS if _file(directory, f"ggml-{name}").is_file()), "cpu")
    handles = {"ggml-base": _open(directory, "ggml-base", backend)}
    found = _read_stamp(handles["ggml-base"])
    if check:
        check_stamp(found, directory, backend)
    for name in library_names(backend)[1:]:
        handles[name] = _open(directory, name, backend)
    declare.bind(handles)
    callbacks.install()
    llama.llama_backend_init()
    return Libraries(backend, directory, found or "", handles)


def _written_stamp(directory: Path) -> str | None:
    try:
        info = json.loads((directory / stamp.BUILD_INFO_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    written = info.get("stamp") if isinstance(info, dict) else None
    return written if isinstance(written, str) else None


def _file(directory: Path, name: str) -> Path:
    return directory / (f"lib{name}.dylib" if sys.platform == "darwin" else f"lib{name}.so")


def _open(directory: Path, name: str, backend: str) -> ctypes.CDLL:
    path = _file(directory, name)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeError(f"cannot load {path}: {error}. Build it again: {build_command(backend)}") from error


def _read_stamp(base: ctypes.CDLL) -> str | None:
    try:
        read = getattr(base, STAMP_SYMBOL)
    except AttributeError:
        return None
    read.argtypes = []
    read.restype = ctypes.c_char_p
    value = read()
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else None
