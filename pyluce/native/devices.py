"""What devices the loaded libraries see, as plain data, and finding one by the name that a user gives.

A device is called "cpu", "cuda:N" or "hip:N"; N counts the backend's devices from 0. "rpc:HOST:PORT" is the device that
`luce rpc-server` serves there.
"""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass, replace
from typing import Final

from pyluce.native import ggml_backend as api
from pyluce.native import log, rpc
from pyluce.native.errors import NativeError
from pyluce.native.ggml_backend import BackendDevType
from pyluce.native.library import GPU_BACKENDS, build_command, load_libraries
from pyluce.native.structs import ggml_backend_dev_props, ggml_backend_feature

_REGISTRIES: Final = {"cuda": b"CUDA", "hip": b"ROCm"}
_NAME: Final = re.compile(rf"({'|'.join(GPU_BACKENDS)}):(\d{{1,3}})")
_REMOTE: Final = re.compile(r"rpc:([A-Za-z0-9._-]+:(\d{1,5}))")
NAMES: Final = f"cpu, {', '.join(f'{backend}:N' for backend in GPU_BACKENDS)} or rpc:HOST:PORT"
_LOGGED: Final = r"Device {index}: .*?, (compute capability [\d.]+|gfx\w+)"


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """One device. ``name`` is ggml's, ``device`` ours (None: not one that models run on); memory in bytes; ``device_id`` is the
    PCI bus id, ``architecture`` what the GPU's code was compiled for, where there is one.
    """

    name: str
    description: str
    kind: BackendDevType
    memory_free_bytes: int
    memory_total_bytes: int
    device_id: str | None
    from_host_pointer: bool
    device: str | None = None
    architecture: str | None = None


def parse_device(name: str) -> tuple[str, int]:
    """`cuda:1` is ("cuda", 1), `cpu` is ("cpu", 0), `rpc:HOST:PORT` is ("rpc", 0). ValueError for what is no device's name."""
    if name == "cpu":
        return "cpu", 0
    remote = _REMOTE.fullmatch(name)
    if remote is not None and 0 < int(remote[2]) < 1 << 16:
        return "rpc", 0
    found = _NAME.fullmatch(name)
    if found is None:
        raise ValueError(f"expected {NAMES}, found {name!r}")
    return found[1], int(found[2])


def find_device(name: str) -> int:
    """The ``ggml_backend_dev_t`` of a device's name; loads the libraries that it needs.

    Raises ValueError for what is no device's name, NativeError when there is no such device or library, naming what there is.
    """
    backend, index = parse_device(name)
    load_libraries(backend)
    if backend == "rpc":
        return rpc.find_remote(name.removeprefix("rpc:"))
    if backend == "cpu":
        device = api.ggml_backend_dev_by_type(BackendDevType.CPU)
        if not device:
            raise NativeError("expected a CPU device, found none", log.take())
        return device
    registry = api.ggml_backend_reg_by_name(_REGISTRIES[backend])
    count = api.ggml_backend_reg_dev_count(registry) if registry else 0
    if not registry or index >= count:
        there = ", ".join(info.device for info in list_devices() if info.device) or "none"
        hint = "" if count else f"; is the driver there? The libraries come from {build_command(backend)}"
        raise NativeError(f"expected the device {name}, found {there}{hint}", log.take())
    return api.ggml_backend_reg_dev_get(registry, index)


def device_memory(name: str) -> tuple[int, int]:
    """(free, total) bytes of a device's memory. Errors as of ``find_device``."""
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    api.ggml_backend_dev_memory(find_device(name), ctypes.byref(free), ctypes.byref(total))
    return free.value, total.value


def list_devices() -> list[DeviceInfo]:
    """Every device of this machine, in ggml's order."""
    load_libraries()
    return [_describe(api.ggml_backend_dev_get(index)) for index in range(api.ggml_backend_dev_count())]


def describe_remote(name: str) -> DeviceInfo:
    """A device `rpc:HOST:PORT`. Errors as of ``find_device``."""
    endpoint = name.removeprefix("rpc:")
    info = rpc.connect(endpoint)
    described = _describe(rpc.find_remote(endpoint))
    return replace(described, device=name, description=info.description)


def cpu_features() -> dict[str, str]:
    """The instruction sets and build options that the CPU backend uses, by ggml's names."""
    load_libraries()
    registry = api.ggml_backend_cpu_reg()
    address = api.ggml_backend_reg_get_proc_address(registry, b"ggml_backend_get_features") if registry else None
    if not address:
        return {}
    get_features = ctypes.CFUNCTYPE(ctypes.POINTER(ggml_backend_feature), ctypes.c_void_p)(address)
    features = get_features(registry)
    found: dict[str, str] = {}
    index = 0
    while features and features[index].name:
        found[_text(features[index].name)] = _text(features[index].value)
        index += 1
    return found


def _describe(device: int | None) -> DeviceInfo:
    props = ggml_backend_dev_props()
    if device:
        api.ggml_backend_dev_get_props(device, ctypes.byref(props))
    name = _device_name(device, BackendDevType(props.type))
    return DeviceInfo(
        name=_text(props.name),
        description=_text(props.description),
        kind=BackendDevType(props.type),
        memory_free_bytes=props.memory_free,
        memory_total_bytes=props.memory_total,
        device_id=_text(props.device_id) if props.device_id else None,
        from_host_pointer=bool(props.caps.buffer_from_host_ptr),
        device=name,
        architecture=_architecture(name) if name else None,
    )


def _device_name(device: int | None, kind: BackendDevType) -> str | None:
    """Our name of a device; None for one of another backend (BLAS)."""
    if not device:
        return None
    if kind is BackendDevType.CPU:
        return "cpu"
    registry = api.ggml_backend_dev_backend_reg(device)
    backend = next((b for b, name in _REGISTRIES.items() if api.ggml_backend_reg_name(registry) == name), None)
    if backend is None:
        return None
    devices = [api.ggml_backend_reg_dev_get(registry, i) for i in range(api.ggml_backend_reg_dev_count(registry))]
    return f"{backend}:{devices.index(device)}"


def _architecture(name: str) -> str | None:
    """What ggml logged of a GPU when it found it: its interface has no function for this."""
    backend, index = parse_device(name)
    if backend == "cpu":
        return None
    lines = (re.search(_LOGGED.format(index=index), line) for line in log.tail(log.RING_LINES))
    return next((found[1] for found in lines if found), None)


def _text(raw: bytes | None) -> str:
    return (raw or b"").decode("utf-8", "replace")
