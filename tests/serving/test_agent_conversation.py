"""An agent's four turns over HTTP, with tools and six children at once: each turn computes what the client added, and every answer is a cold one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from bench.agent_turns import N_CHILDREN, AgentConversation
from pyluce import Luce
from pyluce.engine import FinishEvent, GenerationRequest, IdlePrompt
from pyluce.options import LoadOptions
from tests.support.echo_service import running_server

CACHE_MIB = 192
WAIT_S = 120.0
TURNS = (1, 2, 3, 4)
Hashes = dict[tuple[int, ...], bytes]


@dataclass
class Told:
    """One answer: the message, the prompt's tokens, those computed for it, those that the client added since the answer before."""

    message: dict[str, Any]
    prompt: int
    computed: int
    added: int

    @property
    def said(self) -> tuple[Any, ...]:
        """The message without the calls' ids, which are drawn."""
        calls = [call["function"] for call in self.message.get("tool_calls") or ()]
        return (self.message.get("content"), self.message.get("reasoning_content"), calls)


@dataclass
class Played:
    """A conversation as it went. `hashes`: of each prompt, the digest of its answer's logits."""

    turns: list[Told] = field(default_factory=list)
    children: list[Told] = field(default_factory=list)
    hashes: Hashes = field(default_factory=dict)

    @property
    def said(self) -> list[Any]:
        """All that was answered."""
        return [told.said for told in (*self.turns, *self.children)]


class Client:
    """Talks to one server. `hashes` is filled by the engine."""

    def __init__(self, luce: Luce, url: str, hashes: Hashes) -> None:
        self.luce, self.hashes = luce, hashes
        self._http = httpx.Client(base_url=url, timeout=WAIT_S)

    def ask(self, request: dict[str, Any], added: Sequence[dict[str, Any]]) -> Told:
        reply = self._http.post("/v1/chat/completions", json=request)
        assert reply.status_code == 200, reply.text
        body = reply.json()
        usage = body["usage"]
        computed = usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]
        assert usage["timings"]["prefilled_tokens"] == computed
        return Told(body["choices"][0]["message"], usage["prompt_tokens"], computed, self.count(added))

    def count(self, messages: Sequence[dict[str, Any]]) -> int:
        """Tokens of messages rendered by themselves, with the header of the reply that follows."""
        return int(self._http.post("/tokenize", json={"messages": messages}).json()["count"])

    def settle(self) -> None:
        """Wait until the next turn is prepared. /tokenize is answered by the thread that plans it, behind it."""
        self.count([{"role": "user", "content": "x"}])
        engine: Any = self.luce._engine
        core = engine._core
        core = getattr(core, "core", core)
        deadline = time.monotonic() + WAIT_S
        while engine.call(lambda: core._idle is not None and core._idle.busy):
            assert time.monotonic() < deadline, "the next turn is never prepared"
            time.sleep(0.02)


@contextmanager
def serving(model: Path, **options: Any) -> Iterator[Client]:
    loaded = LoadOptions(max_ctx=2048, threads=1, chunk=256, max_concurrency=N_CHILDREN, **options)
    with Luce.load_with(model, loaded) as luce:
        hashes: Hashes = {}
        watch(luce, hashes)
        with running_server(luce, loaded) as server:
            yield Client(luce, server.url, hashes)
        assert luce.stats().invariant_violations == 0 and luce.stats().busy_slots == 0


def watch(luce: Any, hashes: Hashes) -> None:
    """Have every request's logits hashed, and note the digest under its prompt."""
    submit = luce.submit

    def hashed(request: GenerationRequest) -> Any:
        ticket = submit(replace(request, hash_logits=True))
        listen = ticket.on_event

        def on_event(callback: Callable[[Any], None]) -> None:
            def both(message: Any) -> None:
                if isinstance(message, FinishEvent):
                    assert message.logits_sha256 is not None
                    hashes[request.prompt] = message.logits_sha256
                callback(message)

            listen(both)

        ticket.on_event = on_event
        return ticket

    luce.submit = hashed


def play(
    client: Client,
    *,
    keep_reasoning: bool,
    with_children: bool = True,
    before: dict[int, Callable[[Client], None]] | None = None,
) -> Played:
    """The four turns; `before`: what is done before a turn."""
    conversation, played = AgentConversation(keep_reasoning=keep_reasoning), Played(hashes=client.hashes)
    findings = ["nothing"] * N_CHILDREN
    for turn in TURNS:
        client.settle()
        (before or {}).get(turn, lambda client: None)(client)
        request = conversation.ask(turn, findings)
        played.turns.append(client.ask(request, conversation.added))
        conversation.hear(played.turns[-1].message)
        if turn == 3 and with_children:
            client.settle()
            with ThreadPoolExecutor(N_CHILDREN) as pool:
                played.children = list(pool.map(lambda child: client.ask(*child), conversation.children()))
            findings = [child.message.get("content") or "" for child in played.children]
    return played


def check_computed(played: Played) -> None:
    """Each turn behind the first, and each child, computed what the client added: the reply before is the last boundary."""
    for told in (*played.turns[1:], *played.children):
        assert told.computed <= told.added, (
            f"computed {told.computed} of {told.prompt} tokens, the client added {told.added}"
        )


@pytest.fixture(scope="module", params=[False, True], ids=["the client strips", "the template strips"])
def cold(request: pytest.FixtureRequest, luce_tiny: Path) -> tuple[bool, Played]:
    with serving(luce_tiny, prefix_cache_mib=0) as client:
        return bool(request.param), play(client, keep_reasoning=bool(request.param))


def test_each_turn_computes_what_the_client_added(luce_tiny: Path, cold: tuple[bool, Played]) -> None:
    keep_reasoning, expected = cold
    with serving(luce_tiny, prefix_cache_mib=CACHE_MIB) as client:
        played = play(client, keep_reasoning=keep_reasoning)
    assert len(played.turns) == 4 and len(played.children) == N_CHILDREN
    assert played.turns[0].message["tool_calls"] and any(told.message.get("reasoning_content") for told in played.turns)
    assert played.said == expected.said
    assert len(played.hashes) == 4 + N_CHILDREN and played.hashes == expected.hashes
    assert all(told.computed == told.prompt for told in expected.turns + expected.children), (
        "the cold server keeps nothing"
    )
    check_computed(played)
    assert played.turns[3].computed < played.turns[3].prompt / 4


def test_control_without_idle_prefill_replies_are_computed_again(luce_tiny: Path, cold: tuple[bool, Played]) -> None:
    keep_reasoning, expected = cold
    with serving(luce_tiny, prefix_cache_mib=CACHE_MIB, idle_prefill=False) as client:
        played = play(client, keep_reasoning=keep_reasoning)
    assert played.said == expected.said and played.hashes == expected.hashes
    with pytest.raises(AssertionError, match="the client added"):
        check_computed(played)


def test_control_a_boundary_that_is_off_by_one_is_noticed(
    luce_tiny: Path, cold: tuple[bool, Played], monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_reasoning, expected = cold
    warm = Luce.warm

    def shifted(luce: Luce, prompt: IdlePrompt) -> None:
        warm(luce, IdlePrompt(prompt.tokens[:-1], prompt.cuts))

    monkeypatch.setattr(Luce, "warm", shifted)
    with serving(luce_tiny, prefix_cache_mib=CACHE_MIB) as client:
        played = play(client, keep_reasoning=keep_reasoning)
    assert played.said == expected.said and played.hashes == expected.hashes, "nobody starts there"
    with pytest.raises(AssertionError, match="the client added"):
        check_computed(played)


def test_control_a_state_that_is_not_the_prompts_changes_the_hashes(luce_tiny: Path, cold: tuple[bool, Played]) -> None:
    keep_reasoning, expected = cold

    def spoil(client: Client) -> None:
        engine: Any = client.luce._engine
        core = getattr(engine._core, "core", engine._core)

        def erase() -> None:
            entries = core.resources.runner.store.newest_entries(1000)
            assert entries
            for entry in entries:
                entry.snapshot.recurrent = np.zeros_like(entry.snapshot.recurrent)

        engine.call(erase)

    with serving(luce_tiny, prefix_cache_mib=CACHE_MIB) as client:
        played = play(client, keep_reasoning=keep_reasoning, before={2: spoil}, with_children=False)
    first = {prompt: digest for prompt, digest in played.hashes.items() if prompt in expected.hashes}
    wrong = [prompt for prompt, digest in first.items() if digest != expected.hashes[prompt]]
    assert 2 <= len(first) and len(wrong) >= 1
