"""A fresh process computes the same bytes; so does one whose GPU launches every node by itself."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.exactness.case import Case
from tests.support.device import ON_GPU
from tests.support.runs import Solo, open_runner, solo

ROOT = Path(__file__).resolve().parents[2]
N_TOKENS = 6
OTHER_ARITHMETIC: dict[str, object] = {"debug_fault": "cut_variant"}
if not ON_GPU:
    OTHER_ARITHMETIC = {"debug_fault": "thread_variant", "n_threads": 2}


def solo_elsewhere(
    case: Case, prompt: list[int], tmp_path: Path, variables: dict[str, str] | None = None, **options: object
) -> dict[str, list[object]]:
    request = tmp_path / "request.json"
    request.write_text(json.dumps({"prompt": prompt, "n": N_TOKENS, "options": options}))
    command = [sys.executable, "-m", "tests.support.solo_process", str(case.model), str(request)]
    environment = {**os.environ, **(variables or {})}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


def solo_here(case: Case, prompt: list[int]) -> Solo:
    return solo(functools.partial(open_runner, case.model), prompt, N_TOKENS)


def test_fresh_processes_agree(case: Case, tmp_path: Path) -> None:
    prompt = case.prompt(70)
    here = solo_here(case, prompt)
    found = solo_elsewhere(case, prompt, tmp_path)
    assert found["tokens"] == here.tokens
    assert found["hashes"] == here.hashes


@pytest.mark.skipif(not ON_GPU, reason="the CPU computes node by node")
def test_fused_and_plain_launches_agree(case: Case, tmp_path: Path) -> None:
    """The prompt's chunk and the rows after it; the next test is the control."""
    prompt = case.prompt(70)
    here = solo_here(case, prompt)
    found = solo_elsewhere(case, prompt, tmp_path, {"LUCE_DISABLE_FUSION": "1"})
    assert found["tokens"] == here.tokens
    assert found["hashes"] == here.hashes


def test_control_another_arithmetic_shows(control_case: Case, tmp_path: Path) -> None:
    prompt = control_case.prompt(70)
    here = solo_here(control_case, prompt)
    found = solo_elsewhere(control_case, prompt, tmp_path, **OTHER_ARITHMETIC)
    with pytest.raises(AssertionError):
        assert found["hashes"] == here.hashes
