from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyluce.text.matcher import Match, Matcher

LETTERS = st.text(alphabet="abc", max_size=60)
PATTERNS = st.lists(st.text(alphabet="abc", min_size=1, max_size=6), min_size=1, max_size=5)


def first_match(text: str, patterns: list[str]) -> tuple[str, str | None, str]:
    """By brute force: text before, the pattern, text after."""
    for end in range(1, len(text) + 1):
        ending = [pattern for pattern in patterns if text[:end].endswith(pattern)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest, text[end:]
    return text, None, ""


@given(LETTERS, PATTERNS, st.lists(st.integers(0, 60)))
def test_any_split_finds_what_brute_force_finds(text: str, patterns: list[str], cuts: list[int]) -> None:
    before, pattern, after = first_match(text, patterns)
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    matcher = Matcher(patterns)
    shown = ""
    found: Match | None = None
    for begin, end in zip(bounds, bounds[1:], strict=False):
        safe, found = matcher.feed(text[begin:end])
        shown += safe
        assert before.startswith(shown), "text that belongs to a match was let out"
        if found:
            assert found.rest + text[end:] == after
            break
    if found is None:
        shown += matcher.flush()
    assert (shown, found.pattern if found else None) == (before, pattern)


def test_holds_back_no_more_than_a_pattern_could_need() -> None:
    matcher = Matcher(["abcd", "bx"])
    assert matcher.feed("zzabc") == ("zz", None)
    assert matcher.feed("y") == ("abcy", None)
    assert matcher.feed("ab") == ("", None)
    assert matcher.feed("x") == ("a", Match("bx", ""))


def test_refuses_an_empty_pattern() -> None:
    with pytest.raises(ValueError, match="empty"):
        Matcher(["a", ""])
