"""Profiles: machines that are known by name, one TOML file each in this folder."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib import resources
from typing import Any

from pyluce.memory.machine import DeviceMemory, Machine, MemoryKind

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@dataclass(frozen=True, slots=True)
class Profile:
    """A machine and the flags that suit it; `max_ctx` None: not part of the profile."""

    name: str
    machine: Machine
    max_ctx: int | None


def profile_names() -> list[str]:
    """The names that `load_profile` knows."""
    return sorted(
        item.name.removesuffix(".toml") for item in resources.files(__name__).iterdir() if _is_profile(item.name)
    )


def load_profile(name: str) -> Profile:
    """The profile of that name. Raises ValueError naming those that there are, or what is wrong in its file."""
    if name not in profile_names():
        raise ValueError(f"profile: expected one of {', '.join(profile_names())}, found {name!r}")
    text = (resources.files(__name__) / f"{name}.toml").read_text(encoding="utf-8")
    return parse_profile(name, text)


def parse_profile(name: str, text: str) -> Profile:
    """The profile that a TOML text describes. Raises ValueError."""
    try:
        document = tomllib.loads(text)
        flags = _only(document.pop("flags"), "device", "expert_device", "max_ctx", "hot_experts_mib")
        devices = {device.name: device for device in map(_device, document.pop("devices"))}
        _only(document)
        target = devices[flags["device"]]
        expert = devices[flags["expert_device"]] if "expert_device" in flags else None
        host = next((d.free_bytes for d in devices.values() if d.kind is MemoryKind.UNIFIED), None)
        if host is None:
            raise ValueError("expected a device with unified memory, which says how much the host has, found none")
        machine = Machine(target, host, expert, flags.get("hot_experts_mib", 0) << 20)
        return Profile(name, machine, flags.get("max_ctx"))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{name}.toml: {error if not isinstance(error, KeyError) else f'{error} is missing'}"
        ) from error


def _device(table: dict[str, Any]) -> DeviceMemory:
    _only(table, "name", "architecture", "memory", "gib")
    return DeviceMemory(table["name"], MemoryKind(table["memory"]), table["gib"] << 30, table["architecture"])


def _only(table: dict[str, Any], *known: str) -> dict[str, Any]:
    unknown = sorted(set(table) - set(known))
    if unknown:
        raise ValueError(f"expected only {', '.join(known) or 'flags and devices'}, found {', '.join(unknown)}")
    return table


def _is_profile(name: str) -> bool:
    return name.endswith(".toml")
