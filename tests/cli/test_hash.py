from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cli.main import main
from pyluce.luce import Luce
from pyluce.run_hashes import HashFileError, HashReport, PromptHash, first_difference, read_prompts
from tests.support.fake_cli import load_fake

Command = Callable[..., tuple[int, str, str]]

LINES = """{"prompt": "hello"}
{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes?"}, {"role": "user", "content": "no"}]}

{"tokens": [5, 6, 7]}
"""


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text(LINES, encoding="utf-8")
    return path


@pytest.fixture
def loads() -> list[Any]:
    return []


@pytest.fixture
def luce(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], loads: list[Any]) -> Command:
    def load(path: Any, options: Any, progress: Any = None) -> Luce:
        loads.append(options)
        return load_fake(path, options, progress)

    monkeypatch.setattr(Luce, "load_with", load)

    def run(*arguments: str) -> tuple[int, str, str]:
        code = main(["hash", *arguments])
        out, err = capsys.readouterr()
        return code, out, err

    return run


def test_prints_a_hash_for_each_prompt_and_one_total(luce: Command, prompts: Path) -> None:
    code, out, _ = luce("--prompts", str(prompts), "-n", "6", "--ignore-end")
    lines = out.splitlines()
    assert (code, len(lines)) == (0, 4)
    assert all(line.endswith(" n 6") for line in lines[:3])
    digests = [bytes.fromhex(word) for line in lines[:3] for word in line.split() if len(word) == 64]
    assert len(digests) == 6
    assert luce("--prompts", str(prompts), "-n", "6", "--ignore-end")[1] == out
    assert luce("--prompts", str(prompts), "-n", "6", "--ignore-end", "--raw")[1] != out


def test_write_then_check(luce: Command, prompts: Path, tmp_path: Path) -> None:
    expected = tmp_path / "expected.json"
    code, out, _ = luce("--prompts", str(prompts), "-n", "8", "--ignore-end", "--write", str(expected))
    assert code == 0
    report = HashReport.read(expected)
    assert out.splitlines()[-1] == f"total: {report.total_sha256}"
    parts = [
        bytes.fromhex(digest)
        for prompt in report.prompts
        for digest in (prompt.prompt_sha256, prompt.tokens_sha256, prompt.logits_sha256)
    ]
    assert report.total_sha256 == hashlib.sha256(b"".join(parts)).hexdigest()
    assert expected.stat().st_size < 3 * 8 * 40 + 1500
    code, out, err = luce("--prompts", str(prompts), "--ignore-end", "--check", str(expected), "--chunk", "16")
    assert (code, out.splitlines()[-1]) == (0, f"equal to {expected}")


def change(path: Path, index: int, **values: Any) -> None:
    """Rewrite one prompt of an expected file so that the file stays consistent."""
    report = HashReport.read(path)
    prompts = list(report.prompts)
    fields = {name: getattr(prompts[index], name) for name in PromptHash.__dataclass_fields__}
    prompts[index] = PromptHash(**{**fields, **values})
    HashReport(report.n, report.model, report.settings, tuple(prompts)).write(path)


def test_the_first_differing_prompt_and_step_are_named(luce: Command, prompts: Path, tmp_path: Path) -> None:
    expected = tmp_path / "expected.json"
    luce("--prompts", str(prompts), "-n", "8", "--ignore-end", "--write", str(expected))
    steps = HashReport.read(expected).prompts[1].steps
    change(expected, 2, steps="0" * 128)
    change(expected, 1, steps=steps[:48] + "f" * 16 + steps[64:])
    code, _, err = luce("--prompts", str(prompts), "--ignore-end", "--check", str(expected))
    assert code == 1
    assert f"prompt 1, step 3: expected logits {'f' * 16}, found {steps[48:64]}" in err


def report_of(*prompts: PromptHash, n: int = 4) -> HashReport:
    return HashReport(n, "m", {}, prompts)


def answer(tokens: tuple[int, ...] = (1, 2), steps: str = "aa" * 16, prompt: str = "00" * 32) -> PromptHash:
    return PromptHash(
        prompt, tokens, hashlib.sha256(bytes(tokens)).hexdigest(), hashlib.sha256(steps.encode()).hexdigest(), steps
    )


@pytest.mark.parametrize(
    ("found", "place"),
    [
        (answer(), None),
        (answer(prompt="11" * 32), "prompt 0, its token ids"),
        (
            answer(steps="aa" * 8 + "bb" * 8),
            "prompt 0, step 1: expected logits aaaaaaaaaaaaaaaa, found bbbbbbbbbbbbbbbb",
        ),
        (answer(tokens=(1, 3)), "prompt 0, step 1: expected token 2, found 3, from equal logits"),
        (answer(tokens=(1, 2, 3), steps="aa" * 24), "prompt 0, step 2: expected 2 tokens in all, found 3"),
        (answer(tokens=(1,), steps="aa" * 8), "prompt 0, step 1: expected 2 tokens in all, found 1"),
    ],
)
def test_first_difference(found: PromptHash, place: str | None) -> None:
    difference = first_difference(report_of(answer()), report_of(found))
    assert (str(difference) if difference else None) == place or str(difference).startswith(str(place))


def test_runs_over_other_prompts_cannot_be_compared() -> None:
    with pytest.raises(HashFileError, match="expected 1 prompts, found 2"):
        first_difference(report_of(answer()), report_of(answer(), answer()))
    with pytest.raises(HashFileError, match="at most 4 tokens, found 5"):
        first_difference(report_of(answer()), report_of(answer(), n=5))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("nonsense", ":2: not JSON"),
        ("[1]", ":2: expected an object, found list"),
        ("{}", ":2: expected one key, prompt, messages or tokens, found no key"),
        ('{"prompt": "a", "tokens": [1]}', ":2: expected one key"),
        ('{"promt": "a"}', ":2: expected one key, prompt, messages or tokens, found promt"),
        ('{"prompt": 3}', ":2: prompt: expected a string, found int"),
        ('{"prompt": ""}', ":2: prompt: expected a string, found an empty one"),
        ('{"messages": {}}', ":2: messages: expected a list"),
        ('{"messages": [{"content": "x"}]}', r":2: messages\[0\]\.role"),
        ('{"tokens": [1, "2"]}', r":2: tokens\[1\]: expected a token id, found '2'"),
        ('{"tokens": [-1]}', r":2: tokens\[0\]"),
    ],
)
def test_a_malformed_line_is_refused_with_its_number_before_any_work(
    luce: Command, loads: list[Any], tmp_path: Path, line: str, message: str
) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "fine"}\n' + line + "\n")
    with pytest.raises(HashFileError, match=message):
        read_prompts(path)
    code, out, err = luce("--prompts", str(path))
    assert (code, out, loads) == (2, "", [])
    assert "prompts.jsonl:2: " in err


def test_tokens_outside_the_vocabulary_are_refused_with_their_line(luce: Command, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "fine"}\n\n{"tokens": [99999]}\n')
    code, out, err = luce("--prompts", str(path))
    assert (code, out) == (2, "")
    assert "prompts.jsonl:3: tokens: tokens[0]" in err


@pytest.mark.parametrize(
    ("change_text", "message"),
    [
        (lambda text: "", "cannot be read as JSON"),
        (lambda text: "[]", "expected format 'luce-hash-1', found 'list'"),
        (lambda text: text.replace("luce-hash-1", "luce-hash-0"), "found 'luce-hash-0'"),
        (lambda text: text.replace('"total_sha256": "', '"total_sha256": "0'), "do not add up"),
        (lambda text: text.replace('"steps": "', '"steps": "00'), "damaged.*steps"),
        (lambda text: text.replace('"steps"', '"step"'), "damaged.*steps"),
        (lambda text: text.replace('"tokens": [', '"tokens": [1, '), "damaged"),
    ],
)
def test_a_damaged_expected_file_is_a_usage_error(
    luce: Command, prompts: Path, tmp_path: Path, loads: list[Any], change_text: Callable[[str], str], message: str
) -> None:
    expected = tmp_path / "expected.json"
    luce("--prompts", str(prompts), "-n", "2", "--ignore-end", "--write", str(expected))
    expected.write_text(change_text(expected.read_text()))
    with pytest.raises(HashFileError, match=message):
        HashReport.read(expected)
    del loads[:]
    assert luce("--prompts", str(prompts), "--check", str(expected))[0] == 2
    assert not loads


def test_contradicting_flags_and_other_prompts_are_refused(
    luce: Command, prompts: Path, tmp_path: Path, loads: list[Any]
) -> None:
    expected = tmp_path / "expected.json"
    luce("--prompts", str(prompts), "-n", "2", "--ignore-end", "--write", str(expected))
    del loads[:]
    code, _, err = luce("--prompts", str(prompts), "--write", str(tmp_path / "x"), "--check", str(expected))
    assert (code, "--write and --check" in err) == (2, True)
    code, _, err = luce("--prompts", str(prompts), "-n", "3", "--check", str(expected))
    assert (code, "holds 3 prompts of 2 tokens, found 3 of 3" in " ".join(err.split())) == (2, True)
    assert not loads
    assert luce("--prompts", "/does/not/exist")[0] == 2
    assert luce()[0] == 2


def test_write_to_a_missing_folder_exits_with_1(luce: Command, prompts: Path) -> None:
    code, _, err = luce("--prompts", str(prompts), "-n", "1", "--write", "/does/not/exist/out.json")
    assert (code, "--write: /does/not/exist/out.json cannot be written" in err) == (1, True)


def test_every_engine_flag_of_run_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    main(["run", "--help"])
    run = capsys.readouterr().out
    main(["hash", "--help"])
    hashed = capsys.readouterr().out
    for flag in (
        "--max-ctx",
        "--threads",
        "--kv-type",
        "--chunk",
        "--repack",
        "--no-repack",
        "--chat-template-file",
        "--quiet",
    ):
        assert flag in run
        assert flag in hashed
