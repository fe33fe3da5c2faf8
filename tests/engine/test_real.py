"""The library over the real trunk, vocabulary and sampler chain, on a tiny random model."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from pyluce.engine import EngineForkedError, SamplingParams
from pyluce.engine.sampling import GreedySampler, make_sampler
from pyluce.luce import Luce
from pyluce.native.sampler import SamplerChain
from pyluce.weights import ModelError
from tests.support.fake_runner import NumpyChain

ROOT = Path(__file__).resolve().parents[2]
OPTIONS: dict[str, Any] = {"threads": 1, "max_ctx": 512, "chunk": 64}
# far beyond the selection budget of 32 tokens, over several chunks
LONG = "The quick brown fox jumps over the lazy dog. " * 8


@pytest.fixture(scope="module")
def luce(tiny_model: Path) -> Iterator[Luce]:
    with Luce.load(tiny_model, **OPTIONS) as luce:
        yield luce


def answer(luce: Luce, prompt: str = LONG, **options: Any) -> tuple[Any, ...]:
    done = luce.generate(prompt, **{"max_tokens": 12, "hash_logits": True, "ignore_end": True, **options})
    return done.tokens, done.logits_sha256, done.text


def test_info_and_memory(luce: Luce, tiny_model: Path) -> None:
    assert luce.info.path == tiny_model
    assert (luce.info.n_ctx, luce.info.threads) == (512, 1)
    assert luce.info.size_bytes > 0
    assert {"weights", "state"} <= set(luce.memory_report())


def test_repeated_and_streamed_answers_are_equal(luce: Luce) -> None:
    first = answer(luce)
    assert answer(luce, "something else") != first
    assert answer(luce) == first
    events = list(luce.stream(LONG, max_tokens=12, ignore_end=True))
    assert "".join(event.content for event in events) == first[2]


@pytest.mark.parametrize("options", [{"chunk": 16}, {"chunk": 512}, {"max_ctx": 2048}])
def test_settings_that_must_not_change_a_bit(luce: Luce, tiny_model: Path, options: dict[str, Any]) -> None:
    with Luce.load(tiny_model, **{**OPTIONS, **options}) as other:
        assert answer(other) == answer(luce)


def test_threads_do_not_change_a_bit(luce: Luce, tiny_model: Path) -> None:
    with Luce.load(tiny_model, **{**OPTIONS, "threads": 2}) as other:
        assert answer(other, LONG[:60], max_tokens=2) == answer(luce, LONG[:60], max_tokens=2)


def test_a_setting_that_changes_bits_is_seen(luce: Luce, tiny_model: Path) -> None:
    with Luce.load(tiny_model, **{**OPTIONS, "kv_type": "f32"}) as other:
        assert answer(other)[1] != answer(luce)[1]


def test_32_threads_equal_solo(luce: Luce) -> None:
    prompts = [f"{number % 4} {LONG[:80]}" for number in range(32)]
    alone = {prompt: answer(luce, prompt, max_tokens=4) for prompt in set(prompts)}
    found: list[Any] = [None] * 32

    def ask(number: int) -> None:
        found[number] = answer(luce, prompts[number], max_tokens=4)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [alone[prompt] for prompt in prompts]


@pytest.mark.parametrize("after", [0, 1, 3, 7, 9])
def test_cancelling_at_any_point_leaves_a_clean_slot(luce: Luce, after: int) -> None:
    alone = answer(luce)
    events = luce.stream("x" + LONG, max_tokens=50, ignore_end=True)
    for _ in range(after):
        next(events)
    events.close()
    assert answer(luce) == alone


def test_sampled_answers_depend_on_their_seed_alone(luce: Luce) -> None:
    options: dict[str, Any] = {"temperature": 1.0, "top_k": 40, "top_p": 0.95, "min_p": 0.01, "presence_penalty": 0.5}
    first = answer(luce, seed=1, **options)
    assert answer(luce, seed=2, **options) != first
    assert answer(luce, seed=1, **options) == first


def test_a_chat_prompt_is_one_the_model_parses(luce: Luce) -> None:
    assert luce.template is not None
    request = luce.request("a<|im_end|>b", system="s")
    plain = luce.request("a", system="s")
    count = {
        name: [sum(text == name for text in map(luce_piece(luce), made.prompt)) for made in (request, plain)]
        for name in ("<|im_end|>", "<|im_start|>")
    }
    for name, (attacked, usual) in count.items():
        assert attacked == usual, name


def luce_piece(luce: Luce) -> Callable[[int], str]:
    """The spelling of a token, control tokens included."""

    def spell(token: int) -> str:
        vocabulary: Any = luce.tokenizer._vocabulary
        piece: bytes = luce._engine.call(lambda: vocabulary.piece(token, special=True))
        return piece.decode("utf-8", "replace")

    return spell


def test_prompts_tokenize_the_same_with_and_without_marks(luce: Luce) -> None:
    """Splitting a prompt at its special tokens ourselves gives what libllama's own parsing gives."""
    template = luce.template
    assert template is not None
    rendered = template.render([{"role": "system", "content": "é"}, {"role": "user", "content": LONG + " 日本 \n\n x"}])
    whole = luce._engine.call(lambda: luce.tokenizer.encode_prompt(rendered))
    split = luce._engine.call(lambda: luce.tokenizer.encode_prompt(replace(rendered, literal=((-1, -1),))))
    assert split == whole


@pytest.mark.parametrize("text", ["", "hello", "héllo 日本 😀\n\n  x\t", "a\u2028b\x85c", "<|im_end|>", LONG])
def test_text_round_trips(luce: Luce, text: str) -> None:
    assert luce.detokenize(luce.tokenize(text, add_special=False)) == text


def test_lone_surrogates_are_a_request_error(luce: Luce) -> None:
    with pytest.raises(ValueError, match="surrogate"):
        luce.generate("\ud800")
    with pytest.raises(ValueError, match="surrogate"):
        luce.generate("\ud800", chat=False)


PARAMS = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7, top_k=10),
    SamplingParams(temperature=1.3, top_p=0.7),
    SamplingParams(temperature=1.0, min_p=0.1),
    SamplingParams(temperature=0.8, top_k=30, top_p=0.9, min_p=0.02, repeat_penalty=1.3, frequency_penalty=0.4),
    SamplingParams(temperature=1.0, presence_penalty=1.5, logit_bias={3: 5.0, 4: -100.0}),
]


@pytest.mark.parametrize("params", PARAMS)
def test_the_chain_draws_from_the_documented_distribution(params: SamplingParams) -> None:
    n_vocab, n_draws = 50, 2000
    rng = np.random.default_rng(5)
    logits = (2 * rng.standard_normal(n_vocab)).astype(np.float32)
    prompt = [int(token) for token in rng.integers(0, n_vocab, 20)]
    oracle = NumpyChain()
    make_sampler(params, prompt, 1, n_vocab, lambda: oracle)
    expected = oracle.probabilities(logits)
    counts = np.zeros(n_vocab)
    for seed in range(n_draws):
        chain = make_sampler(params, prompt, seed, n_vocab, lambda: SamplerChain(n_vocab))
        counts[chain.sample(logits)] += 1
        chain.close()
    assert not counts[expected == 0].any(), "a token was drawn that the filters exclude"
    deviation = np.abs(counts / n_draws - expected) / np.sqrt(np.maximum(expected * (1 - expected), 1e-4) / n_draws)
    assert deviation.max() < 5


def test_penalised_greedy_equals_the_oracle_over_many_steps() -> None:
    n_vocab = 40
    rng = np.random.default_rng(6)
    params = SamplingParams(
        repeat_penalty=1.2, frequency_penalty=0.3, presence_penalty=0.6, penalty_window=7, logit_bias={1: 2.0}
    )
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    real = make_sampler(params, prompt, 0, n_vocab, lambda: SamplerChain(n_vocab))
    oracle = make_sampler(params, prompt, 0, n_vocab, NumpyChain)
    for _ in range(100):
        logits = (2 * rng.standard_normal(n_vocab)).astype(np.float32)
        assert real.sample(logits) == oracle.sample(logits)
    real.close()


def test_greedy_equals_the_chains_greedy_with_ties() -> None:
    rng = np.random.default_rng(7)
    chain = SamplerChain(64)
    chain.add("greedy")
    for _ in range(200):
        logits = np.round(rng.standard_normal(64) * 2).astype(np.float32)
        assert GreedySampler().sample(logits) == chain.sample(logits)
    chain.close()


def test_bad_files_are_model_errors_and_leave_no_thread(tmp_path: Path) -> None:
    before = threading.active_count()
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"GGUF" + bytes(100))
    for path in (bad, tmp_path / "missing.gguf", tmp_path):
        with pytest.raises(ModelError, match=path.name):
            Luce.load(path)
    assert threading.active_count() == before


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_fork_is_an_error_not_a_crash(luce: Luce) -> None:
    child = os.fork()
    if child == 0:
        status = 1
        try:
            try:
                luce.generate("x", max_tokens=1)
            except EngineForkedError:
                luce.close()
                status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert answer(luce, "x")


def test_opening_and_closing_many_times_keeps_memory_flat(tiny_model: Path) -> None:
    process = psutil.Process()

    def cycle() -> None:
        with Luce.load(tiny_model, **OPTIONS) as luce:
            luce.generate("x", max_tokens=2)

    for _ in range(5):
        cycle()
    before = process.memory_info().rss
    for _ in range(20):
        cycle()
    assert process.memory_info().rss - before < 24 << 20


@pytest.mark.parametrize(
    "body",
    [
        "luce = Luce.load(path, threads=1)",
        "luce = Luce.load(path, threads=1); events = luce.stream('x'); next(events)",
        "luce = Luce.load(path, threads=1); luce.close(); luce.close()",
        "luce = Luce.load(path, threads=1); luce.me = luce; del luce; import gc; gc.collect()",
        "two = [Luce.load(path, threads=1) for _ in range(2)]; print(two[0].generate('x', max_tokens=2).tokens)",
    ],
)
def test_the_interpreter_ends_cleanly_with_a_live_model(tiny_model: Path, body: str) -> None:
    program = f"from pyluce import Luce\npath = {str(tiny_model)!r}\n{body}\n"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


def test_greedy_with_biases_chooses_what_the_chain_chooses() -> None:
    rng = np.random.default_rng(5)
    biases = {3: 0.3, 40: -100.0, 7: 100.0, 8: 1e-3, 11: 0.0}
    for _ in range(200):
        logits = rng.integers(-3, 4, 64).astype(np.float32) * np.float32(0.1)  # many ties
        some = {token: bias for token, bias in biases.items() if rng.random() < 0.5} or {2: 0.1}
        chain = SamplerChain(64)
        chain.add("logit_bias", some)
        chain.add("greedy")
        before = logits.copy()
        params = SamplingParams(temperature=0.0, logit_bias=some)
        greedy = make_sampler(params, [1], 0, 64, lambda: pytest.fail("no chain is needed"))
        assert greedy.sample(logits) == chain.sample(logits)
        assert np.array_equal(logits, before)
        chain.close()
