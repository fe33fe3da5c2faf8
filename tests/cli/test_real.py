"""The commands over the real libraries, on a tiny random model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from cli.main import main

ROOT = Path(__file__).resolve().parents[2]


def out_of(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    assert main(arguments) == code
    return capsys.readouterr().out


def test_run_and_its_json_agree(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [str(tiny_model), "--prompt", "hello", "-n", "12", "--threads", "1", "-q", "--raw"]
    text = out_of(capsys, "run", *flags)
    document = json.loads(out_of(capsys, "run", *flags, "--json"))
    assert text.removesuffix("\n") == document["text"].removesuffix("\n")
    assert document["timings"]["completion_tokens"] == len(document["tokens"]) == 12


def test_hashes_are_equal_where_they_must_be_and_differ_where_they_must(
    tiny_model: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    lines = [{"prompt": "hello " * 30}, {"messages": [{"role": "user", "content": "hi"}]}, {"tokens": list(range(100))}]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    expected = str(tmp_path / "expected.json")
    base = ["hash", str(tiny_model), "--prompts", str(prompts), "-q", "--ignore-end"]
    first = out_of(capsys, *base, "-n", "6", "--threads", "1", "--write", expected)
    assert first.count("\n") == 4
    for flags in (["--threads", "1"], ["--threads", "1", "--chunk", "16"]):
        assert "equal to" in out_of(capsys, *base, *flags, "--check", expected)
    assert main([*base, "--threads", "1", "--kv-type", "f32", "--check", expected]) == 1
    assert "prompt 0, step 0: expected logits" in capsys.readouterr().err


def test_doctor_finds_the_libraries(capsys: pytest.CaptureFixture[str]) -> None:
    document = json.loads(out_of(capsys, "doctor", "--json"))
    assert document["backends"]["cpu"]["usable"]
    assert "pin=" in document["backends"]["cpu"]["stamp"]
    assert document["backends"]["cpu"]["devices"][0]["memory_total_bytes"] > 0


def test_a_damaged_model_exits_with_1_in_a_second(tmp_path: Path) -> None:
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"GGUF" + b"\xff" * 1000)
    command = [sys.executable, "-m", "cli.main", "run", str(bad), "--prompt", "x"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("Error: cannot load the model: ")
    assert "Traceback" not in done.stderr
