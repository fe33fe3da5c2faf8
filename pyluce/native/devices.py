"""What devices the loaded libraries see, as plain data."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from pyluce.native import ggml_backend as api
from pyluce.native.ggml_backend import BackendDevType
from pyluce.native.library import load_libraries
from pyluce.native.structs import ggml_backend_dev_props, ggml_backend_feature


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """One device. ``name`` is ggml's; memory in bytes; ``device_id`` is the PCI bus id where there is one."""

    name: str
    description: str
    kind: BackendDevType
    memory_free_bytes: int
    memory_total_bytes: int
    device_id: str | None
    from_host_pointer: bool


def list_devices() -> list[DeviceInfo]:
    """Every device, in ggml's order."""
    load_libraries()
    return [_describe(api.ggml_backend_dev_get(index)) for index in range(api.ggml_backend_dev_count())]


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
    return DeviceInfo(
        name=_text(props.name),
        description=_text(props.description),
        kind=BackendDevType(props.type),
        memory_free_bytes=props.memory_free,
        memory_total_bytes=props.memory_total,
        device_id=_text(props.device_id) if props.device_id else None,
        from_host_pointer=bool(props.caps.buffer_from_host_ptr),
    )


def _text(raw: bytes | None) -> str:
    return (raw or b"").decode("utf-8", "replace")
