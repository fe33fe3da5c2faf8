"""A service whose model answers a conversation with the last user message, token by token; everything but the native libraries.

What the message says is what the model "thinks": `reason</think>\\n\\nanswer` reasons first. Texts begin to act when they hold a word:
NAN spoils the logits of the answer's first row, HOLD waits there until `Echo.release`, SLOW takes 10 ms a token, LONG never ends.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from pyluce.engine.protocols import Logits
from pyluce.luce import Luce
from pyluce.options import LoadOptions
from pyluce.server import LuceServer, ServerSettings, create_app
from pyluce.service import LuceService
from tests.support.fake_luce import fake_luce
from tests.support.fake_vocabulary import FakeVocabulary

HEADER = "assistant\n<think>\n"

TEMPLATE = """
{%- if tools %}
{{- '<|im_start|>system\n<tools>' }}
{%- for tool in tools %}{{- '\n' + tool | tojson }}{%- endfor %}
{{- '\n</tools>\n<tool_call>{"name": "f", "arguments": {}}</tool_call><|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\n' }}
{%- if message.role == 'assistant' and message.reasoning_content %}
{{- '<think>\n' + message.reasoning_content + '\n</think>\n\n' }}
{%- endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}
{%- set arguments = call.function.arguments %}
{{- '\n<tool_call>{"name": "' + call.function.name + '", "arguments": ' }}
{{- arguments if arguments is string else arguments | tojson }}
{{- '}</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\n' }}
{{- '<think>\n\n</think>\n\n' if enable_thinking is defined and not enable_thinking else '<think>\n' }}
{%- endif %}
"""


class Echo:
    """The scripted model behind a fake runner."""

    def __init__(self, vocabulary: FakeVocabulary) -> None:
        self.vocabulary = vocabulary
        self.release = threading.Event()
        self.held = threading.Event()
        self._start = vocabulary.token("<|im_start|>")
        self._end = vocabulary.token("<|im_end|>")
        self._header = vocabulary.tokenize(HEADER, add_special=False, parse_special=False)

    def choose(self, tokens: list[int]) -> int | None:
        """The token that must follow, None where the conversation has another form."""
        starts = [index for index, token in enumerate(tokens) if token == self._start]
        if len(starts) < 2:
            return None
        answer = tokens[starts[-1] + 1 :][len(self._header) :]
        user = b"".join(self.vocabulary.piece(token, special=False) for token in tokens[starts[-2] + 1 : starts[-1]])
        text = user.decode("utf-8", "replace").removeprefix("user\n").removeprefix("tool\n").removesuffix("\n")
        self._act(text, len(answer))
        reply = self.vocabulary.tokenize(text, add_special=False, parse_special=False)
        if "LONG" in text:
            return reply[len(answer) % len(reply)]
        return reply[len(answer)] if len(answer) < len(reply) else self._end

    def damage(self, tokens: list[int], row: Logits) -> None:
        """Spoil the row where the conversation says so."""
        if b"NAN" in bytes(token for token in tokens if token < 256):
            row[:] = np.nan

    def _act(self, text: str, count: int) -> None:
        if "SLOW" in text:
            time.sleep(0.01)
        if "HOLD" in text and count == 0:
            self.held.set()
            self.release.wait(20)


@contextmanager
def echo_luce(options: LoadOptions | None = None, **vocabulary: Any) -> Iterator[tuple[Luce, Echo]]:
    """A loaded echo model."""
    echo = Echo(FakeVocabulary(**{"chat_template": TEMPLATE, **vocabulary}))
    with fake_luce(options, vocabulary=echo.vocabulary, script=echo.choose, damage=echo.damage) as luce:
        try:
            yield luce, echo
        finally:
            echo.release.set()


@contextmanager
def running_server(luce: Luce, options: LoadOptions, vocabulary: Any = None, **settings: Any) -> Iterator[LuceServer]:
    """A server for `luce` on a free port, in a thread of its own. `vocabulary` None opens the model file's."""
    chosen = ServerSettings(**{"port": 0, "status_interval_s": 0.05, "shutdown_grace_s": 1, **settings})
    open_vocabulary = None if vocabulary is None else lambda: vocabulary
    with LuceService(luce, options, open_vocabulary) as service:
        ready = threading.Event()
        server = LuceServer(create_app(service, chosen), chosen, lambda url: ready.set())
        thread = threading.Thread(target=server.run, name="test-server")
        thread.start()
        try:
            assert ready.wait(10), "the server did not start"
            yield server
        finally:
            server.stop()
            thread.join(15)
            assert not thread.is_alive(), "the server did not stop"


@contextmanager
def echo_server(options: LoadOptions | None = None, **settings: Any) -> Iterator[tuple[LuceServer, Luce, Echo]]:
    """A server for the echo model."""
    options = options or LoadOptions(max_ctx=2048)
    with (
        echo_luce(options) as (luce, echo),
        running_server(luce, options, echo.vocabulary, **settings) as server,
    ):
        yield server, luce, echo
