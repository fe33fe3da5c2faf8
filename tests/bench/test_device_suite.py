"""The device suite's arithmetic and what it keeps from earlier runs; nothing here needs a GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench import device_report as report
from bench import device_suite as suite
from bench.device_worker import Recorder, Sizes, rates

ROOT = Path(__file__).resolve().parents[2]


def document(**parts: Any) -> dict[str, Any]:
    return {
        "date": "d",
        "commit": "c",
        "device": {"description": "A GPU"},
        "model": "m",
        "repetitions": 3,
        "parts": parts,
    }


DECODE = {
    "values": {
        "ours": {
            "greedy decode at 0": [1200.0],
            "decode at 0": [900.0, 1000.0, 1100.0],
            "decode at 16384": [980.0],
            "decode at 65536": [950.0],
        },
        "upstream": {"decode at 0": [300.0, 310.0, 290.0], "decode at 65536": [500.0]},
    }
}
BATCH = {"values": {"ours": {"decode of 4 x 1024": [1.0], "decode of 4 x 16384": [3430.0]}, "upstream": {}}}


def test_ratios_are_of_medians_and_goals_are_judged() -> None:
    text = report.text(document(decode=DECODE, batch=BATCH))
    assert "| decode at 0 | 300.0 | 1,000.0 | 3.33 | 2.5 met |" in text
    assert "| decode at 65536 | 500.0 | 950.0 | 1.90 | 2.5 missed |" in text
    assert "| decode at 16384 |  | 980.0 |  |  |" in text
    assert "| greedy decode at 0 | 300.0 | 1,200.0 | 4.00 | 2.5 met |" in text
    assert "falls 5.0% from depth 0 to 65536" in text
    assert "Our decode of 4 x 16384 is 3.50 times one stream at that depth" in text


def test_the_best_chunk_size_counts() -> None:
    values = {"prefill of 9 at 0, chunk 2048": [10.0, 12.0], "prefill of 9 at 0, chunk 4096": [20.0]}
    assert report.medians(values) == {"prefill of 9 at 0": 20.0}


def test_checks_are_listed_with_what_failed() -> None:
    text = report.text(
        document(
            ops={"seconds": 3.0, "values": [{"ok": True}, {"ok": False}]},
            exact={"seconds": 9.0, "values": {"passed": 5, "failed": ["a::b"], "skipped": 1}},
            tiny={"seconds": 1.0, "values": {"prompts": [{"same_tokens": True, "largest_difference": 0.01}]}},
        )
    )
    assert "self-test: 2 tests, 1 failed" in text and "5 passed, 1 failed, 1 skipped" in text and "failed: a::b" in text
    assert "luce-tiny: 1 of 1 greedy texts as on the CPU; logits at most 1.00e-02 apart" in text


def test_a_side_that_did_not_run_keeps_its_figures() -> None:
    before = {"ok": None, "seconds": 1.0, "values": {"ours": {"a": [1.0]}, "upstream": {"a": [2.0]}}}
    now = suite.merged(before, suite.Outcome(None, 2.0, {"ours": {"a": [3.0]}}))
    assert now["values"] == {"ours": {"a": [3.0]}, "upstream": {"a": [2.0]}} and now["seconds"] == 2.0
    whole = suite.merged(before, suite.Outcome(None, 2.0, {"ours": {}, "upstream": {}}))
    assert whole["values"] == {"ours": {}, "upstream": {}}
    assert suite.merged({"values": []}, suite.Outcome(True, 1.0, [{"ok": True}]))["values"] == [{"ok": True}]


def test_a_worker_leaves_what_it_measured(tmp_path: Path) -> None:
    record = Recorder(tmp_path / "r.json")
    record.put("decode at 0", rates(lambda: 7, 3))
    assert len(suite.json.loads((tmp_path / "r.json").read_text())["decode at 0"]) == 3
    assert Sizes().divided(64) == Sizes(256, (0, 256, 1024), 16)


def test_counts_of_a_test_report(tmp_path: Path) -> None:
    tests = tmp_path / "test_x.py"
    tests.write_text(
        "import pytest\ndef test_a(): pass\ndef test_b(): assert 0\n@pytest.mark.skip\ndef test_c(): pass\n"
    )
    command = [
        sys.executable,
        "-m",
        "pytest",
        str(tests),
        "-q",
        f"--junitxml={tmp_path / 'r.xml'}",
        "-p",
        "no:cacheprovider",
    ]
    subprocess.run(command, cwd=tmp_path, capture_output=True, check=False)
    counts = suite.test_counts(tmp_path / "r.xml")
    assert counts == {"passed": 1, "failed": ["test_x::test_b"], "skipped": 1}


def test_a_part_is_stopped_at_its_limit_and_asked_to_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite.Setting, "environment", lambda self: dict(suite.os.environ))
    setting = suite.Setting("cpu", tmp_path, 4, 1, 1, ("ours",), {}, 1, 1, tmp_path)
    program = "import time, sys, signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
    program += "try: time.sleep(60)\nexcept KeyboardInterrupt: open(sys.argv[1], 'w').write('left')"
    assert suite.run(setting, [sys.executable, "-c", program, str(tmp_path / "x")], 2.0) is None
    assert (tmp_path / "x").read_text() == "left"
    assert suite.run(setting, [sys.executable, "-c", "raise SystemExit(3)"], 20.0) == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "ops,all"], "found all"),
        (["--sides", "theirs"], "found theirs"),
        (["--device", "hip:0"], "expected the libraries"),
    ],
)
def test_what_does_not_exist_is_refused(arguments: list[str], message: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench.device_suite", "--json", str(tmp_path / "x.json"), *arguments]
    environment = {"PATH": "", "LUCE_LIBRARY_DIR": str(tmp_path / "none") if "--device" in arguments else str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and message in done.stderr
