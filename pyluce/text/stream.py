"""The stream machine: bytes of tokens in, text of the answer out, in any pieces and always the same text.

Three stages, each pure and each with a bounded memory: UTF-8 that is complete, reasoning apart from content, stop strings.
What a stage cannot decide yet it holds back, so the concatenation of all deltas does not depend on how the bytes were split.
"""

from __future__ import annotations

import codecs
import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pyluce.text.matcher import Matcher


class Channel(enum.Enum):
    """Where a piece of text belongs."""

    CONTENT = "content"
    REASONING = "reasoning"


class TextDelta(NamedTuple):
    """A piece of text to append to its channel."""

    channel: Channel
    text: str


@dataclass(frozen=True, slots=True)
class ReasoningMarkers:
    """The strings around the part of an answer that is reasoning."""

    start: str = "<think>"
    end: str = "</think>"


class _Part(enum.Enum):
    OPENING = enum.auto()  # before the first visible character, where a start marker may stand
    REASONING = enum.auto()
    AFTER_REASONING = enum.auto()  # newlines between the end marker and the content
    CONTENT = enum.auto()


class TextStream:
    """Turns the bytes of one answer's tokens into text deltas.

    * Incomplete UTF-8 is held back until its bytes arrive; bytes that can never be UTF-8 become U+FFFD, as in `bytes.decode("utf-8", "replace")`.
    * With `reasoning` markers, a start marker is recognised at the beginning of the answer only (after white space), an end marker
      only inside reasoning. Newlines next to the markers belong to neither channel, as chat templates write them back themselves.
      `in_reasoning` says that the prompt ended with the start marker.
    * A stop string is matched on the text of the *content*, never inside the reasoning: the text ends before it, and `stop_string` says
      which it was. The stop string that is complete first wins; of those complete at the same character, the longest.
    """

    def __init__(
        self,
        *,
        stop: Sequence[str] = (),
        reasoning: ReasoningMarkers | None = None,
        in_reasoning: bool = False,
    ) -> None:
        if in_reasoning and reasoning is None:
            raise ValueError("in_reasoning needs the reasoning markers, found none")
        for index, text in enumerate(stop):
            check_stop_string(text, index)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._markers = reasoning
        self._white_space: list[str] = []
        self._maybe_start = ""
        self._end_matcher = Matcher([reasoning.end]) if reasoning else None
        self._shown_reasoning = False
        self._newlines = 0
        self._stop_matcher = Matcher(stop) if stop else None
        self._part = _Part.CONTENT
        if reasoning:
            self._part = _Part.REASONING if in_reasoning else _Part.OPENING
        self._stop_string: str | None = None
        self._finished = False
        self._deltas: list[TextDelta] = []

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text, or None."""
        return self._stop_string

    @property
    def in_reasoning(self) -> bool:
        """True while the answer is inside its reasoning part."""
        return self._part is _Part.REASONING

    def step(self, data: bytes) -> list[TextDelta]:
        """Take the bytes of the next token; return the text that is now certain, at most one delta of each channel.

        Raises RuntimeError after `flush`, or after a stop string was found.
        """
        self._check_open()
        self._take(self._decoder.decode(data))
        return self._drain()

    def flush(self) -> list[TextDelta]:
        """The answer is over: return what was held back. After a stop string there is nothing."""
        if self._stop_string is None:
            self._check_open()
            self._take(self._decoder.decode(b"", True))
        if self._stop_string is None:
            self._flush_parts()
        self._finished = True
        return self._drain()

    def _check_open(self) -> None:
        if self._finished or self._stop_string is not None:
            raise RuntimeError(
                "the text is over: this stream was flushed or has met a stop string; make a new TextStream"
            )

    def _take(self, text: str) -> None:
        if self._part is _Part.OPENING:
            text = self._take_opening(text)
        if self._part is _Part.REASONING:
            text = self._take_reasoning(text)
        if self._part is _Part.AFTER_REASONING:
            text = text.lstrip("\n")
            if text:
                self._part = _Part.CONTENT
        if self._part is _Part.CONTENT:
            self._take_content(text)

    def _take_opening(self, text: str) -> str:
        assert self._markers is not None
        start = self._markers.start
        if not self._maybe_start:
            stripped = text.lstrip()
            self._white_space.append(text[: len(text) - len(stripped)])
            text = stripped
        seen = self._maybe_start + text
        if seen.startswith(start):
            self._part = _Part.REASONING
            self._white_space, self._maybe_start = [], ""
            return seen[len(start) :]
        if start.startswith(seen):
            self._maybe_start = seen
            return ""
        return self._leave_opening(seen)

    def _leave_opening(self, seen: str) -> str:
        self._part = _Part.CONTENT
        text = "".join(self._white_space) + seen
        self._white_space, self._maybe_start = [], ""
        return text

    def _take_reasoning(self, text: str) -> str:
        assert self._end_matcher is not None
        safe, match = self._end_matcher.feed(text)
        self._show_reasoning(safe)
        if match is None:
            return ""
        self._part = _Part.AFTER_REASONING
        self._newlines = 0
        return match.rest

    def _show_reasoning(self, text: str) -> None:
        if not self._shown_reasoning:
            text = text.lstrip("\n")
        body = text.rstrip("\n")
        newlines = len(text) - len(body)
        if body:
            self._emit(Channel.REASONING, "\n" * self._newlines + body)
            self._shown_reasoning = True
            self._newlines = newlines
        else:
            self._newlines += newlines

    def _take_content(self, text: str) -> None:
        if self._stop_matcher is None:
            self._emit(Channel.CONTENT, text)
            return
        safe, match = self._stop_matcher.feed(text)
        self._emit(Channel.CONTENT, safe)
        if match is not None:
            self._stop_string = match.pattern

    def _flush_parts(self) -> None:
        if self._part is _Part.OPENING:
            self._take_content(self._leave_opening(self._maybe_start))
        elif self._part is _Part.REASONING:
            assert self._end_matcher is not None
            self._show_reasoning(self._end_matcher.flush())
            self._emit(Channel.REASONING, "\n" * self._newlines)
        if self._part is _Part.CONTENT and self._stop_matcher is not None and self._stop_string is None:
            self._emit(Channel.CONTENT, self._stop_matcher.flush())

    def _emit(self, channel: Channel, text: str) -> None:
        if not text:
            return
        if self._deltas and self._deltas[-1].channel is channel:
            text = self._deltas.pop().text + text
        self._deltas.append(TextDelta(channel, text))

    def _drain(self) -> list[TextDelta]:
        deltas, self._deltas = self._deltas, []
        return deltas


class SplitText(NamedTuple):
    """A whole answer's text."""

    content: str
    reasoning: str
    stop_string: str | None


def split_text(
    data: bytes,
    *,
    stop: Sequence[str] = (),
    reasoning: ReasoningMarkers | None = None,
    in_reasoning: bool = False,
) -> SplitText:
    """The text of a whole answer at once: what the deltas of a `TextStream` over the same bytes add up to."""
    stream = TextStream(stop=stop, reasoning=reasoning, in_reasoning=in_reasoning)
    deltas = stream.step(data)
    deltas += stream.flush()
    joined = {channel: "".join(delta.text for delta in deltas if delta.channel is channel) for channel in Channel}
    return SplitText(joined[Channel.CONTENT], joined[Channel.REASONING], stream.stop_string)


def check_stop_string(text: object, index: int) -> None:
    """Raise ValueError unless `text` can be a stop string: a string, not empty, and encodable as UTF-8."""
    if not isinstance(text, str):
        raise ValueError(f"stop[{index}]: expected a string, found {type(text).__name__}")
    if not text:
        raise ValueError(f"stop[{index}]: expected at least one character, found an empty string")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"stop[{index}]: not valid Unicode text ({error.reason} at character {error.start})"
        ) from error
