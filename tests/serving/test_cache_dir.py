"""The prefix cache on disk, through a loaded model: a restart gives back the bits that a cold run has, and what is wrong with a file is said."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pyluce import Luce
from pyluce.options import OptionError
from pyluce.state import entry_file
from tests.serving.test_prefix_cache import OPTIONS, prompt, run, same
from tests.support.disk import quick_disk  # noqa: F401
from tests.support.models import ModelCache, model_cache  # noqa: F401
from tests.support.real_model import tiny_model  # noqa: F401

ROOT = Path(__file__).resolve().parents[2]
LENGTHS = (1, 3, 4, 31, 63, 64, 65, 99)


@pytest.fixture(scope="module")
def cold(tiny_model: Path) -> Iterator[Luce]:  # noqa: F811
    with Luce.load(tiny_model, max_concurrency=1, prefix_cache_mib=0, **OPTIONS) as luce:
        yield luce


def load(model: Path, folder: Path, **options: Any) -> Luce:
    return Luce.load(model, **{"max_concurrency": 2, "prefix_cache_mib": 64, "cache_dir": folder, **OPTIONS, **options})


def disk(luce: Luce) -> dict[str, int]:
    report: Any = luce.memory_report()["prefix_cache"]
    return report["disk"]


def test_every_length_survives_a_restart(cold: Luce, tiny_model: Path, tmp_path: Path) -> None:  # noqa: F811
    with load(tiny_model, tmp_path) as luce:
        for shared in LENGTHS:
            run(luce, prompt(100), cuts=(shared,), n=1)
    written = {path.name: path.read_bytes() for path in tmp_path.glob("*.state")}
    assert len(written) == 2 * len(LENGTHS) and not list(tmp_path.glob("*.part"))
    with load(tiny_model, tmp_path) as luce:
        assert luce.info.warnings == ()
        assert disk(luce)["entries"] == len(written)
        for shared in LENGTHS:
            second = prompt(100)[:shared] + prompt(60, seed=shared)
            answer = run(luce, second, cuts=(shared,))
            assert answer.timings.cached_tokens == shared
            assert same(answer, run(cold, second, cuts=(shared,)))
        whole = run(luce, prompt(100), cuts=(99,))
        assert whole.timings.cached_tokens == 100 and same(whole, run(cold, prompt(100), cuts=(99,)))
        assert disk(luce)["hits"] == len(LENGTHS) + 1


def test_a_conversation_is_stored_by_its_differences(cold: Luce, tiny_model: Path, tmp_path: Path) -> None:  # noqa: F811
    tokens, cuts = prompt(450), tuple(range(64, 450, 64))
    with load(tiny_model, tmp_path) as luce:
        run(luce, tokens, cuts=cuts, n=1)
    sizes = sorted(path.stat().st_size for path in tmp_path.glob("*.state"))
    assert len(sizes) == 8 and sizes[-1] < 2 * sizes[0], "each file has the pages that the one before lacks"
    with load(tiny_model, tmp_path) as luce:
        longer = tokens + prompt(20, seed=1)
        answer = run(luce, longer, cuts=(*cuts, 450))
        assert answer.timings.cached_tokens == 450 and same(answer, run(cold, longer, cuts=(*cuts, 450)))
        before: Any = luce.memory_report()["prefix_cache"]
        fork = tokens[:384] + prompt(20, seed=2)
        answer = run(luce, fork, cuts=cuts, n=1)
        assert answer.timings.cached_tokens == 384 and same(answer, run(cold, fork, cuts=cuts, n=1))
        after: Any = luce.memory_report()["prefix_cache"]
        page = luce._engine._core.resources.runner._pool.page_bytes  # type: ignore[attr-defined]
        own = 4 * luce.info.n_vocab
        recurrent = (before["n_bytes"] - before["entries"] * own - 8 * page) // before["entries"]
        assert after["n_bytes"] - before["n_bytes"] <= 2 * recurrent + own + page, "a fork shares its parent's pages"


def test_files_are_the_same_whoever_wrote_them(tiny_model: Path, tmp_path: Path) -> None:  # noqa: F811
    folders = [tmp_path / "alone", tmp_path / "after others"]
    for folder in folders:
        with load(tiny_model, folder) as luce:
            if folder != folders[0]:
                for seed in range(5, 9):
                    run(luce, prompt(130, seed=seed), n=20)
            run(luce, prompt(75), cuts=(33,), n=1)
    for path in folders[0].glob("*.state"):
        assert path.read_bytes() == (folders[1] / path.name).read_bytes()


def test_a_part_left_out_of_a_file_is_noticed(cold: Luce, tiny_model: Path, tmp_path: Path) -> None:  # noqa: F811
    """Control: each part of the state in turn is zero in the file, with right checksums; the answer is then another one."""
    tokens = prompt(98)  # within a block of keys: the raw ones are still needed
    second = tokens + prompt(40, seed=3)
    expected = run(cold, second, cuts=(98,))
    write = entry_file.write_entry
    with load(tiny_model, tmp_path / "whole") as luce:
        run(luce, tokens, n=1)
        pool = luce._engine._core.resources.runner._pool  # type: ignore[attr-defined]
        parts = [("pages", p) for p in pool.page_parts()] + [("recurrent", p) for p in pool.recurrent_parts(98)]
    kinds = {name.split(".")[0] for _, (name, _) in parts}
    assert kinds >= {"k", "v", "raw", "pooled", "gdn", "conv", "ple"}
    for kind in sorted(kinds):

        def omit(path: Path, image: Any, *rest: Any, kind: str = kind) -> None:
            for name, data in (("page_parts", image.pages), ("recurrent_parts", image.recurrent[None])):
                at = 0
                for part, size in getattr(image, name):
                    if part.split(".")[0] == kind:
                        data[:, at : at + size] = 0
                    at += size
            write(path, image, *rest)

        folder = tmp_path / kind
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("pyluce.state.disk_cache.write_entry", omit)
            with load(tiny_model, folder) as luce:
                run(luce, tokens, n=1)
        with load(tiny_model, folder) as luce:
            answer = run(luce, second, cuts=(98,))
            assert answer.timings.cached_tokens == 98
            assert not same(answer, expected), f"nobody noticed that {kind} is missing"


def test_another_setting_is_foreign(tiny_model: Path, tmp_path: Path, model_cache: ModelCache) -> None:  # noqa: F811
    written = tmp_path / "written"
    with load(tiny_model, written) as luce:
        run(luce, prompt(100), n=1)
    other = model_cache.tiny("Q4_K")
    for changed, name in (
        ({"kv_type": "f32"}, "options"),
        ({"chunk": 32}, "options"),
        ({"max_ctx": 256}, "options"),
        ({"chat_template": "{{ messages }}"}, "template"),
        ({"path": other}, "model"),
    ):
        options, folder = dict(changed), shutil.copytree(written, tmp_path / str(sorted(changed)))
        with load(options.pop("path", tiny_model), folder, **options) as luce:
            (warning,) = luce.info.warnings
            assert "made with another setting of" in warning and name in warning
            assert run(luce, prompt(100), n=1).timings.cached_tokens == 0
    with load(tiny_model, written, threads=2, max_concurrency=1, prefix_cache_mib=32) as luce:
        assert run(luce, prompt(100), n=1).timings.cached_tokens == 100, "these settings change no bit"


def test_one_process_at_a_time(tiny_model: Path, tmp_path: Path) -> None:  # noqa: F811
    with load(tiny_model, tmp_path):
        with pytest.raises(OptionError, match=f"cache_dir: .* is in use by process {os.getpid()}"):
            load(tiny_model, tmp_path)
    load(tiny_model, tmp_path).close()


def test_options_that_do_not_fit_each_other() -> None:
    with pytest.raises(OptionError, match="cache_dir: expected a prefix cache"):
        Luce.load(cache_dir=Path("x"), prefix_cache_mib=0)
    with pytest.raises(OptionError, match="cache_dir_mib: expected with cache_dir only"):
        Luce.load(cache_dir_mib=5)
    with pytest.raises(OptionError, match="cache_dir: expected a folder that can be written"):
        Luce.load(cache_dir=Path(__file__), max_concurrency=1)


def test_the_limit_holds_and_the_oldest_leaf_goes(cold: Luce, tiny_model: Path, tmp_path: Path) -> None:  # noqa: F811
    with load(tiny_model, tmp_path, cache_dir_mib=1) as luce:
        for seed in range(30):
            run(luce, prompt(120, seed=seed), n=1)
            assert disk(luce)["size_on_disk"] <= 1 << 20
    assert 0 < sum(path.stat().st_size for path in tmp_path.glob("*.state")) <= 1 << 20
    with load(tiny_model, tmp_path, cache_dir_mib=1) as luce:
        assert disk(luce)["size_on_disk"] <= 1 << 20
        assert run(luce, prompt(120, seed=29)).timings.cached_tokens == 120
        assert run(luce, prompt(120, seed=0)).timings.cached_tokens == 0


def test_a_full_disk_is_a_warning_and_serving_goes_on(
    cold: Luce,
    tiny_model: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    sync = os.fsync

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with load(tiny_model, tmp_path) as luce:
        monkeypatch.setattr(os, "fsync", full)
        for seed in range(3):
            answer = run(luce, prompt(100, seed=seed))
            assert same(answer, run(cold, prompt(100, seed=seed)))
        deadline = time.monotonic() + 20
        while disk(luce)["failures"] < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        warnings = [r for r in caplog.records if "No space left on device" in r.getMessage()]
        assert len(warnings) == 1, "said once, until writing works again"
        assert list(tmp_path.glob("*.state*")) == []
        monkeypatch.setattr(os, "fsync", sync)
        assert run(luce, prompt(100)).timings.cached_tokens == 100
    with load(tiny_model, tmp_path) as luce:
        assert disk(luce)["entries"] == 3, "what could not be written then is written at the end"


_WRITER = """
import sys
from pathlib import Path
from pyluce import Luce
from tests.serving.test_prefix_cache import OPTIONS, prompt, run
with Luce.load(sys.argv[1], max_concurrency=1, prefix_cache_mib=64, cache_dir=Path(sys.argv[2]), **OPTIONS) as luce:
    for seed in range(1000):
        run(luce, prompt(200, seed=seed), cuts=(70, 140), n=1)
        print(seed, flush=True)
"""


def test_kill_9_during_writes(cold: Luce, tiny_model: Path, tmp_path: Path) -> None:  # noqa: F811
    """Killed at different moments, the same folder each time: whatever is there afterwards is whole and right."""
    for kill_after in (3, 4, 6, 7):
        process = subprocess.Popen(
            [sys.executable, "-c", _WRITER, str(tiny_model), str(tmp_path)], stdout=subprocess.PIPE, cwd=ROOT
        )
        assert process.stdout is not None
        with process.stdout:
            for _ in range(kill_after):
                assert process.stdout.readline()
            deadline = time.monotonic() + 60
            while len(list(tmp_path.glob("*.state"))) < 3 * (
                kill_after - 2
            ):  # some of them, while others are on their way
                assert time.monotonic() < deadline and process.poll() is None
                time.sleep(0.001)
            os.kill(process.pid, signal.SIGKILL)
            process.wait(20)
    with load(tiny_model, tmp_path) as luce:
        assert luce.info.warnings == () and not list(tmp_path.glob("*.part"))
        used = 0
        for seed in range(7):
            tokens = prompt(200, seed=seed) + prompt(10, seed=seed + 50)
            answer = run(luce, tokens, cuts=(70, 140, 200))
            assert same(answer, run(cold, tokens, cuts=(70, 140, 200)))
            used += answer.timings.cached_tokens
        assert used >= 3 * 140
