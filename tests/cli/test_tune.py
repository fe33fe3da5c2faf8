"""`luce tune` and `--tune`: what they say without a GPU, and what the table's digest is part of."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cli import tune as module
from cli.main import main
from pyluce.graph import RunnerOptions
from pyluce.identity import state_identity
from pyluce.native.devices import DeviceInfo
from pyluce.native.ggml_backend import BackendDevType
from pyluce.native.structs import GGMLType
from pyluce.native.tune import TuneKind
from pyluce.options import LoadOptions, OptionError
from pyluce.tuning import Entry, TuneTable, Tuning
from pyluce.weights import open_model
from tests.support.models import luce_tiny_path
from tests.support.real_model import require_libraries


def test_the_cpu_has_nothing_to_tune(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune"]) == 0
    assert capsys.readouterr().out.startswith("nothing to tune: the CPU has one kernel for each product")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--device", "gpu"], 2, "--device: expected cpu, cuda:N, hip:N or rpc:HOST:PORT, found 'gpu'"),
        (
            ["--device", "rpc:127.0.0.1:1"],
            2,
            "--device: expected a GPU of this machine, found 'rpc:127.0.0.1:1'",
        ),
        (["--device", "cuda:0", "--chunk", "8"], 2, "--chunk"),
        (["--device", "cuda:0", "missing.gguf"], 1, "missing.gguf"),
    ],
)
def test_what_cannot_be_measured(
    arguments: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tune", *arguments]) == code
    assert message in capsys.readouterr().err


def test_writes_and_prints_what_was_chosen(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    times = {"1:default": 10.0, "1:4": 7.5, "2:default": 12.0, "2:4": 8.0}
    entry = Entry(TuneKind.ROW, GGMLType.Q8_0, 2560, 320, 0, 0, 4, times)
    table = TuneTable("Some GPU", "gfx1201", 1, "stamp", "m", (entry,))
    monkeypatch.setattr(module, "_measure", lambda *_: (table, tmp_path / "t.json"))
    assert main(["tune", "--device", "hip:0"]) == 0
    out = capsys.readouterr().out
    assert "row Q8_0 [2560, 320]: 4; 1 rows 10 to 7.5 us, 2 rows 12 to 8 us" in out
    assert f"1 choice better than the default, digest {table.digest}: {tmp_path / 't.json'}" in out
    assert TuneTable.load(tmp_path / "t.json") == table


def test_a_table_is_refused_with_the_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for tune in ("", "some.json"):
        with pytest.raises(OptionError, match=r"^tune: expected"):
            LoadOptions(tune=tune)
    assert main(["run", "--prompt", "x", "--tune", str(tmp_path / "t.json")]) == 2
    assert "--tune: expected none with the CPU, which has nothing to choose" in capsys.readouterr().err


def test_kept_states_belong_to_one_table_and_one_kind_of_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    require_libraries()
    options = RunnerOptions(n_ctx=64)
    with open_model(luce_tiny_path()) as model:
        plain = state_identity(model, options, None)
        tuned = state_identity(model, options, None, Tuning("a.json", "abc", 1))
        assert {name for name in plain if plain[name] != tuned[name]} == {"tuning"}
        assert state_identity(model, replace(options, tune="b.json"), None) == plain, "the file's name decides nothing"
        gpus = []
        monkeypatch.setattr("pyluce.identity.load_libraries", lambda backend: type("L", (), {"stamp": "s"}))
        for name in ("One GPU", "Another"):
            info = DeviceInfo("CUDA0", name, BackendDevType.GPU, 1, 1, None, False, "cuda:0", "compute capability 9.0")
            monkeypatch.setattr("pyluce.identity.list_devices", lambda info=info: [info])
            gpus.append(state_identity(model, replace(options, device="cuda:0"), None))
        assert {name for name in gpus[0] if gpus[0][name] != gpus[1][name]} == {"gpu"}
