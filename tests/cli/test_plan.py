"""`luce plan`: what it prints, what it refuses, and that `luce run` follows it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli.main import main
from pyluce.luce import Luce
from pyluce.options import LoadOptions
from tests.support.models import luce_tiny_path

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("LUCE_CHUNK", raising=False)

    def call(*arguments: str) -> tuple[int, str, str]:
        code = main(("plan", "--threads", "1", *arguments) if "--profile" not in arguments else ("plan", *arguments))
        out, err = capsys.readouterr()
        return code, out, err

    return call


def test_a_plan_in_words(plan) -> None:
    code, out, err = plan("--max-ctx", "1024", "--max-concurrency", "2", "--host-memory", "4")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "model     luce-tiny"
    assert lines[1] == "device    cpu: 4.00 GiB available, 3.60 GiB used at most"
    assert lines[2] == "context   1,024 tokens in 2 slots, keys and values f16"
    assert lines[3] == "chunk     512 tokens (auto: 1,024)"
    for what in ("weights, mapped", "weights, repacked", "state", "graphs", "workspace", "n-gram table", "in all"):
        assert any(line.startswith(f"  {what} ") for line in lines), what
    assert any(line.startswith("largest   8,192 tokens in 2 slots, or 64 slots of 1,024 tokens") for line in lines)


def test_loading_follows_the_plan(plan, tiny_model: Path) -> None:
    arguments = ["--max-ctx", "512", "--max-concurrency", "2", "--chunk", "auto"]
    code, out, _ = plan(str(tiny_model), *arguments, "--json")
    assert code == 0
    planned = json.loads(out)
    options = LoadOptions(max_ctx=512, max_concurrency=2, chunk=0, threads=1)
    with Luce.load_with(tiny_model, options) as luce:
        report = luce.memory_report()
        assert luce.info.chunk == planned["chunk"] == 512
        assert report["prefix_cache"]["budget_bytes"] == planned["prefix_cache_bytes"]
        assert luce.generate("a", max_tokens=2).text is not None
    sizes = {part["what"]: part["bytes"] for part in planned["parts"]}
    assert sizes["state"] + sizes["prefix cache, pages"] == report["state"]["total_bytes"]
    assert sizes["graphs"] == report["graph_bytes"]


def test_a_header_is_enough(plan, tmp_path: Path) -> None:
    from pyluce.weights.shards import Shard

    with Shard(luce_tiny_path()) as shard:
        offset = shard.header.data_offset
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(luce_tiny_path().read_bytes()[:offset])
    whole = plan("--host-memory", "4", "--json")
    assert plan(str(cut), "--host-memory", "4", "--json") == whole
    assert plan(str(tmp_path / "none.gguf"))[0] == 1


WIDTH_1 = ("--verify-width", "1")


def test_what_does_not_fit_names_what_would(plan) -> None:
    code, _, err = plan("--max-ctx", "8192", *WIDTH_1, "--max-concurrency", "64", "--host-memory", "0.25")
    assert code == 1
    assert "--max-concurrency: the state of 64 sequences of 8192 tokens takes" in err
    most = int(err.rsplit("at most ", 2)[1].split()[0])
    assert plan("--max-ctx", "8192", *WIDTH_1, "--max-concurrency", str(most), "--host-memory", "0.25")[0] == 0
    assert plan("--max-ctx", "8192", *WIDTH_1, "--max-concurrency", str(most + 1), "--host-memory", "0.25")[0] == 1
    tokens = int(err.rsplit("of at most ", 1)[1].split()[0])
    assert plan("--max-ctx", str(tokens), *WIDTH_1, "--max-concurrency", "64", "--host-memory", "0.25")[0] == 0
    assert plan("--max-ctx", str(tokens + 256), *WIDTH_1, "--max-concurrency", "64", "--host-memory", "0.25")[0] == 1


def test_the_large_model_on_a_profile(plan) -> None:
    code, out, _ = plan("--like", "UD-Q4_K_XL", "--profile", "qwen-next-strix", "--max-concurrency", "1", "--json")
    assert code == 0
    found = json.loads(out)
    assert found["device"] == {"name": "hip:0", "memory": "unified", "architecture": "gfx1151"}
    assert found["budget_bytes"] == 96 * 2**30 - 96 * 2**30 // 10
    assert (found["n_ctx"], found["slots"]) == (65536, 1)
    assert found["chunk"] == found["automatic_chunk"] == 4096, "kept prompts come before more rows"
    assert [p["bytes"] for p in found["parts"] if p["what"] == "draft head"] == [2786568256]
    code, out, _ = plan("--like", "UD-Q4_K_XL", "--profile", "qwen-next-strix", "--verify-width", "1", "--json")
    assert code == 0 and not any("draft" in p["what"] for p in json.loads(out)["parts"])
    code, out, _ = plan(
        "--like", "ud-q4_k_xl", "--profile", "qwen-next-r9700-strix", "--max-concurrency", "1", "--json"
    )
    assert code == 0
    split = json.loads(out)
    assert (split["n_ctx"], split["expert_device"]) == (131072, "hip:1")
    assert (split["chunk"], split["prompt_streams"], split["prompt_streams_why"]) == (4096, 2, None)
    assert (split["link"]["measured"], split["link"]["assumed"]) == (False, "PCIe 4.0 x4")
    assert split["link"]["why_not_measured"] == "hip:0 and hip:1 as the profile says, not as found here"
    assert found["link"] is None and found["prompt_streams"] == 1
    documented = (
        (ROOT / "docs" / "memory.md").read_text(encoding="utf-8").split("## The plan as JSON")[1].split("## ")[0]
    )
    keys = [*split, *split["link"], *split["largest"], *split["parts"][0]]
    assert [key for key in keys if f"`{key}`" not in documented] == []
    code, out, _ = plan("--like", "ud-q4_k_xl", "--profile", "qwen-next-strix", "--chunk", "512")
    assert code == 0 and "chunk     512 tokens (auto: " in out
    assert "note: the type of each tensor is not published" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--like", "x"], "--like: expected one of gsq-rco, iq4_nl, ud-q4_k_xl, found 'x'"),
        (["--like", "iq4_nl", "m.gguf"], "--model and --like contradict each other"),
        (
            ["--profile", "x"],
            "--profile: expected one of cpu, qwen-next-cuda, qwen-next-r9700-strix, qwen-next-strix, tiny, found 'x'",
        ),
        (["--expert-device", "cpu"], "--expert-device: expected another device than the target"),
        (["--expert-placement", "auto"], "--expert-placement: expected with expert_device only"),
        (
            ["--profile", "qwen-next-strix", "--expert-budget-mib", "1"],
            "--expert-budget-mib: expected with expert_placement only",
        ),
        (["--device-memory", "8"], "--device-memory and --memory-kind belong together"),
        (["--device-memory", "8", "--memory-kind", "unified"], "--device-memory: expected with a GPU"),
        (["--like", "iq4_nl", "--profile", "qwen-next-r9700-strix"], "no split can be planned"),
        (["--host-memory", "0"], "--host-memory"),
    ],
)
def test_bad_flags(plan, arguments: list[str], message: str) -> None:
    code, out, err = plan(*arguments)
    assert (code, out) == (2, "")
    assert message in err


def test_a_gpu_that_is_not_here(plan, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["plan", "--device", "cuda:0", "--device-memory", "1", "--memory-kind", "discrete", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert code == 0
    assert {part["what"]: part["place"] for part in found["parts"]}["token embedding, mapped"] == "host"
    assert found["available_bytes"] == 2**30
