"""`luce doctor`: what was built, which devices exist, what is missing and the command that gets it."""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from pyluce import __version__
from pyluce.native import stamp
from pyluce.native.devices import parse_device
from pyluce.native.errors import NativeError
from pyluce.native.library import build_command, find_directory
from pyluce.options import DEFAULT_MODEL, available_cpus

BACKENDS = ("cpu", "cuda", "hip")
PROBE_SECONDS = 60
GIB = 1 << 30

# what building a backend needs besides Python: the programs, any one of which will do, and how to get one
_TOOLS = {
    "cpu": (("c++", "g++", "clang++"), "a C++ compiler (Debian and Ubuntu: `apt install g++`)"),
    "cuda": (("nvcc",), "nvcc of NVIDIA's CUDA toolkit, on PATH or given with --cuda-toolkit"),
    "hip": (("hipcc", "amdclang++"), "hipcc of AMD's ROCm, on PATH or given with --rocm"),
}
_NEEDED_FOR = {"cuda": " (for NVIDIA GPUs only)", "hip": " (for AMD GPUs only)"}


@dataclass(frozen=True, slots=True)
class BackendState:
    """One backend: `built` with the probe's `result`, or not, and why. `lacks` says what a build would need first."""

    name: str
    built: bool
    error: str | None = None
    result: dict[str, Any] = field(default_factory=dict)
    lacks: str | None = None

    @property
    def usable(self) -> bool:
        """Its libraries load and see a device."""
        return self.built and self.error is None and bool(self.result.get("devices"))


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option(
    "--selftest", "with_selftest", is_flag=True, help="Run every op on a device against float64; exit 1 on a failure."
)
@click.option("--device", metavar="cpu|cuda:N|hip:N", help="Where --selftest runs.  [default: cpu]")
@click.option("--quick", is_flag=True, help="With --selftest: small sizes only, without the real model's.")
@click.option(
    "--rpc",
    "servers",
    multiple=True,
    metavar="HOST:PORT",
    help="Ask a `luce rpc-server` for its device, too; repeatable.",
)
def doctor(as_json: bool, with_selftest: bool, device: str | None, quick: bool, servers: tuple[str, ...]) -> int:
    """Say what was built, which devices exist and what is missing. Exits with 1 when no model can be run."""
    for server in servers:
        try:
            parse_device(f"rpc:{server}")
        except ValueError:
            raise click.UsageError(f"--rpc: expected HOST:PORT, found {server!r}") from None
    if with_selftest:
        if servers:
            raise click.UsageError("--rpc: expected without --selftest")
        from cli.selftest import selftest

        return selftest(device or "cpu", as_json, quick)
    if device is not None or quick:
        raise click.UsageError(f"{'--device' if device is not None else '--quick'}: expected --selftest with it")
    states = [examine(name) for name in BACKENDS] + [examine_server(server) for server in servers]
    model = DEFAULT_MODEL if DEFAULT_MODEL.is_file() else None
    if as_json:
        click.echo(json.dumps(as_document(states, model)))
    else:
        show(states, model)
    return 0 if any(state.usable and state.name in BACKENDS for state in states) else 1


def examine_server(server: str) -> BackendState:
    """Ask a server for its device."""
    try:
        find_directory("cpu")
    except NativeError:
        return BackendState(f"rpc:{server}", True, "it cannot be asked without the CPU libraries")
    return _probe(f"rpc:{server}", None)


def examine(name: str) -> BackendState:
    """Look for a backend's libraries, and let them look for devices in a process of their own."""
    programs, description = _TOOLS[name]
    lacks = None if any(shutil.which(program) for program in programs) else description
    try:
        find_directory(name)
    except NativeError:
        return BackendState(name, built=False, lacks=lacks)
    return _probe(name, lacks)


def _probe(name: str, lacks: str | None) -> BackendState:
    command = [sys.executable, "-m", "cli.probe", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_SECONDS, check=False)
        result = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        return BackendState(name, True, f"its libraries did not answer within {PROBE_SECONDS} s", lacks=lacks)
    except ValueError:
        tail = "\n".join(done.stderr.strip().splitlines()[-5:])
        return BackendState(
            name, True, f"loading its libraries ended with status {done.returncode}: {tail}", lacks=lacks
        )
    return BackendState(name, True, result.get("error"), result, lacks)


def as_document(states: list[BackendState], model: Path | None) -> dict[str, Any]:
    """What `--json` prints."""
    return {
        "version": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": available_cpus(),
        "default_model": str(model) if model else None,
        "backends": {
            state.name: {"built": state.built, "usable": state.usable, "error": state.error, **state.result}
            for state in states
        },
        "missing": missing(states, model),
    }


def missing(states: list[BackendState], model: Path | None) -> list[str]:
    """What is missing, each with the command or the action that helps."""
    from_tree = stamp.project_root() is not None
    notes = []
    for state in states:
        if state.built and state.error is not None:
            notes.append(f"{state.name}: {state.error}")
        elif state.built and not state.usable:
            notes.append(f"{state.name}: the libraries are built, but they see no device")
        elif not state.built:
            first = f"install {state.lacks}, then " if state.lacks else ""
            how = (
                build_command(state.name) if from_tree else "build it in a source tree and point LUCE_LIBRARY_DIR there"
            )
            if state.name == "cpu" and not from_tree:
                how = "install the package again: `pip install --force-reinstall pyluce`"
            notes.append(f"{state.name}{_NEEDED_FOR.get(state.name, '')}: not built: {first}{how}")
    if model is None:
        notes.append(f"luce-tiny: expected {DEFAULT_MODEL}; without it every command needs a MODEL")
    return notes


def show(states: list[BackendState], model: Path | None) -> None:
    """Print everything; tables on a terminal, lines in a pipe."""
    console = Console(highlight=False)
    click.echo(
        f"luce {__version__}, Python {platform.python_version()}, {platform.system()} {platform.machine()}, {available_cpus()} CPUs"
    )
    for state in states:
        if state.result.get("stamp"):
            parts = stamp.parse_stamp(state.result["stamp"])
            click.echo(f"{state.name}: {state.result['directory']}")
            for name in stamp.STAMP_PARTS:
                click.echo(f"  {name}: {parts.get(name, 'unknown')}")
            features = [name for name, value in state.result["cpu_features"].items() if value == "1"]
            click.echo(f"  CPU features: {', '.join(features) or 'none reported'}")
    rows = [
        (
            f"{device.get('device') or device['name']}{f' ({state.name})' if state.name in BACKENDS else ''}",
            device["description"],
            device.get("architecture") or "-",
            device["kind"],
            f"{device['memory_free_bytes'] / GIB:.1f} of {device['memory_total_bytes'] / GIB:.1f} GiB free",
        )
        for state in states
        for device in state.result.get("devices", [])
    ]
    if console.is_terminal and rows:
        table = Table("device", "description", "architecture", "kind", "memory")
        for row in rows:
            table.add_row(*row)
        console.print(table)
    else:
        for row in rows:
            click.echo("device: " + ", ".join(part for part in row if part != "-"))
    click.echo(f"default model: {f'{model}, {model.stat().st_size / (1 << 20):.1f} MiB' if model else 'missing'}")
    for note in missing(states, model):
        click.echo(f"missing: {note}")
