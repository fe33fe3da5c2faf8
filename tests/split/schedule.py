"""One schedule with everything in it, to be run with experts in different places: every logits byte is a result."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from pyluce.graph import TrunkRunner
from tests.support.models import SEED, TEST_SHAPE, ModelCache
from tests.support.runs import prompt_tokens

LENGTHS = (70, 33, 5, 48)
N_SLOTS = 4
CHUNK = 48
OPTIONS: dict[str, object] = {
    "n_slots": N_SLOTS,
    "n_ctx": 256,
    "chunk_tokens": CHUNK,
    "repack": False,
    "mtp": True,
    "prefix_cache_bytes": 1 << 24,
}
N_EXPERT, N_LAYER = TEST_SHAPE.n_expert, TEST_SHAPE.n_layer


def model(cache: ModelCache, weight_type: str) -> Path:
    """A model with a draft head; "fused": F16, with gate and up in one tensor."""
    fused = weight_type == "fused"
    shape = replace(TEST_SHAPE.with_type("F16" if fused else weight_type), mtp=True, fused_gate_up=fused)
    return cache.write(f"split-{weight_type}.gguf", shape, SEED)


def tokens(length: int, seed: int) -> list[int]:
    return prompt_tokens(length, seed, TEST_SHAPE.n_vocab, 0, (length // 2,))


def results(runner: TrunkRunner) -> dict[str, bytes]:
    """Prompts in chunks, rows of four sequences, rows to verify, a rollback, drafts, and a prompt that begins with a kept one."""
    found: dict[str, bytes] = {}
    states = [runner.new_sequence() for _ in range(N_SLOTS)]
    for i, (state, length) in enumerate(zip(states, LENGTHS, strict=True)):
        every = runner.prefill(state, tokens(length, i), want="all")
        assert every is not None
        found[f"prompt {i}"] = every.tobytes()
    runner.store.offer(states[0])
    four = [(state, 7 + i) for i, state in enumerate(states)]
    found["four rows"] = runner.decode(four).tobytes()
    found["greedy rows"] = repr(runner.decode_rows(four, [False] * N_SLOTS)).encode()
    found["drafts"] = repr(runner.draft([(states[0], 3, 3), (states[2], 9, 2)])).encode()
    mixed = [(states[0], 11), (states[1], 12), (states[0], 13), (states[3], 0), (states[0], 14)]
    found["verify"] = runner.decode(mixed).tobytes()
    states[0].rollback(2)
    found["after a rollback"] = runner.decode([(states[0], 99)]).tobytes()
    for state in states:
        state.free()
    again = runner.new_sequence()
    prompt = [*tokens(LENGTHS[0], 0), *tokens(20, 77)]
    chunk = runner.options.chunk_tokens
    start = runner.store.start(again, prompt, {*range(chunk, LENGTHS[0], chunk), LENGTHS[0]})
    assert start.length == LENGTHS[0]
    rest = runner.prefill(again, prompt[start.length :], want="all")
    assert rest is not None
    found["from a kept prefix"] = rest.tobytes()
    found["row after that"] = runner.decode([(again, 5)]).tobytes()
    again.free()
    return found
