"""Flags for slots, queue and the prompts' share: what reaches the loader, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cli.main import main
from pyluce.luce import Luce
from pyluce.options import LoadOptions, OptionError
from pyluce.state import memory
from tests.support.fake_cli import load_fake

NAMES = ("MAX_CONCURRENCY", "MAX_QUEUE", "PREFILL_SHARE")


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[LoadOptions]:
    found: list[LoadOptions] = []

    def load(path: Any, options: LoadOptions, progress: Any = None) -> Luce:
        found.append(options)
        return load_fake(path, options, progress)

    monkeypatch.setattr(Luce, "load_with", load)
    for name in NAMES:
        monkeypatch.delenv(f"LUCE_{name}", raising=False)
    return found


def slots_of(options: LoadOptions) -> tuple[int, int, float]:
    return options.max_concurrency, options.max_queue, options.prefill_share


def test_one_prompt_takes_one_slot_unless_more_are_asked_for(loads: list[LoadOptions]) -> None:
    usual = LoadOptions()
    assert main(["run", "-p", "x", "-n", "1"]) == 0
    assert slots_of(loads[-1]) == (1, usual.max_queue, usual.prefill_share)
    assert (
        main(["run", "-p", "x", "-n", "1", "--max-concurrency", "3", "--max-queue", "0", "--prefill-share", "1"]) == 0
    )
    assert slots_of(loads[-1]) == (3, 0, 1.0)


def test_the_environment_is_read(loads: list[LoadOptions], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in zip(NAMES, ("64", "4096", "0"), strict=True):
        monkeypatch.setenv(f"LUCE_{name}", value)
    assert main(["run", "-p", "x", "-n", "1"]) == 0
    assert slots_of(loads[-1]) == (64, 4096, 0.0)


@pytest.mark.parametrize(
    ("flag", "values"),
    [
        ("max_concurrency", ["0", "65", "two", "1.5"]),
        ("max_queue", ["-1", "4097", "many"]),
        ("prefill_share", ["-0.1", "1.1", "nan", "half"]),
    ],
)
def test_other_values_are_refused_by_the_command_and_by_the_library(
    loads: list[LoadOptions], capsys: pytest.CaptureFixture[str], flag: str, values: list[str]
) -> None:
    for value in values:
        assert main(["run", "-p", "x", f"--{flag.replace('_', '-')}", value]) == 2
        assert f"--{flag.replace('_', '-')}" in capsys.readouterr().err
        wrong: Any = float(value) if value in ("1.5", "-0.1", "1.1", "nan") else value
        wrong = int(value) if value.lstrip("-").isdigit() else wrong
        with pytest.raises(OptionError, match=flag):
            LoadOptions(**{flag: wrong})
    assert not loads


def test_state_that_does_not_fit_is_refused_naming_the_flag(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: 32 << 20)
    arguments = ["run", str(tiny_model), "-p", "x", "--max-ctx", "4096", "--max-concurrency", "16", "--threads", "1"]
    assert main(arguments) == 1
    error = capsys.readouterr().err
    assert "--max-concurrency: the state of 16 sequences of 4096 tokens takes" in error
    assert "GiB available" in error
