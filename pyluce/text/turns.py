"""Where the turns of a rendered conversation begin: the places where its prompt is cut, so that states can be kept there.

The places depend on the prompt's own tokens only, and a longer conversation has those of a shorter one as its first: the
start of every reply (the header that the template writes to open one), its end where another message follows, and the
end of the first message.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pyluce.text.template import ChatTemplate, RenderedPrompt, TemplateError


def reply_marker(template: ChatTemplate, encode: Callable[[RenderedPrompt], Sequence[int]]) -> tuple[int, ...]:
    """The first two tokens of what the template writes to open a reply; empty when it writes nothing recognisable."""
    messages = [{"role": "user", "content": "x"}]
    try:
        opened = template.render(messages).text
        closed = template.render(messages, add_generation_prompt=False).text
    except TemplateError:
        return ()
    if not opened.startswith(closed):
        return ()
    marker = tuple(encode(RenderedPrompt(opened[len(closed) :])))[:2]
    return marker if len(marker) == 2 else ()


def turn_starts(tokens: Sequence[int], marker: tuple[int, ...]) -> tuple[int, ...]:
    """Positions where a reply begins or ends, and where the first message ends; ascending, within the prompt."""
    if not marker:
        return ()
    first, second = marker
    starts = [i for i, token in enumerate(tokens) if token == first]
    found = set(starts[1:2])
    for i, following in zip(starts, [*starts[1:], None], strict=True):
        if i + 1 < len(tokens) and tokens[i + 1] == second:
            found.add(i)
            if following is not None:
                found.add(following)
    return tuple(sorted(found - {0}))
