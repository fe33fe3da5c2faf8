"""Flags for speculation: what reaches the loader, what is refused, and heads from files of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cli.main import main
from pyluce.graph import RunnerOptions, TrunkRunner
from pyluce.luce import Luce
from pyluce.options import LoadOptions, OptionError
from pyluce.weights import ModelError
from tests.support.fake_cli import load_fake
from tests.weights.conftest import make_draft
from tests.weights.test_mtp import sidecar_of
from tools.synth import MICRO

RUN = ["run", "-p", "x", "-n", "1"]


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[LoadOptions]:
    found: list[LoadOptions] = []

    def load(path: Any, options: LoadOptions, progress: Any = None) -> Luce:
        found.append(options)
        return load_fake(path, options, progress)

    monkeypatch.setattr(Luce, "load_with", load)
    for name in ("SPEC", "VERIFY_WIDTH", "DRAFT"):
        monkeypatch.delenv(f"LUCE_{name}", raising=False)
    return found


def spec_of(options: LoadOptions) -> tuple[object, ...]:
    return options.spec, options.verify_width, options.draft


def test_flags_and_variables(loads: list[LoadOptions], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    head = tmp_path / "head.gguf"
    head.write_bytes(b"GGUF")
    assert main(RUN) == 0
    assert main([*RUN, "--spec", "lookup,mtp", "--verify-width", "3", "--draft", str(head)]) == 0
    assert main([*RUN, "--spec", "off"]) == 0
    monkeypatch.setenv("LUCE_SPEC", "lookup")
    monkeypatch.setenv("LUCE_VERIFY_WIDTH", "8")
    assert main(RUN) == 0
    assert [spec_of(options) for options in loads] == [
        (None, 0, None),
        (("lookup", "mtp"), 3, head),
        ((), 0, None),
        (("lookup",), 8, None),
    ]


@pytest.mark.parametrize(
    "flags",
    [
        ["--spec", "tree"],
        ["--spec", ""],
        ["--spec", "mtp,mtp"],
        ["--verify-width", "9"],
        ["--verify-width", "-1"],
        ["--draft", "missing.gguf"],
        ["--draft", ""],
    ],
)
def test_what_is_refused(loads: list[LoadOptions], capsys: pytest.CaptureFixture[str], flags: list[str]) -> None:
    assert main([*RUN, *flags]) == 2
    assert flags[0] in capsys.readouterr().err
    assert not loads


def test_a_head_that_is_not_there(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(OptionError, match="spec: mtp: the file has no MTP block"):
        Luce.load(tiny_model, threads=1, max_ctx=128, spec=("mtp",))
    assert main(["run", str(tiny_model), "-p", "x", "-n", "1", "--max-ctx", "128", "--spec", "mtp"]) == 1
    assert "--spec: mtp: the file has no MTP block" in capsys.readouterr().err
    with pytest.raises(ModelError, match=r"nextn_predict_layers: expected 1 \(an MTP sidecar\)"):
        Luce.load(tiny_model, threads=1, max_ctx=128, draft=tiny_model)


def test_a_head_in_a_file_of_its_own_drafts_the_same(tmp_path: Path) -> None:
    """In the model's file; beside it with the trunk's embedding and output; with its own."""
    from dataclasses import replace

    whole = make_draft(replace(MICRO, mtp=True)).write(tmp_path / "whole.gguf")
    borrowing = sidecar_of(MICRO).write(tmp_path / "borrowing.gguf")
    own = sidecar_of(MICRO, own=True).write(tmp_path / "own.gguf")
    found = []
    for draft in (None, borrowing, own):
        options = RunnerOptions(n_ctx=128, mtp=True, draft_path=None if draft is None else str(draft))
        with TrunkRunner(whole, options) as runner:
            state = runner.new_sequence()
            runner.prefill(state, list(range(5, 50)), want="none")
            found.append(runner.draft([(state, 7, 5)])[0])
            names = set(runner.model.tensors)
        assert ("nextn.output.weight" in names) == ("nextn.token_embd.weight" in names) == (draft == own)
    assert found[0] == found[1] == found[2]
    assert len(set(found[0])) > 1
