#!/usr/bin/env python3
"""Everything that is checked and measured on a GPU, in one command that can be cut into parts.

    python -m bench.device_suite --json build/bench/device.json                    # all parts
    python -m bench.device_suite --json build/bench/device.json --only ops,exact   # some; the others keep their earlier results

Parts: `ops` (the self-test), `exact` (the tests of graphs, exactness and snapshots on the device), `tiny` (luce-tiny beside the
CPU), `decode`, `prefill`, `batch` (speed on a random model of the real widths, beside upstream's libllama of the same build with
flash attention, in processes of their own). Every part has a time limit and keeps what it measured before that.
Exit code 1 when a check failed or a part ended early; speed is reported, not judged.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SPEED_PARTS = ("decode", "prefill", "batch")
SIDES = ("ours", "upstream")
END_S = 20
TESTS = ("tests/graph", "tests/exactness", "tests/state/test_snapshot.py")
SERVING_TESTS = ("tests/serving/test_exact_slots.py", "tests/serving/test_prefix_cache.py")
"""These need the package llguidance, as the engine does."""


@dataclass(frozen=True)
class Setting:
    """How to run. Times in seconds."""

    device: str
    model: Path
    layers: int
    limit_s: int
    repetitions: int
    sides: tuple[str, ...]
    chunks: dict[str, list[int]]
    divide: int
    workers: int
    library_dir: Path

    def environment(self) -> dict[str, str]:
        """For every process: the libraries of the device, the project importable."""
        return os.environ | {
            "LUCE_LIBRARY_DIR": str(self.library_dir),
            "LUCE_TEST_DEVICE": self.device,
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
            "PYTHONUNBUFFERED": "1",
        }


@dataclass
class Outcome:
    """A part's result. `ok` None: speed, which is not judged."""

    ok: bool | None
    seconds: float
    values: Any


def run(setting: Setting, command: list[str], limit_s: float) -> int | None:
    """Run a command with its output shown; its exit code, or None when it was stopped at the limit."""
    print("  $ " + " ".join(command), flush=True)
    process = subprocess.Popen(command, cwd=ROOT, env=setting.environment())
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        print(f"  stopped after {limit_s:.0f} s", flush=True)
        process.send_signal(signal.SIGINT)  # so that tests report what they have
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    return None


def with_record(setting: Setting, module: str, arguments: list[str], limit_s: float) -> tuple[int | None, Any]:
    """Run a module that writes `--record FILE`; its exit code and what it wrote."""
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "record.json"
        code = run(setting, [sys.executable, "-m", module, *arguments, "--record", str(record)], limit_s)
        return code, json.loads(record.read_text()) if record.is_file() else {}


def ops(setting: Setting) -> Outcome:
    """The self-test."""
    started = time.monotonic()
    code, values = with_record(setting, "bench.device_ops", ["--device", setting.device], setting.limit_s)
    return Outcome(code == 0, time.monotonic() - started, values)


def exact(setting: Setting) -> Outcome:
    """The tests, on several processes where pytest-xdist is installed."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        tests = [*TESTS, *SERVING_TESTS] if find_spec("llguidance") else [*TESTS]
        if len(tests) == len(TESTS):
            print("  without the tests of serving: expected the package llguidance, found none", flush=True)
        command = [sys.executable, "-m", "pytest", *tests, "-q", "--tb=short", f"--junitxml={report}"]
        if find_spec("xdist") and setting.workers > 1:
            command += ["-n", str(setting.workers)]
        code = run(setting, command, setting.limit_s)
        values = test_counts(report) if report.is_file() else {}
    return Outcome(code == 0, time.monotonic() - started, values)


def test_counts(report: Path) -> dict[str, Any]:
    """Passed, failed and skipped, with the names of what failed."""
    cases = list(ET.parse(report).getroot().iter("testcase"))
    failed = [c for c in cases if c.find("failure") is not None or c.find("error") is not None]
    skipped = sum(c.find("skipped") is not None for c in cases)
    names = [f"{c.get('classname')}::{c.get('name')}" for c in failed]
    return {"passed": len(cases) - len(failed) - skipped, "failed": names, "skipped": skipped}


def tiny(setting: Setting) -> Outcome:
    """luce-tiny on the device and on the CPU."""
    started = time.monotonic()
    code, values = with_record(setting, "bench.device_tiny", ["--device", setting.device], setting.limit_s)
    same = code == 0 and all(row["same_tokens"] for row in values["prompts"])
    return Outcome(same, time.monotonic() - started, values)


def speed(part: str) -> Callable[[Setting], Outcome]:
    """One speed part, both sides directly after each other."""

    def measure(setting: Setting) -> Outcome:
        started = time.monotonic()
        write_model(setting)
        values: dict[str, Any] = {}
        ended = True
        for side in setting.sides:
            arguments = [part, side, "--model", str(setting.model), "--device", setting.device]
            arguments += ["--repetitions", str(setting.repetitions), "--divide", str(setting.divide)]
            for chunk in setting.chunks[side] if part == "prefill" else setting.chunks[side][:1]:
                arguments += ["--chunk", str(chunk)]
            left = setting.limit_s - (time.monotonic() - started)
            code, values[side] = with_record(setting, "bench.device_worker", arguments, max(left, 1))
            ended = ended and code == 0
        return Outcome(None if ended else False, time.monotonic() - started, values)

    return measure


def write_model(setting: Setting) -> None:
    """Write the random model, unless it is there."""
    if setting.model.is_file():
        return
    unfinished = setting.model.with_suffix(".part")
    command = [
        sys.executable,
        "tools/synth_gguf.py",
        str(unfinished),
        "--preset",
        "full",
        "--layers",
        str(setting.layers),
    ]
    if run(setting, command, 600) != 0:
        raise SystemExit(f"expected a model at {setting.model}: writing it failed")
    unfinished.replace(setting.model)


PARTS: dict[str, Callable[[Setting], Outcome]] = {
    "ops": ops,
    "exact": exact,
    "tiny": tiny,
    **{part: speed(part) for part in SPEED_PARTS},
}


def main() -> int:
    """Run the parts, write the record after each, print the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=ROOT / "build" / "bench" / "device.json", metavar="FILE")
    parser.add_argument("--only", default=",".join(PARTS), help="parts, with commas between")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument(
        "--model", type=Path, default=Path("/dev/shm/luce-full-12.gguf"), help="written if it is not there"
    )
    parser.add_argument("--layers", type=int, default=12, help="of the model that is written")
    parser.add_argument("--limit", type=int, default=280, metavar="SECONDS", help="of each part")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--sides", default=",".join(SIDES), help="ours, upstream or both")
    parser.add_argument(
        "--our-chunks", default="2048,4096", help="rows of a full prefill graph; decode takes the first"
    )
    parser.add_argument("--upstream-chunks", default="2048,4096", help="upstream's ubatch")
    parser.add_argument(
        "--divide", type=int, default=1, metavar="N", help="every length by N, for trying the suite out"
    )
    parser.add_argument("--workers", type=int, default=min(8, os.cpu_count() or 1), help="processes of the tests")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the speeds into this file (needs matplotlib)")
    a = parser.parse_args()
    chosen, sides = a.only.split(","), tuple(a.sides.split(","))
    if unknown := [*(set(chosen) - set(PARTS)), *(set(sides) - set(SIDES))]:
        parser.error(
            f"expected parts of {', '.join(PARTS)} and sides of {', '.join(SIDES)}, found {', '.join(unknown)}"
        )
    backend = a.device.split(":")[0]
    library_dir = Path(os.environ.get("LUCE_LIBRARY_DIR") or ROOT / "build" / backend / "bin")
    if not library_dir.is_dir():
        parser.error(f"expected the libraries in {library_dir}, found none: python build.py --backend {backend}")
    chunks = {"ours": numbers(a.our_chunks), "upstream": numbers(a.upstream_chunks)}
    setting = Setting(
        a.device, a.model, a.layers, a.limit, a.repetitions, sides, chunks, a.divide, a.workers, library_dir.resolve()
    )
    document = read(a.json)
    document |= head(setting)
    a.json.parent.mkdir(parents=True, exist_ok=True)
    failed = []
    for name in chosen:
        print(f"{name}: at most {setting.limit_s} s", flush=True)
        outcome = PARTS[name](setting)
        print(
            f"{name}: {outcome.seconds:.0f} s, {'measured' if outcome.ok is None else 'ok' if outcome.ok else 'FAILED'}",
            flush=True,
        )
        if outcome.ok is False:
            failed.append(name)
        parts = document.setdefault("parts", {})
        parts[name] = merged(parts.get(name), outcome)
        a.json.write_text(json.dumps(document, indent=1) + "\n")
    from bench.device_report import draw, text

    print(text(document, setting.model if setting.model.is_file() else None))
    if a.plot is not None:
        draw(document, a.plot)
    return 1 if failed else 0


def merged(before: dict[str, Any] | None, outcome: Outcome) -> dict[str, Any]:
    """A part's record; of a speed part, sides that did not run now keep their earlier figures."""
    now = asdict(outcome)
    if before and isinstance(before.get("values"), dict) and set(outcome.values or {}) < set(SIDES):
        now["values"] = before["values"] | outcome.values
    return now


def numbers(text: str) -> list[int]:
    """ "2048,4096" as integers."""
    return [int(part) for part in text.split(",")]


def head(setting: Setting) -> dict[str, Any]:
    """What was run, on what."""
    info = json.loads((setting.library_dir / "luce-build.json").read_text())
    git = ["git", "describe", "--always", "--dirty"] if shutil.which("git") else ["true"]
    commit = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=False)
    about = subprocess.run(
        [sys.executable, "-m", "bench.device_ops", "--device", setting.device, "--describe"],
        cwd=ROOT, env=setting.environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    if about.returncode:
        raise SystemExit(f"{setting.device} cannot be used:\n{about.stderr[-2000:]}")
    return {
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit.stdout.strip() or "unknown",
        "build": info["stamp"],
        "device": json.loads(about.stdout),
        "model": setting.model.name,
        "repetitions": setting.repetitions,
    }


def read(path: Path) -> dict[str, Any]:
    """An earlier record, or nothing."""
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError):
        return {}


if __name__ == "__main__":
    sys.exit(main())
