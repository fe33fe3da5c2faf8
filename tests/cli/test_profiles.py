"""Profiles: what they may say, who wins over them, what a dry run shows, and what asks for hardware that is not there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli.main import main
from cli.run import run
from pyluce.memory.machine import MemoryKind
from pyluce.native.library import search_path
from pyluce.profiles import FLAGS, ProfileError, load_profile, parse_profile, profile_paths
from tests.support.models import luce_tiny_path

SHIPPED = ["cpu", "qwen-next-cuda", "qwen-next-r9700-strix", "qwen-next-strix", "tiny"]


@pytest.fixture
def luce(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("LUCE_PROFILE_DIR", str(tmp_path / "profiles"))
    (tmp_path / "profiles").mkdir()

    def call(*arguments: str) -> tuple[int, str, str]:
        code = main(arguments)
        out, err = capsys.readouterr()
        return code, out, err

    return call


def dry(luce, *arguments: str) -> dict[str, tuple[object, str]]:
    code, out, err = luce("run", "--dry-run", "--json", *arguments)
    assert code == 0, err
    return {name: (s["value"], s["source"]) for name, s in json.loads(out)["settings"].items()}


def test_every_shipped_profile_can_be_read() -> None:
    assert [name for name in profile_paths() if name in SHIPPED] == SHIPPED
    for name in SHIPPED:
        profile = load_profile(name)
        assert profile.summary.startswith("For "), "it says for whom it is"
        assert profile.settings["device"].line > 1
    split = load_profile("qwen-next-r9700-strix")
    assert {key: split.settings[key].value for key in ("device", "expert_device", "max_ctx")} == {
        "device": "hip:0", "expert_device": "hip:1", "max_ctx": 131072,
    }  # fmt: skip
    card, strix = split.device("hip:0"), split.device("hip:1")
    assert card is not None and (card.kind, card.free_bytes) == (MemoryKind.DISCRETE, 32 << 30)
    assert strix is not None and strix.architecture == "gfx1151" and split.host_bytes == 96 << 30


def test_what_a_profile_may_say_are_flags_of_run() -> None:
    names = {parameter.name for parameter in run.params}
    assert names >= FLAGS
    of_one_prompt = {
        "prompt",
        "prompt_file",
        "max_tokens",
        "stop",
        "chat",
        "system",
        "thinking",
        "show_thinking",
        "as_json",
    }
    assert names - FLAGS == of_one_prompt | {"profile", "dry_run", "like", "quiet", "api_key", "collect_routing"}


def test_flags_win_over_variables_and_these_over_the_profile(luce, monkeypatch: pytest.MonkeyPatch) -> None:
    found = dry(luce, "--profile", "tiny")
    assert found["max_ctx"] == (4096, "profile, line 5")
    assert found["max_queue"] == (256, "default")
    monkeypatch.setenv("LUCE_MAX_CTX", "1024")
    assert dry(luce, "--profile", "tiny")["max_ctx"] == (1024, "LUCE_MAX_CTX")
    assert dry(luce, "--profile", "tiny", "--max-ctx", "2048")["max_ctx"] == (2048, "command line")
    monkeypatch.setenv("LUCE_PROFILE", "tiny")
    found = dry(luce)
    assert found["max_ctx"] == (1024, "LUCE_MAX_CTX") and found["default_max_tokens"] == (512, "profile, line 8")


def test_the_plan_of_the_split_on_any_machine(luce) -> None:
    code, out, err = luce("run", "--profile", "qwen-next-r9700-strix", "--dry-run", "--like", "ud-q4_k_xl")
    assert code == 0, err
    lines = out.splitlines()
    assert lines[0].startswith("profile   qwen-next-r9700-strix (")
    for start in (
        "device    hip:0 (gfx1201), discrete memory: 32.00 GiB available",
        "experts   hip:1 (gfx1151), unified memory: 96.00 GiB available",
        "hot       2,742 of 24,576 experts, learned while serving",
        "link      not measured: hip:0 and hip:1 as the profile says, not as found here; assumed 6.70 GB/s, 15.0 us a transfer (PCIe 4.0 x4: ",
        "          a decoded row sends 493.4 kB and gets 4,915.2 kB where no expert is hot: 2.25 ms",
        "context   131,072 tokens in 1 slot",
        "streams   2 chunks of a prompt at once",
        "note: hip:0 is not in this machine; planned with what the profile says of it",
        "note: hip:1 is not in this machine; planned with what the profile says of it",
    ):
        assert any(line.startswith(start) for line in lines), start
    target, there = lines.index("hip:0"), lines.index("hip:1, with the host")
    parts = {name: [line.strip().split("  ")[0] for line in lines[a + 1 : b]] for name, a, b in (
        ("target", target, there), ("there", there, lines.index("", there)),
    )}  # fmt: skip
    assert {"weights", "draft head", "hot experts", "state", "graphs", "in all"} <= set(parts["target"])
    assert {"routed experts", "graphs, by formula", "in all"} <= set(parts["there"])
    rows = {row[0]: row[1:] for row in (line.split() for line in lines[2 : lines.index("", 2)])}
    assert rows["expert_device"] == ["hip:1", "profile,", "line", "7"] and rows["expert_budget_mib"][0] == "8192"
    assert rows["spec"] == ["mtp", "default"] and rows["prompt_streams"][0] == "2"


def test_taking_back_what_a_profile_says(luce, monkeypatch: pytest.MonkeyPatch) -> None:
    profile = ("--profile", "qwen-next-r9700-strix", "--device", "hip:1")
    found = dry(luce, *profile, "--expert-device", "none", "--max-ctx", "32768")
    assert found["expert_device"] == (None, "command line") and found["expert_placement"][0] is None
    assert found["prompt_streams"][0] == 1, "of one device"
    monkeypatch.setenv("LUCE_EXPERT_BUDGET_MB", "1024")
    assert dry(luce)["expert_budget_mib"][0] is None, "a variable that is there for other runs"
    assert dry(luce, "--profile", "qwen-next-r9700-strix")["expert_budget_mib"] == (
        1024, "LUCE_EXPERT_BUDGET_MB",
    )  # fmt: skip


def test_absent_hardware_is_named_with_its_line(luce) -> None:
    if any((folder / "libggml-hip.so").is_file() for folder in search_path("hip")):
        pytest.skip("there may be a hip:0 here")
    for arguments in (("run", "-p", "x"), ("run",), ("hash", "--prompts", __file__)):
        code, _, err = luce(*arguments, "--profile", "qwen-next-r9700-strix")
        if arguments[0] == "hash":
            assert code == 2
            continue
        assert code == 1
        assert "qwen-next-r9700-strix.toml, line 6: device: expected hip:0, found " in err and " in this machine" in err
    code, _, err = luce("run", "-p", "x", "--device", "cuda:7")
    assert code == 1 and "--device: expected cuda:7, found " in err


def test_profiles_of_the_users_own(luce, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "profiles" / "mine.toml"
    text = "# For me. And more.\n\n[flags]\nmax_ctx = 512\nrepack = false\ncors_origin = ['http://a', 'http://b']\n"
    own.write_text(f"{text}model = '{luce_tiny_path()}'\n")
    found = dry(luce, "--profile", "mine")
    assert found["max_ctx"] == (512, "profile, line 4") and found["repack"] == (False, "profile, line 5")
    assert found["cors_origin"] == ("http://a, http://b", "profile, line 6")
    assert found["model"] == (str(luce_tiny_path()), "profile, line 7")
    (tmp_path / "profiles" / "tiny.toml").write_text("# For me too.\n[flags]\nmax_ctx = 256\n")
    assert dry(luce, "--profile", "tiny")["max_ctx"] == (256, "profile, line 3"), "the user's goes first"
    code, out, _ = luce("profiles")
    assert code == 0
    assert (
        "mine (yours): For me\n" in out and "tiny (yours): For me too\n" in out and "cpu (luce): For a machine" in out
    )
    code, out, _ = luce("profiles", "show", "mine")
    assert code == 0 and out == f"# {own}\n{own.read_text()}"
    code, _, err = luce("profiles", "show", "other")
    assert code == 2 and "expected one of cpu, mine, qwen-next-cuda" in err
    monkeypatch.delenv("LUCE_PROFILE_DIR")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "xdg"))
    (tmp_path / "xdg" / "luce" / "profiles").mkdir(parents=True)
    own.rename(tmp_path / "xdg" / "luce" / "profiles" / "moved.toml")
    assert "moved" in profile_paths() and "mine" not in profile_paths()


GOOD = """# For a test.
[flags]
device = "hip:0"
max_ctx = 64

[[devices]]
name = "hip:0"
memory = "unified"
gib = 1
[[devices]]
name = "hip:1"
memory = "discrete"
gib = 2.5
"""


def test_a_good_profile() -> None:
    profile = parse_profile("x", Path("x.toml"), GOOD)
    assert [(d.name, d.free_bytes) for d in profile.devices] == [("hip:0", 1 << 30), ("hip:1", 5 << 29)]
    assert profile.settings["max_ctx"].line == 4 and profile.host_bytes == 1 << 30
    assert parse_profile("x", Path("x.toml"), GOOD + "[host]\ngib = 3\n").host_bytes == 3 << 30


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            GOOD.replace("max_ctx", "max_context"),
            r"x.toml, line 4: expected in \[flags\] one of .*max_ctx.*, found 'max_context'",
        ),
        (GOOD.replace("max_ctx", "api_key"), r"x.toml, line 4: .* found 'api_key'"),
        (GOOD + "colour = 1\n", r"x.toml, line 14: expected in \[devices\] one of .*, found 'colour'"),
        (GOOD.replace("unified", "other"), "x.toml, line 8: memory: expected cpu, unified, discrete, found 'other'"),
        (GOOD.replace("gib = 2.5", "gib = -1"), "x.toml, line 13: gib: expected a positive number, found -1"),
        (GOOD.replace("gib = 1\n", ""), r"x.toml, \[\[devices\]\] 1: expected name, memory and gib, found no gib"),
        (GOOD + "[flag]\n", "x.toml, line 14: expected one of devices, flags, host, found 'flag'"),
        (GOOD + "x = \n", "x.toml: expected TOML, found: .*line 14"),
        ("flags = 1\n", r"x.toml, line 1: expected the table \[flags\], found 1"),
    ],
)
def test_bad_profiles_are_refused_with_their_line(text: str, message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        parse_profile("x", Path("x.toml"), text)


def test_bad_values_are_refused_with_their_line(luce, tmp_path: Path) -> None:
    (tmp_path / "profiles" / "bad.toml").write_text("# For a test.\n[flags]\nport = 8000\nmax_ctx = 'many'\n")
    code, _, err = luce("run", "--profile", "bad", "--dry-run")
    assert code == 2 and "bad.toml, line 4: max_ctx: 'many' is not a valid integer" in err
    (tmp_path / "profiles" / "bad.toml").write_text("# For a test.\n[flags]\nport = 8000\nmax_content = 1\n")
    code, _, err = luce("run", "--profile", "bad")
    assert code == 2 and "bad.toml, line 4: expected in [flags] one of" in err
    code, out, _ = luce("profiles")
    assert code == 0 and "bad (yours): cannot be used:" in out


def test_like_needs_a_dry_run(luce) -> None:
    code, _, err = luce("run", "--like", "ud-q4_k_xl")
    assert code == 2 and "--like: expected with --dry-run" in err
    code, _, err = luce("run", "--dry-run", "--cache-dir-mib", "5")
    assert code == 2 and "--cache-dir-mib: expected with cache_dir only" in err, "a dry run refuses what a run refuses"
