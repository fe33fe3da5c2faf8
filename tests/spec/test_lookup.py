"""Prompt lookup, and what the options accept."""

from __future__ import annotations

import random

import pytest

from pyluce.options import LoadOptions, OptionError
from pyluce.spec import SpecOptions
from pyluce.spec.lookup import LONG_MATCH, NGRAM, PromptLookup
from pyluce.spec.options import parse_sources


def slow(tokens: list[int], count: int) -> list[int]:
    """The rule, read off its description: the latest earlier place of the last tokens, and what follows there."""
    tail = tokens[-NGRAM:]
    for end in range(len(tokens) - 1, NGRAM - 1, -1):
        if len(tokens) >= NGRAM and tokens[end - NGRAM : end] == tail:
            text = list(tokens)
            while len(text) < end + count:
                text.append(text[end + len(text) - len(tokens)])
            return text[end : end + count]
    return []


def drafts(lookup: PromptLookup, count: int, after: list[int] | None = None) -> list[int]:
    match = lookup.draft(count, after or [])
    return match.tokens if match is not None else []


def test_the_latest_place_where_the_last_tokens_stood() -> None:
    lookup = PromptLookup([1, 2, 3, 4, 5, 1, 2, 3])
    assert drafts(lookup, 2) == [4, 5]
    assert drafts(lookup, 5) == [4, 5, 1, 2, 3]
    assert drafts(lookup, 7) == [4, 5, 1, 2, 3, 4, 5]
    lookup.extend([9, 1, 2, 3])
    assert drafts(lookup, 2) == [9, 1]
    lookup.extend([7])
    assert drafts(lookup, 2) == []
    assert drafts(PromptLookup([1, 1]), 3) == []
    assert drafts(PromptLookup([5, 5, 5, 5]), 3) == [5, 5, 5]


@pytest.mark.parametrize("seed", range(20))
def test_random_texts_against_the_slow_rule(seed: int) -> None:
    """Also after drafts, which are as if they were part of the text but for being a place where something follows."""
    rng = random.Random(seed)
    tokens = [rng.randrange(3) for _ in range(rng.randrange(2, 60))]
    at = rng.randrange(len(tokens))
    lookup = PromptLookup(tokens[:at])
    for end in range(at, len(tokens)):
        lookup.extend(tokens[end : end + 1])
        for count in (1, 4, 7):
            assert drafts(lookup, count) == slow(tokens[: end + 1], count)
    known = set(zip(tokens, tokens[1:], tokens[2:], strict=False))
    after = [rng.randrange(3) for _ in range(2)]
    text = [*tokens, *after]
    places = [e for e in range(NGRAM, len(tokens)) if tokens[e - NGRAM : e] == text[-NGRAM:]]
    found = drafts(lookup, 1, after)
    assert bool(found) == bool(places and tuple(text[-NGRAM:]) in known)
    assert not found or found == [tokens[places[-1]]]


def test_how_much_of_the_text_before_is_the_same() -> None:
    text = list(range(20))
    for length in range(NGRAM, 12):
        match = PromptLookup([*text, *text[15 - length : 15]]).draft(3)
        assert match is not None
        assert match.tokens == [15, 16, 17]
        assert (match.length, match.long) == (min(length, LONG_MATCH), length >= LONG_MATCH)
    match = PromptLookup([*text, 5, 6]).draft(2, [7, 8])
    assert match is not None
    assert (match.tokens, match.length) == ([9, 10], 4)


def test_options() -> None:
    assert parse_sources("mtp,lookup") == ("mtp", "lookup")
    assert parse_sources("off") == ()
    for text in ("", "mtp,,lookup", "ngram", "mtp,mtp", "off,mtp"):
        with pytest.raises(ValueError, match=r"^spec: expected"):
            parse_sources(text)
    assert [SpecOptions(("mtp",), width).max_drafts for width in (0, 1, 2, 8)] == [7, 0, 1, 7]
    assert SpecOptions((), 0).max_drafts == 0
    for width in (-1, 9, True, 2.0):
        with pytest.raises(ValueError, match=r"^verify_width: expected"):
            SpecOptions(("mtp",), width)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"verify_width": 9}, "verify_width: expected 0"),
        ({"spec": ("mtp", "tree")}, "spec: expected some of mtp, lookup, found 'tree'"),
        ({"draft": "LUCE", "verify_width": 1}, "draft: expected with mtp among spec"),
        ({"draft": "LUCE", "spec": ("lookup",)}, "draft: expected with mtp among spec"),
        ({"draft": ""}, "draft: expected a GGUF file with a draft head, found none at ."),
    ],
)
def test_load_options_refuse(options: dict[str, object], message: str) -> None:
    from pathlib import Path

    if "draft" in options:
        options["draft"] = Path(str(options["draft"]))
    with pytest.raises(OptionError) as refused:
        LoadOptions(**options)  # type: ignore[arg-type]
    assert str(refused.value).startswith(message)
