from __future__ import annotations

import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyluce.text import Channel, ReasoningMarkers, TextDelta, TextStream, split_text

MARKERS = ReasoningMarkers()
FAMILY = "👩‍👩‍👧‍👦"

# text that meets markers, stop strings, multi-byte characters and their neighbours often
FRAGMENTS = st.sampled_from(
    [
        "<think>",
        "</think>",
        "<thin",
        "</th",
        "<",
        ">",
        "\n",
        "\n\n",
        " ",
        "STOP",
        "STO",
        "P",
        "é",
        "€",
        "€uro",
        "日本",
        "日",
        FAMILY,
        "😀",
        "a",
        "b",
    ]
)
TEXTS = st.lists(FRAGMENTS, max_size=25).map("".join)
ANY_BYTES = st.one_of(
    TEXTS.map(str.encode),
    st.binary(max_size=60),
    st.tuples(TEXTS, st.binary(max_size=6), TEXTS).map(lambda parts: parts[0].encode() + parts[1] + parts[2].encode()),
)
STOPS = st.lists(
    st.sampled_from(["STOP", "€uro", "日本", "\n\n", "</think>", "P", "é😀", "ab", "TO"]), max_size=4, unique=True
)


def expected(data: bytes, stop: list[str], reasoning: bool, inside: bool) -> tuple[str, str, str | None]:
    """The documented rules, written a second time over the whole text with regular expressions."""
    text = data.decode("utf-8", "replace")
    thoughts = ""
    if reasoning:
        opened = None if inside else re.match(r"\s*<think>", text)
        if inside or opened:
            body = text[opened.end() :] if opened else text
            thoughts, closed, text = body.partition("</think>")
            thoughts = thoughts.lstrip("\n")
            if closed:
                thoughts = thoughts.rstrip("\n")
                text = text.lstrip("\n")
    found: tuple[int, int, str] | None = None
    for string in stop:
        at = text.find(string)
        if at >= 0 and (found is None or (at + len(string), at) < (found[1], found[0])):
            found = (at, at + len(string), string)
    if found:
        return text[: found[0]], thoughts, found[2]
    return text, thoughts, None


def run_in_pieces(stream: TextStream, data: bytes, cuts: list[int]) -> list[TextDelta]:
    bounds = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    deltas: list[TextDelta] = []
    for begin, end in zip(bounds, bounds[1:], strict=False):
        deltas += stream.step(data[begin:end])
        if stream.stop_string is not None:
            break
    return deltas + stream.flush()


def joined(deltas: list[TextDelta], channel: Channel) -> str:
    return "".join(delta.text for delta in deltas if delta.channel is channel)


@settings(max_examples=600)
@given(ANY_BYTES, STOPS, st.booleans(), st.booleans(), st.lists(st.integers(0, 80), max_size=80))
def test_any_byte_split_gives_the_text_of_the_rules(
    data: bytes, stop: list[str], reasoning: bool, inside: bool, cuts: list[int]
) -> None:
    inside = inside and reasoning
    stream = TextStream(stop=stop, reasoning=MARKERS if reasoning else None, in_reasoning=inside)
    deltas = run_in_pieces(stream, data, cuts)
    content, thoughts, stop_string = expected(data, stop, reasoning, inside)
    assert joined(deltas, Channel.CONTENT) == content
    assert joined(deltas, Channel.REASONING) == thoughts
    assert stream.stop_string == stop_string
    assert all(delta.text for delta in deltas)


@settings(max_examples=300)
@given(ANY_BYTES, STOPS, st.booleans())
def test_streamed_byte_by_byte_equals_unstreamed(data: bytes, stop: list[str], inside: bool) -> None:
    whole = split_text(data, stop=stop, reasoning=MARKERS, in_reasoning=inside)
    stream = TextStream(stop=stop, reasoning=MARKERS, in_reasoning=inside)
    deltas = run_in_pieces(stream, data, list(range(len(data))))
    assert (joined(deltas, Channel.CONTENT), joined(deltas, Channel.REASONING), stream.stop_string) == whole


@pytest.mark.parametrize("text", ["😀", FAMILY, "日本語", "a\u2028b\u0085c", "é"])
def test_multi_byte_characters_come_out_whole(text: str) -> None:
    stream = TextStream()
    deltas: list[TextDelta] = []
    for value in text.encode():
        for delta in stream.step(bytes([value])):
            assert "\ufffd" not in delta.text
            deltas.append(delta)
    assert joined(deltas + stream.flush(), Channel.CONTENT) == text


def test_a_lone_lead_byte_at_the_end_becomes_one_replacement_character() -> None:
    stream = TextStream()
    assert stream.step(b"ok\xf0") == [TextDelta(Channel.CONTENT, "ok")]
    assert stream.flush() == [TextDelta(Channel.CONTENT, "\ufffd")]


def test_an_answer_without_markers_is_content() -> None:
    assert split_text(b"hello <think> no </think>", reasoning=MARKERS) == ("hello <think> no </think>", "", None)


def test_reasoning_is_split_off_and_its_edges_are_trimmed() -> None:
    assert split_text(b"<think>\nwhy\n\nnot\n</think>\n\nBecause.\n", reasoning=MARKERS) == (
        "Because.\n",
        "why\n\nnot",
        None,
    )
    assert split_text(b"why\n</think>\n\nBecause.", reasoning=MARKERS, in_reasoning=True) == ("Because.", "why", None)


def test_reasoning_that_never_ends_is_kept() -> None:
    assert split_text(b"still thinking </thi", reasoning=MARKERS, in_reasoning=True) == (
        "",
        "still thinking </thi",
        None,
    )


def test_stop_strings_do_not_end_reasoning() -> None:
    assert split_text(b"<think>a STOP b</think>c STOP d", stop=["STOP"], reasoning=MARKERS) == (
        "c ",
        "a STOP b",
        "STOP",
    )


def test_a_stop_string_that_begins_in_a_half_character_token_is_matched() -> None:
    data = "10 €uro".encode()
    stream = TextStream(stop=["€u"])
    assert stream.step(data[:4]) == [TextDelta(Channel.CONTENT, "10 ")]
    assert stream.step(data[4:]) == []
    assert stream.stop_string == "€u"
    assert stream.flush() == []


def test_a_finished_stream_refuses_more() -> None:
    stopped = TextStream(stop=["x"])
    stopped.step(b"x")
    with pytest.raises(RuntimeError, match="over"):
        stopped.step(b"y")
    flushed = TextStream()
    flushed.flush()
    with pytest.raises(RuntimeError, match="over"):
        flushed.flush()


@pytest.mark.parametrize(
    ("stop", "message"), [("", "at least one character"), ("\ud800", "not valid Unicode"), (3, "a string, found int")]
)
def test_bad_stop_strings_are_refused_by_index(stop: object, message: str) -> None:
    with pytest.raises(ValueError, match=rf"stop\[1\].*{message}"):
        TextStream(stop=["fine", stop])  # type: ignore[list-item]


def test_in_reasoning_without_markers_is_refused() -> None:
    with pytest.raises(ValueError, match="markers"):
        TextStream(in_reasoning=True)


@pytest.mark.parametrize("piece", [b" ", b"\n", b"a", b"ST", "日".encode()[:1]])
@pytest.mark.parametrize("inside", [False, True])
def test_cost_per_token_does_not_grow_with_the_answer(piece: bytes, inside: bool) -> None:
    def seconds(steps: int) -> float:
        stream = TextStream(stop=["STOP", "\n\n\n\n€"], reasoning=MARKERS, in_reasoning=inside)
        started = time.process_time()
        for _ in range(steps):
            stream.step(piece)
        return time.process_time() - started

    seconds(1000)
    few = min(seconds(2_000) for _ in range(3))
    many = min(seconds(40_000) for _ in range(2))
    assert many < 20 * few * 3, "twenty times the tokens took more than sixty times the time"
