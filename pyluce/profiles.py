"""Profiles: the flags that suit a machine, under a name. One TOML file each, in `profiles/` or in a folder of the user's.

# For whom it is: the first lines, as a comment.
[flags]            # names of flags of `luce run`, with underscores
device = "hip:0"
[[devices]]        # what devices have, for plans on machines that lack them
name = "hip:0"
architecture = "gfx1201"
memory = "discrete"   # or "unified", "cpu"
gib = 32
[host]             # the host's memory; without it, that of a unified device
gib = 64
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

from pyluce.engine.sampling import SamplingParams
from pyluce.memory.machine import DeviceMemory, MemoryKind
from pyluce.options import LoadOptions

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PROFILE_DIR_VARIABLE: Final = "LUCE_PROFILE_DIR"
SERVER_FLAGS: Final = (
    "host", "port", "model_name", "cors_origin", "max_body_mib", "default_max_tokens", "shutdown_grace",
)  # fmt: skip
_NOT_IN_PROFILES: Final = {"chat_template", "collect_routing", "logit_bias"}
FLAGS: Final = frozenset(
    {"model", "chat_template_file", *SERVER_FLAGS}
    | {f.name for f in fields(LoadOptions) if f.name not in _NOT_IN_PROFILES}
    | {f.name for f in fields(SamplingParams) if f.name not in _NOT_IN_PROFILES}
)
"""What `[flags]` may name: parameters of `luce run`, apart from those of one prompt, and the key, which belongs into no file."""


class ProfileError(ValueError):
    """A profile cannot be used; the message names file, line and what was expected."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A value of `[flags]`, and its line in the file."""

    value: Any
    line: int


@dataclass(frozen=True, slots=True)
class Profile:
    """A profile as it was read. `summary` is its comment; `host_bytes` None: it does not say."""

    name: str
    path: Path
    text: str
    summary: str
    settings: Mapping[str, Setting]
    devices: tuple[DeviceMemory, ...]
    host_bytes: int | None

    def device(self, name: str) -> DeviceMemory | None:
        """What the profile says of a device's memory."""
        return next((d for d in self.devices if d.name == name), None)

    def where(self, flag: str) -> str:
        """The place of a setting, for messages."""
        return f"{self.path}, line {self.settings[flag].line}"


def shipped_dir() -> Path:
    """The folder of the profiles that belong to luce: in the installed package, or in the project tree."""
    package = Path(__file__).resolve().parent
    installed = package / "data" / "profiles"
    return installed if installed.is_dir() else package.parent / "profiles"


def user_dir() -> Path:
    """The folder of the user's own: $LUCE_PROFILE_DIR, else luce/profiles in the XDG configuration folder."""
    named = os.environ.get(PROFILE_DIR_VARIABLE)
    if named:
        return Path(named)
    base = os.environ.get("XDG_CONFIG_HOME")
    return (Path(base) if base else Path.home() / ".config") / "luce" / "profiles"


def profile_paths() -> dict[str, Path]:
    """Every profile's file by its name, sorted; one of the user's goes before a shipped one of the same name."""
    found: dict[str, Path] = {}
    for folder in (shipped_dir(), user_dir()):
        if folder.is_dir():
            found.update({path.stem: path for path in folder.glob("*.toml")})
    return dict(sorted(found.items()))


def load_profile(name: str) -> Profile:
    """The profile of that name. Raises ProfileError naming those that there are, or what is wrong in its file."""
    known = profile_paths()
    if name not in known:
        raise ProfileError(f"profile: expected one of {', '.join(known) or 'none, as there are none'}, found {name!r}")
    try:
        text = known[name].read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ProfileError(f"{known[name]}: expected a TOML file, found one that cannot be read: {error}") from error
    return parse_profile(name, known[name], text)


def parse_profile(name: str, path: Path, text: str) -> Profile:
    """The profile that a TOML text describes. Raises ProfileError."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ProfileError(f"{path}: expected TOML, found: {error}") from error
    _known(path, text, None, document, ("flags", "devices", "host"))
    flags = _table(path, text, document, "flags")
    _known(path, text, "flags", flags, FLAGS)
    devices = document.get("devices", [])
    if not isinstance(devices, list) or not all(isinstance(d, dict) for d in devices):
        raise ProfileError(f"{path}: expected [[devices]] to be tables, found {devices!r}")
    host = _table(path, text, document, "host")
    _known(path, text, "host", host, ("gib",))
    known_devices = tuple(_device(path, text, index, table) for index, table in enumerate(devices))
    unified = next((d.free_bytes for d in known_devices if d.kind is MemoryKind.UNIFIED), None)
    where = f"{path}, line {_line(text, 'host', 'gib')}"
    return Profile(
        name=name,
        path=path,
        text=text,
        summary=_summary(text),
        settings={key: Setting(value, _line(text, "flags", key)) for key, value in flags.items()},
        devices=known_devices,
        host_bytes=_gib(where, host["gib"]) if "gib" in host else unified,
    )


def _table(path: Path, text: str, document: dict[str, Any], name: str) -> dict[str, Any]:
    found = document.get(name, {})
    if not isinstance(found, dict):
        raise ProfileError(f"{path}, line {_line(text, None, name)}: expected the table [{name}], found {found!r}")
    return found


def _device(path: Path, text: str, index: int, table: dict[str, Any]) -> DeviceMemory:
    _known(path, text, "devices", table, ("name", "architecture", "memory", "gib"), index)
    where = f"{path}, [[devices]] {index + 1}"
    missing = [key for key in ("name", "memory", "gib") if key not in table]
    if missing:
        raise ProfileError(f"{where}: expected name, memory and gib, found no {missing[0]}")
    kinds = [kind.value for kind in MemoryKind]
    if table["memory"] not in kinds:
        line = _line(text, "devices", "memory", index)
        raise ProfileError(f"{path}, line {line}: memory: expected {', '.join(kinds)}, found {table['memory']!r}")
    gib = _gib(f"{path}, line {_line(text, 'devices', 'gib', index)}", table["gib"])
    return DeviceMemory(str(table["name"]), MemoryKind(table["memory"]), gib, table.get("architecture"))


def _gib(where: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1 << 20:
        raise ProfileError(f"{where}: gib: expected a positive number, found {value!r}")
    return int(value * 2**30)


def _known(path: Path, text: str, section: str | None, table: Mapping[str, Any], known: Any, index: int = 0) -> None:
    for key in table:
        if key not in known:
            where = f"{path}, line {_line(text, section, key, index)}"
            inside = f" in [{section}]" if section else ""
            raise ProfileError(f"{where}: expected{inside} one of {', '.join(sorted(known))}, found {key!r}")


def _line(text: str, section: str | None, key: str, index: int = 0) -> int:
    """The line of a key in the `index`-th table of that name (None: of a table or key at the top); 1 where it is not found."""
    current: str | None = None
    seen: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        header = re.match(r"\s*\[\[?\s*([\w-]+)", line)
        if header is not None:
            current = header[1]
            seen[current] = seen.get(current, -1) + 1
            if section is None and current == key:
                return number
        elif current == section and (section is None or seen[section] == index):
            if re.match(rf"\s*\"?{re.escape(key)}\"?\s*=", line):
                return number
    return 1


def _summary(text: str) -> str:
    """The comment that a file begins with."""
    lines = []
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.lstrip("# ").rstrip())
    return " ".join(lines)
