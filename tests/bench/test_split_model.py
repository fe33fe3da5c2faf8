"""The model of two devices: its pipeline by hand, its physics' limits, and the residuals that docs/split.md shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import split_ours
from bench import split_parameters as p
from bench.split_coverage import BUDGET, CURVES, LUCE_TINY, assumed, by_share, from_table, skewed
from bench.split_model import budgets, main, residuals, streams
from bench.split_parameters import LINKS, R9700, STRIX
from bench.split_pipeline import Stage, busy, run_pipeline, seconds_of
from bench.split_times import ChunkTimes, Decode, OurDecode, best, reference_chunk, tokens
from pyluce.placement.hot import choose_hot
from pyluce.placement.table_file import RoutesError, read_routes

LINK = LINKS["x4"]


def test_one_stream_is_everything_in_a_row() -> None:
    spans = run_pipeline([Stage(1, 2, 4, 8, 16)], 3)
    assert seconds_of(spans) == 3 * 31
    assert busy(spans, "experts") == 12 / 93


def test_two_streams_by_hand() -> None:
    """Target 1 before and 1 after, no link, experts 3: R0 0-1, S0 1-4, R1 1-2, S1 4-7, C0 4-5, next layer's R0 5-6, C1 7-8, R1 8-9 ...

    The expert device works from 1 on: S0 1-4, S1 4-7, S0 7-10, S1 10-13, then C1 of the last layer 13-14.
    """
    spans = run_pipeline([Stage(1, 0, 3, 0, 1)] * 2, 2)
    experts = [(s.begin, s.end) for s in spans if s.where == "experts"]
    assert experts == [(1, 4), (4, 7), (7, 10), (10, 13)]
    target = [(s.stream, s.layer, s.begin, s.end) for s in spans if s.where == "target"]
    assert target == [
        (0, 0, 0, 1), (1, 0, 1, 2), (0, 0, 4, 5), (0, 1, 5, 6), (1, 0, 7, 8), (1, 1, 8, 9), (0, 1, 10, 11), (1, 1, 13, 14),
    ]  # fmt: skip


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_nothing_runs_twice_at_once_or_before_what_it_needs(n: int) -> None:
    spans = run_pipeline([Stage(0.5, 0.2, 1.0, 0.3, 0.1 * (i + 1)) for i in range(n)], 5)
    assert len(spans) == 5 * n * 5
    for where in ("target", "send", "experts", "back"):
        mine = [s for s in spans if s.where == where]
        assert all(a.end <= b.begin + 1e-12 for a, b in zip(mine, mine[1:], strict=False))
    for stream in range(n):
        for layer in range(5):
            chain = [s for s in spans if (s.stream, s.layer) == (stream, layer)]
            assert sorted(s.where for s in chain) == ["back", "experts", "send", "target", "target"]
            at = {s.where: s for s in chain if s.where != "target"}
            before, after = sorted((s for s in chain if s.where == "target"), key=lambda s: s.begin)
            order = [before, at["send"], at["experts"], at["back"], after]
            assert all(a.end <= b.begin + 1e-12 for a, b in zip(order, order[1:], strict=False))
    assert seconds_of(spans) >= 5 * n * 1.0, "never faster than the busiest device"


def test_the_figures_that_the_issue_names_are_within_15_percent() -> None:
    found = {(r.what, r.column): r for r in residuals(LINK, 0.25)}
    for key in (
        ("decode, short", "alone"),
        ("decode, short", "both"),
        ("prefill 16K", "alone"),
        ("prefill 16K", "both"),
    ):
        assert abs(found[key].share) <= 0.15, found[key]
    assert len(found) == 9 and all(abs(r.share) <= 0.20 for r in found.values())


def test_what_the_unknowns_are_taken_from_comes_back() -> None:
    decode = Decode()
    assert 1 / decode.alone(1) == pytest.approx(p.PLAIN_DECODE, rel=1e-6)
    gain = best(lambda w: tokens(p.DRAFT_ACCEPTANCE, w) / decode.alone(w))[0] * decode.alone(1)
    assert gain == pytest.approx(p.DRAFT_GAIN, rel=1e-3)
    assert 1e-6 < decode.kernel_seconds < 1e-5 and 0 < decode.row_seconds < 1 / p.PLAIN_DECODE
    assert reference_chunk().alone() == pytest.approx(p.PLAIN_PREFILL)


def test_no_term_of_16k_moves_what_a_strix_halo_alone_does_there() -> None:
    """Drafts' gain is published for it, so the row is that gain on the model's plain figure: docs/split.md says why it is off."""
    found = {(r.what, r.column): r for r in residuals(LINK, 0.25)}["decode after 16K", "alone"]
    plain = 1 / (1 / p.PLAIN_DECODE + p.SLOWER_AT_16K)
    assert found.model == pytest.approx(p.PROSE_GAIN * plain, rel=1e-3) and found.share > 0.15
    decode = Decode()
    bytes_of_one = (p.KEYS_AT_16K + p.KV_BYTES) / STRIX.bandwidth
    assert decode.at_16k(STRIX, 1) == p.SLOWER_AT_16K > 5 * bytes_of_one
    assert decode.at_16k(STRIX, 4) > decode.at_16k(STRIX, 1) > decode.at_16k(R9700, 1)


def test_our_steps_on_the_measured_device_come_back() -> None:
    """The model of ours, on the H200 itself, within 15 % of whole steps, which are none of its inputs."""
    decode = OurDecode(Decode())
    for rows, seconds in split_ours.STEPS.items():
        assert decode.measured_step(rows) == pytest.approx(seconds, rel=0.15), rows
    one, four, eight = (split_ours.OUTPUT.of(rows) for rows in (1, 4, 8))
    assert (one, four, eight) == pytest.approx(split_ours.OUTPUT.seconds)
    assert split_ours.OUTPUT.of(6) == pytest.approx((four + eight) / 2)


def test_the_sizes_are_those_of_the_published_facts() -> None:
    from pyluce.memory.facts import load_published

    h = load_published("ud-q4_k_xl").hparams
    assert (h.n_layer, h.n_embd, h.n_ff_exp, h.n_expert, h.n_expert_used, h.hc_count) == (
        p.N_LAYER, p.N_EMBD, p.N_FF, p.N_EXPERT, p.N_USED, p.HC,
    )  # fmt: skip
    known = load_published("ud-q4_k_xl").tensors.values()
    aside = ("token_embd.weight", "per_layer_token_embd.weight")
    dense = sum(t.n_values for t in known if not t.is_expert and t.name not in aside)
    assert p.TRUNK_WEIGHTS + p.HEAD_WEIGHTS + p.ROUTER_WEIGHTS == pytest.approx(dense, rel=0.002)


def test_more_hot_experts_never_slow_it_down_and_a_wider_link_neither() -> None:
    found = budgets(LINK, assumed(), range(0, 8193, 1024))
    assert list(found.values()) == sorted(found.values()) and found[8192] > found[0]
    wide = budgets(LINKS["x16"], assumed(), (0, 8192))
    assert wide[0] >= found[0] and wide[8192] >= found[8192]
    assert assumed()(8192) == pytest.approx(0.25, rel=1e-3) and skewed(0.0)(8192) == pytest.approx(0.1116, rel=1e-2)
    assert assumed()(1e9) == pytest.approx(1.0)


def test_a_table_of_another_model_by_share_of_its_experts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By the rule itself, with experts of one size: an eighth of luce-tiny's 128 experts are 16."""
    _, counts = read_routes(LUCE_TINY)
    whole = p.EXPERT_BYTES * p.N_LAYER * p.N_EXPERT / 2**20
    curve = by_share(LUCE_TINY)
    for n_hot in (0, 16, 40, 128):
        expected = choose_hot(counts, [1] * 8, n_hot).coverage(counts)
        assert curve(whole * n_hot / 128) == pytest.approx(expected, abs=1e-9)
    found = {name: make()(BUDGET) for name, make in CURVES.items()}
    assert list(found.values()) == sorted(found.values()) and found["even"] == pytest.approx(0.1116, rel=1e-2)
    assert main(["--shares", str(LUCE_TINY)]) == 0
    assert f"hot experts hold {curve(BUDGET):.0%} of the picks" in capsys.readouterr().out
    (tmp_path / "nothing.csv").write_text("0,0\n0,0\n")
    with pytest.raises(RoutesError, match="found zeros only"):
        by_share(tmp_path / "nothing.csv")
    with pytest.raises(SystemExit):
        main(["--shares", str(LUCE_TINY), "--routes", str(LUCE_TINY)])


def test_two_streams_are_worth_it_and_more_add_little() -> None:
    found = streams(LINK, 8192)
    assert found[2] > 1.5 * found[1] and found[4] < 1.05 * found[2]
    bound = ChunkTimes(1e-4, 0.0, 1e-3, 0.0, 0.0)
    assert bound.split(4096, 2, LINK) <= 1 / 1e-3
    assert R9700.bandwidth > STRIX.bandwidth


def test_a_routing_table_takes_the_place_of_the_assumption(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "routes.csv"
    row = ",".join(["9"] * 57 + ["1"] * 455)
    header = "# hotness table: n_layer=48 n_expert=512 n_expert_used=10\n"
    table.write_text(header + f"{row}\n" * 48)
    assert from_table(table)(8192) == pytest.approx(57 * 9 / (57 * 9 + 455), rel=0.01)
    assert (
        main(["--routes", str(table), "--json", str(tmp_path / "out.json"), "--plot", str(tmp_path / "out.svg")]) == 0
    )
    assert "hot experts hold 53% of the picks" in capsys.readouterr().out
    assert (tmp_path / "out.json").stat().st_size > 500 and "<svg" in (tmp_path / "out.svg").read_text()[:2000]
    table.write_text("1,2\n")
    with pytest.raises(SystemExit):
        main(["--routes", str(table)])
    assert "expected the model's 48 layers of 512 experts" in capsys.readouterr().err
