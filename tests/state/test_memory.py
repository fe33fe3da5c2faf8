"""Whether all slots' state fits is known before anything is allocated."""

from __future__ import annotations

from pathlib import Path

import pytest

from pyluce.luce import Luce
from pyluce.options import OptionError
from pyluce.state import memory
from pyluce.state.layout import StateOptions, state_bytes, state_layout
from pyluce.state.memory import available_bytes
from pyluce.weights import open_model
from tests.support.runs import open_runner

ALIGNMENT = 64
OPTIONS = StateOptions(n_slots=4, n_ctx=1000, kv_type="f16", reach=0, ring=1, conv_margin=1, ple_margin=1)


@pytest.mark.parametrize("n_slots", [1, 3, 16])
@pytest.mark.parametrize("kv_type", ["f16", "f32"])
@pytest.mark.parametrize("max_rollback", [0, 8])
def test_the_computed_size_is_the_allocated_one(
    tiny_model: Path, n_slots: int, kv_type: str, max_rollback: int
) -> None:
    with open_runner(tiny_model, n_slots=n_slots, kv_type=kv_type, max_rollback=max_rollback, n_ctx=700) as runner:
        allocated = runner._pool.report()["total_bytes"]
        layout = state_layout(runner.hparams, runner.options.state(runner.hparams))
        computed = state_bytes(runner.hparams, runner.options.state(runner.hparams))
    assert computed <= allocated <= computed + ALIGNMENT * len(layout)


def test_by_hand(tiny_model: Path) -> None:
    with open_model(tiny_model) as file:
        h = file.hparams
    pages, linear, full = 4 * 16 + 1, sum(h.recurrent_layers), len(h.recurrent_layers) - sum(h.recurrent_layers)
    kv = full * pages * 64 * h.head_dim * h.n_head_kv * 2 * 2
    indexer = full * pages * h.indexer_dim * (64 + 16) * 4
    gdn = 4 * linear * h.ssm_state**2 * h.ssm_v_heads * 4
    conv = 4 * linear * h.conv_channels * h.ssm_conv_kernel * 4
    assert h.ple is not None
    ple = 4 * h.hc_count * h.n_embd * ((h.ple.conv_kernel - 1) * h.ple.ngram_size + 1) * 4
    assert state_bytes(h, OPTIONS) == kv + indexer + gdn + conv + ple + 4 * 16 * 4


def test_loading_refuses_it_before_any_weight_is_read(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: 64 << 20)
    stages: list[str] = []
    with pytest.raises(
        OptionError,
        match=r"max_concurrency: the state of 64 sequences of 4096 tokens takes \d+\.\d\d GiB.* at most \d+ would fit, "
        r"64 of at most \d+ tokens would: lower max_concurrency, max_ctx or chunk",
    ):
        Luce.load(
            tiny_model, threads=1, max_ctx=4096, max_concurrency=64, progress=lambda stage, *_: stages.append(stage)
        )
    assert stages == []
    with Luce.load(tiny_model, threads=1, max_ctx=256, max_concurrency=2) as luce:
        assert len(luce.stats().slots) == 2


def test_a_control_groups_limit_counts(tmp_path: Path) -> None:
    system = available_bytes(tmp_path)
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("400000\n")
    assert available_bytes(tmp_path) == 600_000 < system
    (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 50000\n")
    assert available_bytes(tmp_path) == 650_000
    (tmp_path / "memory.current").write_text("9000000\n")
    assert available_bytes(tmp_path) == 0
    (tmp_path / "memory.max").write_text("max\n")
    assert available_bytes(tmp_path) > 1_000_000


def test_a_version_1_control_group(tmp_path: Path) -> None:
    folder = tmp_path / "memory"
    folder.mkdir()
    (folder / "memory.limit_in_bytes").write_text("1000000\n")
    (folder / "memory.usage_in_bytes").write_text("900000\n")
    (folder / "memory.stat").write_text("total_inactive_file 100\n")
    assert available_bytes(tmp_path) == 100_100
