from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cli import doctor as module
from cli.doctor import BackendState, missing
from cli.main import main

STAMP = "pin=0123456789abcdef patches=fedcba9876543210 flags=cpu GGML_NATIVE=ON compiler=c++ 12"
DEVICE = {
    "name": "CPU",
    "description": "A processor",
    "kind": "cpu",
    "memory_free_bytes": 3 << 30,
    "memory_total_bytes": 4 << 30,
    "device_id": None,
    "from_host_pointer": True,
}
RESULT: dict[str, Any] = {
    "directory": "/somewhere/build/cpu/bin",
    "stamp": STAMP,
    "devices": [DEVICE],
    "cpu_features": {"AVX2": "1", "AVX512": "0"},
}


def use(monkeypatch: pytest.MonkeyPatch, *states: BackendState) -> None:
    by_name = {state.name: state for state in states}
    monkeypatch.setattr(module, "examine", lambda name: by_name.get(name, BackendState(name, built=False)))


def test_says_what_was_built_and_what_is_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use(monkeypatch, BackendState("cpu", True, None, RESULT))
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    for text in (
        "cpu: /somewhere/build/cpu/bin",
        "  pin: 0123456789abcdef",
        "  flags: cpu GGML_NATIVE=ON",
        "  CPU features: AVX2\n",
        "device: CPU (cpu), A processor, cpu, 3.0 of 4.0 GiB free",
        "missing: cuda (for NVIDIA GPUs only): not built: `python build.py --backend cuda`",
    ):
        assert text in out


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (
            BackendState("cpu", False, lacks="a C++ compiler"),
            "cpu: not built: install a C++ compiler, then `python build.py",
        ),
        (
            BackendState("cpu", True, "the libraries were built from another source. Build them: ..."),
            "cpu: the libraries",
        ),
        (BackendState("cpu", True, None, {**RESULT, "devices": []}), "they see no device"),
    ],
)
def test_nothing_usable_exits_with_1_and_the_command_that_helps(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], state: BackendState, message: str
) -> None:
    use(monkeypatch, state)
    assert main(["doctor"]) == 1
    assert message in capsys.readouterr().out


def test_a_gpu_goes_by_the_name_that_device_takes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu = {**DEVICE, "name": "CUDA0", "description": "A GPU", "kind": "gpu", "device": "cuda:0"}
    gpu["architecture"] = "compute capability 9.0"
    use(monkeypatch, BackendState("cuda", True, None, {**RESULT, "devices": [gpu]}))
    assert main(["doctor"]) == 0
    expected = "device: cuda:0 (cuda), A GPU, compute capability 9.0, gpu, 3.0 of 4.0 GiB free"
    assert expected in capsys.readouterr().out


def test_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    use(monkeypatch, BackendState("cpu", True, None, RESULT))
    assert main(["doctor", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["backends"]["cpu"]["devices"] == [DEVICE]
    assert document["backends"]["cuda"] == {"built": False, "usable": False, "error": None}
    assert any(note.startswith("hip (for AMD GPUs only): not built") for note in document["missing"])


def test_a_missing_default_model_is_named(tmp_path: Path) -> None:
    assert any("luce-tiny: expected" in note for note in missing([], None))
    assert missing([], tmp_path) == []


def test_an_installed_package_is_not_sent_to_build_py(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.stamp, "project_root", lambda: None)
    notes = missing([BackendState("cpu", False), BackendState("cuda", False)], Path())
    assert "pip install" in notes[0]
    assert not any("build.py" in note for note in notes)


def test_a_probe_that_crashes_or_hangs_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "find_directory", lambda name: tmp_path)
    program = tmp_path / "python"
    monkeypatch.setattr(module.sys, "executable", str(program))
    program.write_text("#!/bin/sh\necho broken driver >&2\nkill -SEGV $$\n")
    program.chmod(0o755)
    crashed = module.examine("cuda")
    assert crashed.built
    assert not crashed.usable
    assert "status -11" in (crashed.error or "")
    assert "broken driver" in (crashed.error or "")
    monkeypatch.setattr(module, "PROBE_SECONDS", 0.2)
    program.write_text("#!/bin/sh\nexec sleep 20\n")
    assert "did not answer" in (module.examine("hip").error or "")
