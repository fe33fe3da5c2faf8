"""The floor that measurements are held against, and the table's arithmetic."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bench.cpu_vs_upstream import TESTS, parse_test, ratio, table
from bench.floor import Floor, Machine, weight_floor
from pyluce.weights import open_model
from tools.synth import MICRO, write_model


def test_only_the_used_experts_count(tmp_path: Path) -> None:
    some, every = tmp_path / "some.gguf", tmp_path / "every.gguf"
    write_model(some, MICRO)
    write_model(every, replace(MICRO, n_expert_used=MICRO.n_expert))
    with open_model(some) as model:
        experts = [info for name, info in model.tensors.items() if "_exps." in name]
        rows = [model.tensors[name].nbytes for name in ("token_embd.weight", "per_layer_token_embd.weight")]
        unread = sum(rows) if "output.weight" in model.tensors else rows[1]
        size = model.size_bytes
    unused = 1 - MICRO.n_expert_used / MICRO.n_expert
    of_some, of_every = weight_floor(some), weight_floor(every)
    assert of_every.decode_bytes == of_every.weight_bytes == size - unread
    assert of_every.decode_bytes - of_some.decode_bytes == unused * sum(info.nbytes for info in experts)
    assert of_every.chunk_flops - of_some.chunk_flops == unused * sum(2 * info.nbytes // 4 for info in experts)
    head = 2 * MICRO.n_embd * MICRO.n_vocab
    assert of_some.decode_flops - of_some.chunk_flops == head


def test_tests_are_named_by_what_they_do() -> None:
    assert parse_test("prefill 512") == ("prefill", 512)
    assert parse_test("decode at 0") == ("decode", 0)
    with pytest.raises(ValueError, match="invalid literal"):
        parse_test("prefill many")


def test_the_table_holds_medians_of_ratios_within_a_round() -> None:
    speeds = [(100.0, 90.0), (200.0, 190.0), (50.0, 60.0)]
    pairs = [{"upstream": dict.fromkeys(TESTS, a), "ours": dict.fromkeys(TESTS, b)} for a, b in speeds]
    assert ratio(pairs[0], TESTS[0]) == 0.9
    text = table(Path("m.gguf"), pairs, Floor(10**9, 10**9, 10**9, 10**9), Machine(1e10, 1e11))
    lines = {line.split("|")[1].strip(): line for line in text.splitlines() if line.startswith("| ")}
    assert "| 0.95 (0.90 to 1.20) | 0.9 met | 90 GFLOP/s |" in lines["prefill 512"]
    assert "| 0.95 (0.90 to 1.20) | 1.0 missed | 90.0 GB/s |" in lines["decode at 512"]
