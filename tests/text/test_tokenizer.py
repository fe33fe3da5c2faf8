from __future__ import annotations

import pytest

from pyluce.text import TemplateError, Tokenizer
from tests.support.fake_vocabulary import FakeVocabulary


def test_plain_text_is_never_parsed_for_special_tokens() -> None:
    vocabulary = FakeVocabulary()
    tokens = Tokenizer(vocabulary).encode_text("a<|im_end|>")
    assert not any(vocabulary.is_control(token) for token in tokens)


def test_control_tokens_have_no_text_but_reasoning_markers_do() -> None:
    plain = Tokenizer(FakeVocabulary())
    assert plain.token_bytes(FakeVocabulary().token("<|im_end|>")) == b""
    assert plain.token_bytes(FakeVocabulary().token("hello")) == b"hello"
    vocabulary = FakeVocabulary(controls=("<|im_end|>", "<think>", "</think>"), user_defined=())
    tokenizer = Tokenizer(vocabulary)
    tokens = [
        vocabulary.token("<think>"),
        ord("a"),
        vocabulary.token("</think>"),
        ord("b"),
        vocabulary.token("<|im_end|>"),
    ]
    assert tokenizer.decode(tokens) == "<think>a</think>b"
    assert tokenizer.is_end(tokens[-1])


def test_decode_replaces_what_is_not_utf8() -> None:
    assert Tokenizer(FakeVocabulary()).decode([0xF0, ord("a")]) == "\ufffda"


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([1, -1], r"tokens\[1\].*found -1"),
        ([10**6], r"tokens\[0\].*found 1000000"),
        ([True], "integer, found bool"),
        (["1"], "found str"),
    ],
)
def test_bad_tokens_are_refused_by_index(tokens: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Tokenizer(FakeVocabulary()).check_tokens(tokens)


def test_a_model_without_template_is_a_clear_error() -> None:
    tokenizer = Tokenizer(FakeVocabulary(chat_template=None))
    with pytest.raises(TemplateError, match="no chat template"):
        tokenizer.chat_template()
    assert tokenizer.chat_template("{{ messages[0].content }}").render([{"role": "user", "content": "x"}]).text == "x"
