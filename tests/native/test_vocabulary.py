"""The vocabulary through libllama, against the file that the test wrote."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pyluce.native import NativeError, Vocabulary, WrongThreadError
from pyluce.native.llama import TokenAttr, VocabType
from tests.native.small_models import CHAT_TEMPLATE, byte_spellings, vocabulary_tokens
from tests.native.test_owner import in_thread

TOKENS = vocabulary_tokens()
END, TURN, PAD = (TOKENS.index(text) for text in ("<|end|>", "<|turn|>", "<|pad|>"))
TEXTS = [
    "",
    "hello world",
    "naïve façade",
    "日本語 👩‍👩‍👧‍👦",
    "a\x00b",
    "tab\tline\n\n  x",
    "\U0010ffff",
    "<|turn|>hello",
]


@pytest.fixture
def vocabulary(vocabulary_path: Path) -> Iterator[Vocabulary]:
    with Vocabulary(vocabulary_path) as vocabulary:
        yield vocabulary


def test_special_ids_and_kind(vocabulary: Vocabulary) -> None:
    assert (vocabulary.n_tokens, vocabulary.kind) == (len(TOKENS), VocabType.BPE)
    assert (vocabulary.bos, vocabulary.eos, vocabulary.pad) == (TURN, END, PAD)
    assert (vocabulary.adds_bos, vocabulary.adds_eos) == (True, False)
    assert vocabulary.eog_tokens() == [END]
    assert [t for t in range(vocabulary.n_tokens) if vocabulary.is_control(t)] == [END, TURN, PAD]
    assert vocabulary.attributes(END) & TokenAttr.CONTROL and vocabulary.attributes(0) & TokenAttr.NORMAL
    assert [vocabulary.text(t) for t in range(vocabulary.n_tokens)] == TOKENS


def test_metadata_and_chat_template(vocabulary: Vocabulary) -> None:
    assert vocabulary.chat_template == CHAT_TEMPLATE
    assert vocabulary.named_chat_template("no such") is None
    assert vocabulary.meta("general.name") == "vocabulary only" and vocabulary.meta("no.key") is None
    assert vocabulary.metadata()["general.architecture"] == "llama"


@pytest.mark.parametrize("text", TEXTS)
def test_round_trip(vocabulary: Vocabulary, text: str) -> None:
    for parse_special in (False, True):
        tokens = vocabulary.tokenize(text, parse_special=parse_special)
        assert vocabulary.detokenize(tokens, unparse_special=True) == text.encode()
        assert b"".join(vocabulary.piece(token) for token in tokens) == text.encode()


def test_merges_apply(vocabulary: Vocabulary) -> None:
    assert [TOKENS[t] for t in vocabulary.tokenize("hello world")] == ["hello", "Ġworld"]
    assert [TOKENS[t] for t in vocabulary.tokenize("help")] == ["he", "l", "p"]


def test_special_texts_are_parsed_on_request_only(vocabulary: Vocabulary) -> None:
    assert vocabulary.tokenize("<|turn|>hello", parse_special=True) == [TURN, TOKENS.index("hello")]
    assert TURN not in vocabulary.tokenize("<|turn|>hello", parse_special=False)
    assert vocabulary.tokenize("hello", add_special=True) == [TURN, TOKENS.index("hello")]
    assert vocabulary.piece(TURN, special=True) == b"<|turn|>" and vocabulary.piece(TURN, special=False) == b""
    assert vocabulary.detokenize([TURN, TOKENS.index("hello")], unparse_special=False) == b"hello"


def test_every_byte_has_its_token(vocabulary: Vocabulary) -> None:
    ids = [TOKENS.index(spelling) for spelling in byte_spellings()]
    assert [vocabulary.piece(token) for token in ids] == [bytes([byte]) for byte in range(256)]


def test_detokenize_cleans_spaces_where_the_file_says_so_and_pieces_do_not(vocabulary: Vocabulary) -> None:
    tokens = vocabulary.tokenize("well !")
    assert vocabulary.detokenize(tokens) == b"well!"
    assert b"".join(vocabulary.piece(token) for token in tokens) == b"well !"


def test_long_texts_grow_the_buffers(vocabulary: Vocabulary) -> None:
    text = "日" * 5000
    tokens = vocabulary.tokenize(text)
    assert len(tokens) == 15000 and vocabulary.detokenize(tokens).decode() == text
    long = [TOKENS.index("<|turn|>")] * 1000
    assert vocabulary.detokenize(long, unparse_special=True) == b"<|turn|>" * 1000


@pytest.mark.parametrize("token", [-1, len(TOKENS), 2**31 - 1])
def test_ids_outside_the_vocabulary_are_refused(vocabulary: Vocabulary, token: int) -> None:
    uses = (vocabulary.piece, vocabulary.text, vocabulary.is_eog, vocabulary.is_control, vocabulary.attributes)
    for use in (*uses, lambda t: vocabulary.detokenize([0, t])):
        with pytest.raises(ValueError, match=f"expected a token id from 0 to {len(TOKENS) - 1}, found {token}"):
            use(token)


def test_lone_surrogates_are_refused(vocabulary: Vocabulary) -> None:
    with pytest.raises(ValueError, match="lone surrogate at index 2"):
        vocabulary.tokenize("ab\ud800")


def test_other_threads_are_refused(vocabulary: Vocabulary) -> None:
    for use in (lambda: vocabulary.tokenize("a"), lambda: vocabulary.eos, lambda: vocabulary.piece(1)):
        assert isinstance(in_thread(use), WrongThreadError)


def test_a_missing_file_and_a_broken_one(tmp_path: Path, vocabulary_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nothing at"):
        Vocabulary(tmp_path / "absent.gguf")
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(vocabulary_path.read_bytes()[:200])
    with pytest.raises(NativeError, match="libllama cannot read") as caught:
        Vocabulary(broken)
    assert caught.value.log_tail
