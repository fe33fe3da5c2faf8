"""Where a conversation is cut: at its own turns, in the same places when it grows."""

from __future__ import annotations

from pyluce import Luce
from pyluce.text.turns import turn_starts

MARKER = (900, 901)


def test_replies_and_the_first_message_are_found() -> None:
    tokens = [900, 1, 5, 5, 900, 2, 6, 900, 901, 7]
    assert turn_starts(tokens, MARKER) == (4, 7)
    assert turn_starts(tokens[:4], MARKER) == ()
    assert turn_starts(tokens, ()) == ()


def test_a_longer_conversation_keeps_the_cuts_of_the_shorter() -> None:
    first = [900, 1, 5, 900, 901]
    second = [*first, 8, 8, 900, 1, 5, 900, 901]
    assert turn_starts(second, MARKER)[: len(turn_starts(first, MARKER))] == turn_starts(first, MARKER)


def test_prompts_of_the_shipped_model_are_cut_at_its_replies() -> None:
    with Luce.load(max_ctx=512, threads=1, max_concurrency=1) as luce:
        history = [{"role": "user", "content": "What is a river?"}]
        first = luce.request(messages=history, thinking=False)
        answer = luce.generate(messages=history, thinking=False, max_tokens=40)
        history += [{"role": "assistant", "content": answer.text}, {"role": "user", "content": "And a lake?"}]
        second = luce.request(messages=history, thinking=False)
        assert first.cuts and second.cuts[: len(first.cuts)] == first.cuts and len(second.cuts) > len(first.cuts)
        assert first.prompt[: first.cuts[-1]] == second.prompt[: first.cuts[-1]]
        warm = luce.generate(messages=history, thinking=False, max_tokens=40, hash_logits=True)
        assert warm.timings.cached_tokens == first.cuts[-1]
    with Luce.load(max_ctx=512, threads=1, max_concurrency=1, prefix_cache_mib=0) as cold:
        again = cold.generate(messages=history, thinking=False, max_tokens=40, hash_logits=True)
    assert again.step_sha256 == warm.step_sha256 and again.text == warm.text
