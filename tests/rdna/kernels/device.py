"""The fake runtime from Python: every launch that ggml-hip makes, recorded, and executed where a test asks for it."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Final

from tests.rdna.codeobject import CodeObject
from tests.rdna.dispatch import run
from tests.rdna.errors import RdnaError
from tests.rdna.memory import Memory
from tests.rdna.stats import Stats

ROOT = Path(__file__).resolve().parents[3]
LIBRARIES = ROOT / "build" / "fakehip" / "bin"
ARCHS = tuple(os.environ.get("FAKEHIP_ARCHS", "gfx1151,gfx1201").split(","))


class _Launch(ctypes.Structure):
    _fields_ = [
        ("device", ctypes.c_int32),
        ("captured", ctypes.c_int32),
        ("token", ctypes.c_int64),
        ("kernel", ctypes.c_char_p),
        ("code", ctypes.c_void_p),
        ("code_size", ctypes.c_uint64),
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("shared", ctypes.c_uint64),
        ("args", ctypes.POINTER(ctypes.c_void_p)),
    ]


class _Range(ctypes.Structure):
    _fields_ = [("address", ctypes.c_uint64), ("size", ctypes.c_uint64)]


STUB_BYTES: Final = 32  # our smallest kernel has several times as many; `s_endpgm` alone has 4
_NO_MEMORY_OF_THE_HOST: Final = 0x1000_0000_0000  # where code objects are put: below everything that Linux maps
_TAKE = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.POINTER(_Launch))


@dataclass
class Launch:
    """One launch: `kernel` mangled, `name` as written in the source, grid in blocks. `stats` after it was executed."""

    arch: str
    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared: int
    code: CodeObject = field(repr=False)
    args: list[bytes] = field(default_factory=list, repr=False)
    stats: Stats | None = None

    @property
    def name(self) -> str:
        """The demangled name without its return type and parameters."""
        return demangle(self.kernel)


@cache
def demangle(name: str) -> str:
    """`luce_mmv_kernel<(ggml_type)8, 1>` of a mangled name."""
    text = subprocess.run(["c++filt", name], capture_output=True, text=True, check=True).stdout.strip()
    text = text.replace("(anonymous namespace)::", "").removeprefix("void ")
    depth = 0
    for i, c in enumerate(text):
        depth += (c in "<") - (c == ">")
        if c == "(" and depth == 0:
            return text[:i]
    return text


class FakeDevice:
    """Takes the launches of this process while it is open. One at a time."""

    def __init__(self, execute: Callable[[Launch], Any] | None = None) -> None:
        self.execute = execute
        self.launches: list[Launch] = []
        self.error: BaseException | None = None
        self._runtime = runtime()
        self._captured: list[Launch] = []
        self._take = _TAKE(self._on_launch)

    def __enter__(self) -> FakeDevice:
        self._runtime.fakehip_on_launch(self._take)
        return self

    def __exit__(self, *_: object) -> None:
        self._runtime.fakehip_on_launch(_REFUSE)

    def check(self) -> None:
        """Raise what a launch raised: an exception cannot pass through the C++ code that launched."""
        if self.error is not None:
            error, self.error = self.error, None
            raise error

    def _on_launch(self, pointer: Any) -> int:
        try:
            raw = pointer.contents
            if raw.captured == 1:
                self._captured.append(_read(raw))
                return len(self._captured) - 1
            launch = replace(self._captured[raw.token]) if raw.captured == 2 else _read(raw)
            self.launches.append(launch)
            if self.execute is not None and self.error is None:
                launch.stats = self.execute(launch)
        except BaseException as error:  # noqa: BLE001
            self.error = self.error or error
        return 0


def _refuse(_: Any) -> int:
    return -1


_REFUSE = _TAKE(_refuse)


class StubError(RdnaError):
    """The host launches a kernel that the device's code object does not have."""


@lru_cache(maxsize=1)
def runtime() -> ctypes.CDLL:
    """The fake runtime, which ggml-hip has loaded."""
    library = ctypes.CDLL(str(LIBRARIES / "libamdhip64.so"))
    library.fakehip_on_launch.argtypes = [_TAKE]
    library.fakehip_on_launch.restype = None
    library.fakehip_generation.argtypes = []
    library.fakehip_generation.restype = ctypes.c_uint64
    library.fakehip_ranges.argtypes = [ctypes.POINTER(_Range), ctypes.c_uint64]
    library.fakehip_ranges.restype = ctypes.c_uint64
    return library


@cache
def code_object(address: int, size: int) -> CodeObject:
    """The code object that lies in the loaded library."""
    return CodeObject(ctypes.string_at(address, size), f"code at {address:#x}")


def check_code(code: CodeObject, kernel: str, arch: str) -> None:
    """StubError unless the code object has the kernel, and code for it."""
    if kernel not in code.kernels:
        raise StubError(f"{demangle(kernel)}: launched, but the code object for {arch} has no kernel of that name")
    length = code.kernels[kernel].end - code.kernels[kernel].descriptor.entry
    if length < STUB_BYTES:
        raise StubError(f"{demangle(kernel)}: launched, but on {arch} it is {length} bytes of code, so does nothing")


class HostMemory:
    """What the fake runtime has allocated, as the interpreter's memory; kept in step from launch to launch."""

    def __init__(self) -> None:
        self.memory = Memory()
        self.memory.next = _NO_MEMORY_OF_THE_HOST
        self._mapped: dict[int, int] = {}
        self._generation = -1

    def refresh(self) -> Memory:
        """Map what is new, forget what was freed."""
        library = runtime()
        generation = library.fakehip_generation()
        if generation == self._generation:
            return self.memory
        self._generation = generation
        count = library.fakehip_ranges((_Range * 0)(), 0)
        ranges = (_Range * count)()
        library.fakehip_ranges(ranges, count)
        now = {item.address: item.size for item in ranges if item.size}
        for address, size in list(self._mapped.items()):
            if now.get(address) != size:
                self.memory.free(address)
                del self._mapped[address]
        for address, size in now.items():
            if address not in self._mapped:
                self.memory.map(address, size)
                self._mapped[address] = size
        return self.memory


class Interpreter:
    """Executes launches: `FakeDevice(Interpreter())`. `races`: look for races too, at about twice the time."""

    def __init__(self, races: bool = True) -> None:
        self.memory = HostMemory()
        self.races = races

    def __call__(self, launch: Launch) -> Stats:
        memory = self.memory.refresh()
        before = set(memory.starts)
        kernel = launch.code.kernels[launch.kernel]
        try:
            return run(kernel, memory, launch.grid, launch.block, launch.args, launch.shared, races=self.races)
        finally:
            codes = {start for start, _ in memory.codes.values()}
            for address in set(memory.starts) - before - codes:  # the arguments of this launch
                memory.free(address)


def _read(raw: Any) -> Launch:
    code = code_object(raw.code, raw.code_size)
    name = raw.kernel.decode()
    launch = Launch(ARCHS[raw.device], name, tuple(raw.grid), tuple(raw.block), raw.shared, code)
    check_code(code, name, launch.arch)
    shown = [argument for argument in code.kernels[name].arguments if not argument.hidden]
    launch.args = [ctypes.string_at(raw.args[i], argument.size) for i, argument in enumerate(shown)]
    return launch
