from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyluce.engine import ContextLimitError, EngineClosedError, FinishEvent, RequestError, SamplingParams, hash_tokens
from pyluce.luce import Luce
from pyluce.options import LoadOptions, OptionError, _cgroup_quota, available_cpus
from pyluce.text import TemplateError
from tests.support.fake_luce import fake_luce
from tests.support.fake_vocabulary import FakeVocabulary


@pytest.fixture
def luce() -> Iterator[Luce]:
    with fake_luce() as luce:
        yield luce


def test_generate_and_stream_say_the_same(luce: Luce) -> None:
    whole = luce.generate("hello", max_tokens=40, hash_logits=True)
    events = list(luce.stream("hello", max_tokens=40, hash_logits=True))
    assert whole.text == "".join(event.content for event in events)
    assert whole.reasoning == "".join(event.reasoning for event in events)
    finish = events[-1]
    assert isinstance(finish, FinishEvent)
    assert finish.logits_sha256 is not None
    assert whole.logits_sha256 == finish.logits_sha256.hex()
    assert len(whole.step_sha256) == len(whole.tokens) == 40
    assert whole.tokens_sha256 == hash_tokens(whole.tokens).hex()
    assert whole.reasoning, "the template opens the reasoning, so the answer begins there"


def test_chat_prompts_are_rendered_and_plain_ones_are_not(luce: Luce) -> None:
    vocabulary = FakeVocabulary()
    text = luce.tokenizer.decode(luce.request("hi", system="Be kind.", thinking=False).prompt)
    assert text == "system\nBe kind.\nuser\nhi\nassistant\n<think>\n\n</think>\n\n"
    assert luce.request("hi", chat=False).prompt == tuple(b"hi")
    assert luce.request(tokens=np.array([5, 6])).prompt == (5, 6)
    messages = [{"role": "user", "content": "a<|im_end|>"}]
    assert luce.request(messages=messages).prompt.count(vocabulary.token("<|im_end|>")) == 1


def test_a_drawn_seed_is_reported_and_repeats_the_answer(luce: Luce) -> None:
    first = luce.generate("x", temperature=1.5, max_tokens=20)
    again = luce.generate("x", temperature=1.5, max_tokens=20, seed=first.seed)
    other = luce.generate("x", temperature=1.5, max_tokens=20)
    assert first.tokens == again.tokens != other.tokens
    assert luce.generate("x", max_tokens=2).seed is None


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        (None, {}, "one of prompt, messages or tokens, found none"),
        ("a", {"tokens": [1]}, "found prompt and tokens"),
        (3, {}, "prompt: expected a string, found int"),
        ("a", {"chat": False, "system": "s"}, "system: expected with a chat prompt only"),
        (None, {"tokens": [1], "thinking": True}, "thinking: expected with a chat prompt only"),
        (None, {"messages": [{"role": "user", "content": "x"}], "system": "s"}, "system and messages"),
        (None, {"tokens": [1, 99999]}, r"tokens\[1\]"),
        (None, {"tokens": ["x"]}, "tokens: "),
        ("", {"chat": False}, "at least one token"),
        ("a", {"temprature": 1}, "unknown option temprature; sampling options are temperature"),
        ("a", {"temperature": 1, "sampling": SamplingParams()}, "sampling and temperature"),
        ("a", {"temperature": -1}, "temperature"),
        ("a", {"stop": ["ok", ""]}, r"stop\[1\]"),
        ("a", {"max_tokens": 0}, "max_tokens"),
        ("a", {"template_variables": {"messages": 1}}, "cannot be set by hand"),
    ],
)
def test_bad_requests_are_refused_at_the_call(luce: Luce, prompt: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises((RequestError, TemplateError), match=message):
        luce.stream(prompt, **options)
    assert luce.memory_report() == {"calls": 0}


def test_the_context_limit_is_checked_at_the_call() -> None:
    with fake_luce(LoadOptions(max_ctx=64)) as luce:
        with pytest.raises(ContextLimitError, match="context of 64"):
            luce.stream("x" * 100)
        with pytest.raises(ContextLimitError, match="found 64"):
            luce.stream("x", max_tokens=64)


def test_a_model_without_template_or_switch() -> None:
    with fake_luce(vocabulary=FakeVocabulary(chat_template=None)) as luce:
        with pytest.raises(TemplateError, match="no chat template"):
            luce.generate("hi")
        assert luce.generate("hi", chat=False, max_tokens=2).tokens
    with fake_luce(LoadOptions(chat_template="{{ messages[0].content }}")) as luce:
        with pytest.raises(RequestError, match="thinking: .*no such switch"):
            luce.generate("hi", thinking=False)
        assert luce.generate("hi", max_tokens=3).reasoning == ""


def test_stop_strings_and_finish_reasons(luce: Luce) -> None:
    text = luce.generate("x", chat=False, max_tokens=30).text
    stop = text[10:12]
    cut = luce.generate("x", chat=False, max_tokens=30, stop=stop)
    assert (cut.text, cut.finish_reason, cut.stop_string) == (text[: text.index(stop)], "stop", stop)


def test_32_threads_equal_solo(luce: Luce) -> None:
    prompts = [f"number {number % 8}" for number in range(32)]
    alone = {prompt: luce.generate(prompt, max_tokens=10, hash_logits=True) for prompt in set(prompts)}
    answers: list[Any] = [None] * 32

    def ask(number: int) -> None:
        answers[number] = luce.generate(prompts[number], max_tokens=10, hash_logits=True)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for prompt, answer in zip(prompts, answers, strict=True):
        assert (answer.tokens, answer.logits_sha256, answer.text) == (
            alone[prompt].tokens,
            alone[prompt].logits_sha256,
            alone[prompt].text,
        )


def test_closing_the_stream_cancels(luce: Luce) -> None:
    events = luce.stream("x", ignore_end=True)
    next(events)
    events.close()
    before = luce.memory_report()["calls"]
    time.sleep(0.05)
    assert luce.memory_report()["calls"] == before < 400


def test_after_close_every_use_is_an_error() -> None:
    luce = fake_luce()
    events = luce.stream("x", ignore_end=True)
    next(events)
    luce.close()
    luce.close()
    with pytest.raises(EngineClosedError):
        list(events)
    for use in (lambda: luce.generate("x"), lambda: luce.tokenize("x"), luce.memory_report):
        with pytest.raises(EngineClosedError):
            use()


def test_a_luce_dropped_without_close_ends_its_thread() -> None:
    before = threading.active_count()
    luce = fake_luce()
    assert threading.active_count() == before + 1
    del luce
    gc.collect()
    deadline = time.monotonic() + 10
    while threading.active_count() > before:
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_tokenize_and_detokenize(luce: Luce) -> None:
    assert luce.detokenize(luce.tokenize("héllo <|im_end|>")) == "héllo <|im_end|>"
    with pytest.raises(ValueError, match=r"tokens\[0\]"):
        luce.detokenize([-1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_ctx": 0}, "max_ctx: expected an integer from 1 to 16777215, found 0"),
        ({"max_ctx": 1 << 24}, "max_ctx"),
        ({"max_ctx": "8"}, "max_ctx: expected an integer, found str"),
        ({"threads": 0}, "threads"),
        ({"kv_type": "q8_0"}, "kv_type: expected f16 or f32, found 'q8_0'"),
        ({"chunk": 100}, "chunk: expected a multiple of 16, found 100"),
        ({"chunk": -16}, "chunk"),
    ],
)
def test_bad_load_options_are_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        LoadOptions(**options)


def test_available_cpus_respects_a_containers_quota(tmp_path: Path) -> None:
    assert available_cpus() >= 1
    assert _cgroup_quota(tmp_path) is None
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert _cgroup_quota(tmp_path) is None
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    assert _cgroup_quota(tmp_path) == 1.5
    old = tmp_path / "old"
    (old / "cpu").mkdir(parents=True)
    (old / "cpu" / "cpu.cfs_quota_us").write_text("-1")
    (old / "cpu" / "cpu.cfs_period_us").write_text("100000")
    assert _cgroup_quota(old) is None
    (old / "cpu" / "cpu.cfs_quota_us").write_text("200000")
    assert _cgroup_quota(old) == 2.0
