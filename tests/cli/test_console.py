from __future__ import annotations

import io

import pytest

from cli.console import AnswerPrinter, LoadProgress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def printed(stream: io.StringIO, *pieces: tuple[str, str], show_reasoning: bool = True) -> str:
    printer = AnswerPrinter(show_reasoning, stream)
    for content, reasoning in pieces:
        printer.write(content, reasoning)
    printer.end()
    return stream.getvalue()


@pytest.mark.parametrize(
    "text", ["a\n", "\n\n", "  x  \n", "long " * 100 + "\n", "[bold]x[/bold] :smile:\n", "日本語" * 50 + "\n", "x\t\n"]
)
def test_text_is_printed_as_it_is(text: str) -> None:
    assert printed(io.StringIO(), (text, "")) == text
    assert printed(Terminal(), (text, "")).expandtabs() == text.expandtabs()


def test_a_terminal_gets_no_control_characters_and_a_pipe_gets_the_bytes() -> None:
    text = "a\x1b[31mb\r\nc\x07\x9b\n"
    assert printed(Terminal(), (text, "")) == "a\\x1b[31mb\nc\\x07\\x9b\n"
    assert printed(io.StringIO(), (text, "")) == text


def test_reasoning_stands_apart_from_the_answer() -> None:
    pieces = [("", "one\n"), ("", "two"), ("yes", ""), (".", "")]
    assert printed(io.StringIO(), *pieces) == "one\ntwo\n\nyes.\n"
    assert printed(io.StringIO(), *pieces, show_reasoning=False) == "yes.\n"
    assert printed(io.StringIO(), ("", "one\n"), ("yes", "")) == "one\n\nyes\n"


def test_plain_progress_is_a_line_for_each_stage() -> None:
    stream = io.StringIO()
    with LoadProgress(False, stream) as progress:
        for stage in ("open", "weights"):
            for done in range(100):
                progress(stage, done, 100)
    assert stream.getvalue() == "load: open\nload: weights\n"
    silent = io.StringIO()
    with LoadProgress(True, silent) as progress:
        progress("open", 1, 2)
    assert silent.getvalue() == ""
