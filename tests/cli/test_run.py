from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cli.main import main
from pyluce.luce import Luce
from pyluce.options import LoadOptions
from pyluce.weights import ModelError
from tests.support.fake_cli import load_fake

Outcome = tuple[int, str, str]
Command = Callable[..., Outcome]


@pytest.fixture
def loads() -> list[tuple[Any, LoadOptions]]:
    return []


@pytest.fixture
def luce(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], loads: list[tuple[Any, LoadOptions]]
) -> Command:
    """Run the command over the fake model: exit code, standard output, standard error."""

    def load(path: Any, options: LoadOptions, progress: Any = None) -> Luce:
        loads.append((path, options))
        return load_fake(path, options, progress)

    monkeypatch.setattr(Luce, "load_with", load)
    for name in ("MAX_CTX", "THREADS", "KV_TYPE", "CHUNK", "REPACK", "FAKE_ANSWER"):
        monkeypatch.delenv(f"LUCE_{name}", raising=False)

    def run(*arguments: str, answer: str | None = None, stdin: bytes | None = None) -> Outcome:
        if answer is not None:
            monkeypatch.setenv("LUCE_FAKE_ANSWER", answer)
        if stdin is not None:
            monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        code = main(arguments)
        out, err = capsys.readouterr()
        return code, out, err

    return run


def test_prints_the_answer_and_what_it_took(luce: Command) -> None:
    code, out, err = luce("run", "--prompt", "hi", answer="why</think>\n\nHéllo 😀")
    assert (code, out) == (0, "Héllo 😀\n")
    lines = err.splitlines()
    assert lines[0] == "load: weights"
    assert lines[-1].startswith("prompt ")
    assert "ended by the model" in lines[-1]


def test_reasoning_is_printed_when_asked_for(luce: Command) -> None:
    assert luce("run", "-p", "hi", "-q", "--show-thinking", answer="why</think>yes") == (0, "why\n\nyes\n", "")
    assert luce("run", "-p", "hi", "-q", "--hide-thinking", answer="why</think>yes") == (0, "yes\n", "")


def test_json_is_one_document_with_everything(luce: Command) -> None:
    code, out, err = luce("run", "--prompt", "hi", "--json", "-q", "--system", "s", answer="why</think>yes")
    assert (code, err) == (0, "")
    document = json.loads(out)
    assert (document["text"], document["reasoning"], document["finish_reason"]) == ("yes", "why", "stop")
    assert len(document["tokens"]) == len(b"why</think>yes") + 1
    assert len(document["logits_sha256"]) == len(document["tokens_sha256"]) == 64
    assert document["timings"]["completion_tokens"] == len(document["tokens"])
    assert document["seed"] is None
    with_seed = json.loads(luce("run", "-p", "hi", "--json", "-q", "--temperature", "1")[1])
    again = json.loads(
        luce("run", "-p", "hi", "--json", "-q", "--temperature", "1", "--seed", str(with_seed["seed"]))[1]
    )
    assert again["tokens"] == with_seed["tokens"]


def test_prompts_come_from_files_and_standard_input(luce: Command, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("héllo\n", encoding="utf-8")

    def tokens(*arguments: str, stdin: bytes | None = None) -> list[int]:
        code, out, _ = luce("run", "--json", "-q", "-n", "2", *arguments, stdin=stdin)
        assert code == 0
        ids: list[int] = json.loads(out)["prompt_tokens"]
        return ids

    wanted = tokens("--prompt", "héllo")
    assert tokens("--prompt-file", str(file)) == wanted
    assert tokens("--prompt-file", "-", stdin="héllo\n".encode()) == wanted
    assert tokens("--prompt", "-", stdin="héllo\r\n".encode()) == wanted
    assert tokens("--prompt", "héllo", "--raw") == list("héllo".encode())


def test_stop_strings_and_limits(luce: Command) -> None:
    code, out, err = luce("run", "-p", "x", "--raw", "--stop", "END", "--stop", "zzz", answer="one END two")
    assert (code, out) == (0, "one \n")
    assert "ended before 'END'" in err
    code, out, err = luce("run", "-p", "x", "--raw", "-n", "3", answer="abcdef")
    assert (code, out) == (0, "abc\n")
    assert "ended by its limit" in err


def test_the_default_limit_shrinks_to_what_fits(luce: Command) -> None:
    code, _, err = luce("run", "-p", "x", "--raw", "--max-ctx", "16")
    assert code == 0
    assert "answer 16 tokens" in err


def engine_of(load: tuple[Any, LoadOptions]) -> tuple[Any, ...]:
    """The model and what says how it computes."""
    path, options = load
    return (
        path,
        options.max_ctx,
        options.threads,
        options.kv_type,
        options.chunk,
        options.repack,
        options.max_concurrency,
    )


def test_engine_flags_and_their_environment(
    luce: Command, loads: list[tuple[Any, LoadOptions]], monkeypatch: pytest.MonkeyPatch
) -> None:
    luce("run", "m.gguf", "-p", "x", "-n", "1", "--max-ctx", "128", "--threads", "3", "--kv-type", "f32", "--no-repack")
    assert engine_of(loads[-1]) == (Path("m.gguf"), 128, 3, "f32", 512, False, 1)
    for name, value in (("MAX_CTX", "256"), ("THREADS", "2"), ("KV_TYPE", "f32"), ("CHUNK", "64"), ("REPACK", "0")):
        monkeypatch.setenv(f"LUCE_{name}", value)
    luce("run", "-p", "x", "-n", "1")
    assert engine_of(loads[-1]) == (None, 256, 2, "f32", 64, False, 1)
    monkeypatch.setenv("LUCE_REPACK", "1")
    luce("run", "-p", "x", "-n", "1", "--threads", "1")
    assert engine_of(loads[-1]) == (None, 256, 1, "f32", 64, True, 1)


@pytest.mark.parametrize(
    ("name", "value"), [("REPACK", "maybe"), ("THREADS", "0"), ("THREADS", "two"), ("KV_TYPE", "q4"), ("CHUNK", "100")]
)
def test_a_bad_environment_value_is_a_usage_error(
    luce: Command, monkeypatch: pytest.MonkeyPatch, name: str, value: str, loads: list[Any]
) -> None:
    monkeypatch.setenv(f"LUCE_{name}", value)
    code, out, err = luce("run", "-p", "x")
    assert (code, out, loads) == (2, "", [])
    assert name.lower().replace("_", "-") in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", ""], "--prompt: expected a prompt, found no text"),
        (["--prompt", "x", "--prompt-file", "f"], "--prompt and --prompt-file contradict each other"),
        (["--prompt-file", "/does/not/exist"], "--prompt-file: /does/not/exist cannot be read"),
        (["-p", "x", "--raw", "--system", "s"], "--raw and --system"),
        (["-p", "x", "--raw", "--no-thinking"], "--raw and --no-thinking"),
        (["-p", "x", "--raw", "--thinking"], "--raw and --thinking"),
        (["-p", "x", "--json", "--hide-thinking"], "--json and --hide-thinking"),
        (["-p", "x", "--chunk", "100"], "--chunk: expected a multiple of 16, found 100"),
        (["-p", "x", "--chunk", "8"], "--chunk"),
        (["-p", "x", "--threads", "0"], "--threads"),
        (["-p", "x", "--kv-type", "q8_0"], "--kv-type"),
        (["-p", "x", "--max-ctx", "16777216"], "--max-ctx"),
        (["-p", "x", "-n", "0"], "--max-tokens"),
        (["-p", "x", "--temperature", "-1"], "--temperature"),
        (["-p", "x", "--temperature", "0.00001"], "--temperature: expected 0 (greedy) or at least 0.001"),
        (["-p", "x", "--temperature", "nan"], "--temperature"),
        (["-p", "x", "--top-p", "1.5"], "--top-p"),
        (["-p", "x", "--repeat-penalty", "0"], "--repeat-penalty"),
        (["-p", "x", "--seed", "4294967295"], "--seed"),
        (["-p", "x", "--frob"], "No such option"),
        (["-p", "x", "--chat-template-file", "/does/not/exist"], "--chat-template-file"),
    ],
)
def test_usage_errors_are_found_before_anything_is_loaded(
    luce: Command, loads: list[Any], arguments: list[str], message: str
) -> None:
    code, out, err = luce("run", *arguments)
    assert (code, out, loads) == (2, "", [])
    assert message in " ".join(err.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-p", "x" * 100, "--max-ctx", "64"], "--prompt: 1"),
        (["-p", "x", "-n", "100", "--max-ctx", "64"], "--max-tokens: "),
        (["-p", "x", "--stop", ""], "stop[0]"),
    ],
)
def test_requests_that_do_not_fit_are_usage_errors(luce: Command, arguments: list[str], message: str) -> None:
    code, out, err = luce("run", "-q", *arguments)
    assert (code, out) == (2, "")
    assert message in err


def test_standard_input_must_be_text(luce: Command) -> None:
    code, _, err = luce("run", "-p", "-", stdin=b"\xff\xfe")
    assert code == 2
    assert "UTF-8" in err
    code, _, err = luce("run", "-p", "-", stdin=b"\n")
    assert (code, "found no text" in err) == (2, True)


def test_a_template_file_replaces_the_models(luce: Command, tmp_path: Path) -> None:
    template = tmp_path / "t.jinja"
    template.write_text("{{ messages[0].content }}!")
    code, out, _ = luce("run", "-p", "hey", "-n", "1", "--json", "--chat-template-file", str(template))
    assert (code, json.loads(out)["prompt_tokens"]) == (0, list(b"hey!"))
    template.write_text("{{ raise_exception('Only system messages, please.') }}")
    code, _, err = luce("run", "-p", "hey", "-q", "--chat-template-file", str(template))
    assert (code, "Only system messages, please." in err) == (2, True)
    template.write_text("{{ messages[0].content }}")
    code, _, err = luce("run", "-p", "hey", "-n", "1", "-q", "--no-thinking", "--chat-template-file", str(template))
    assert (code, err) == (0, "warning: --no-thinking ignored: this model's chat template has no such switch\n")
    template.write_bytes(b"\xff")
    assert luce("run", "-p", "hey", "--chat-template-file", str(template))[0] == 2


def test_load_failures_exit_with_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(*arguments: Any) -> Luce:
        raise ModelError("m.gguf: block_count: expected 1 to 4096, found 0")

    monkeypatch.setattr(Luce, "load_with", fail)
    assert main(["run", "m.gguf", "--prompt", "x"]) == 1
    assert "cannot load the model: m.gguf: block_count" in capsys.readouterr().err


def test_a_missing_model_file_exits_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "/does/not/exist.gguf", "--prompt", "x"]) == 1
    assert "expected a GGUF file, found nothing there" in capsys.readouterr().err
    assert main(["run", "/", "--prompt", "x"]) == 1
    assert "found a folder" in capsys.readouterr().err


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--help"], ["run", "-h"], ["hash", "--help"], ["doctor", "--help"], ["--version"]):
        assert main(arguments) == 0
        assert capsys.readouterr().out
    assert main(["nonsense"]) == 2
