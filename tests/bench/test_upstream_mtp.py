"""What `bench.device_spec` compares: the draws that both sides share, the tables, and upstream's steps with a draft head."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from bench.acceptance import PROMPTS
from bench.drafts import Acceptance, Forced, forced_rates, greedy_text
from bench.head_file import RATIOS, write_head
from bench.spec_report import report
from bench.upstream_mtp import Model, Setting, Speculation
from pyluce.native import load_libraries
from pyluce.native.vocabulary import Vocabulary
from pyluce.text import Tokenizer
from pyluce.weights import open_model
from tests.support.models import luce_tiny_path
from tools.synth import MICRO, write_model

N_TOKENS = 40


@pytest.mark.parametrize("n_drafts", [1, 3, 7])
def test_few_draws_have_the_acceptance_that_is_meant(n_drafts: int) -> None:
    for chance in (0.4, 0.6, 0.8):
        counts, draws, again = Acceptance(), Forced(chance, 100, 0), Forced(chance, 100, 0)
        for _ in range(96):
            right, following = draws.accept([0] * n_drafts, [])
            assert (right, following) == again.accept([1] * n_drafts, [2])
            assert 0 <= right <= n_drafts and 0 <= following < 100
            counts.add(n_drafts, right)
        assert counts.rates()[0] == pytest.approx(chance, abs=0.07)
    assert [Forced(0.5, 9, 0).accept([0] * 7, []) for _ in range(3)] != [
        Forced(0.5, 9, i).accept([0] * 7, []) for i in range(3)
    ]


def test_acceptance_counts_what_was_reached() -> None:
    counts = Acceptance()
    for n_drafts, right in ((3, 0), (3, 2), (3, 3), (1, 1), (0, 0)):
        counts.add(n_drafts, right)
    assert counts.rates() == [3 / 4, 1.0, 1 / 2]


class Counting:
    """An engine of two drafts a step."""

    tokens = steps = 0

    def step(self, token: int, accept: object) -> int:
        right, following = accept([0, 0], [0, 0, 0])  # type: ignore[operator]
        self.tokens, self.steps = self.tokens + right + 1, self.steps + 1
        return int(following)

    def wait(self) -> None:
        pass


def test_tables_have_both_sides_at_the_same_acceptance() -> None:
    row = forced_rates(Counting(), 100, 0.6, 3, 32)
    assert row["tokens a step"] == pytest.approx(1 + 0.6 + 0.36, abs=0.1)
    ours = {"without head": {"rate": 500.0}, "0.6 3": {"rate": 700.0, "gain": 1.4, "tokens a step": 1.97}}
    theirs = {
        "without head": {"rate": 200.0},
        "0.6 3": {"rate": 220.0, "gain": 1.1, "tokens a step": 1.97, "driver": 0.02},
    }
    tiny = {"rate": 10.0, "tokens a step": 3.0, "acceptance": [0.9, 0.8]}
    text = report(
        {
            "ours": {"forced": {"512": ours}, "tiny": {"prose, without head": {"rate": 5.0}, "prose, width 8": tiny}},
            "upstream": {"forced": {"512": theirs}},
        }
    )
    assert "After 512 tokens; without a head, tokens a second: ours 500.0, upstream 200.0" in text
    assert "| 0.6 | ours |  | 1.40 (700; 1.97) |" in text
    assert "| 0.6 | upstream |  | 1.10 (220; 1.97) |" in text
    assert "| prose | ours | 5 |  | 2.00 (10; 3.00) |  |" in text
    assert "| prose | ours | 0.90 0.80 | 3.00 |" in text


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Model, Model]]:
    load_libraries()
    path = tmp_path_factory.mktemp("head") / "head.gguf"
    write_head(luce_tiny_path(), path)
    with closing(Model(luce_tiny_path(), None)) as trunk, closing(Model(path, None, head=True)) as head:
        yield trunk, head


def prompt() -> list[int]:
    with closing(Vocabulary(luce_tiny_path())) as vocabulary:
        return Tokenizer(vocabulary).encode_text(PROMPTS["prose"][0])


def text_of(engine: Speculation) -> tuple[list[int], float]:
    """The greedy text, and its tokens a step."""
    first = engine.prefill(prompt())
    saved = engine.save()
    engine.tokens = engine.steps = 0
    text, _ = greedy_text(engine, first, N_TOKENS, Acceptance())
    tokens_a_step = engine.tokens / engine.steps
    engine.restore(saved)
    again, _ = greedy_text(engine, first, N_TOKENS, Acceptance())
    assert again == text
    return text, tokens_a_step


@pytest.mark.parametrize("on_host", [False, True])
def test_upstream_drafts_and_takes_back(models: tuple[Model, Model], on_host: bool) -> None:
    """The text is the one without drafts, though drafts are wrong and are taken back; again from a restored state."""
    setting = Setting(256, 8, on_host)  # a prompt of several chunks
    with closing(Speculation(models[0], None, setting, 1)) as engine:
        plain, one = text_of(engine)
    with closing(Speculation(models[0], models[1], setting, 4)) as engine:
        assert engine.on_device == [not on_host, True]
        text, tokens_a_step = text_of(engine)
    assert text == plain
    assert one == 1 and 2.2 < tokens_a_step < 4


def test_control_drafts_beside_the_wrong_hidden_row(
    models: tuple[Model, Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the hidden row of the last token that was right, drafts are worse."""
    monkeypatch.setattr(Speculation, "_accept", lambda *_: None)
    with closing(Speculation(models[0], models[1], Setting(256, 8), 4)) as engine:
        assert text_of(engine)[1] < 2


def test_a_head_file(tmp_path: Path) -> None:
    """It is one that pyluce takes too, with its own embedding and output; a model without a head is refused."""
    whole = tmp_path / "m.gguf"
    write_model(whole, MICRO)
    with pytest.raises(ValueError, match="expected a draft head in .*m.gguf, found none"):
        write_head(whole, tmp_path / "h.gguf")
    write_head(luce_tiny_path(), tmp_path / "h.gguf")
    with open_model(luce_tiny_path(), draft=tmp_path / "h.gguf") as model:
        assert {"token_embd.weight", "output.weight"} <= set(model.mtp.tensors)
        assert not any(model.shards[-1].metadata[RATIOS].numbers())
