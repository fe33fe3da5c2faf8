"""Every width of the real model, on a GPU: its kernels for those widths give each row the bits that it has alone.

The small models of this folder take the general kernels; a GPU's are made for the real widths. Few experts and a small vocabulary keep the
files under 1 GB. A CPU has no such kernels, and would take minutes.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.exactness.case import Case
from tests.exactness.test_process import N_TOKENS, solo_elsewhere, solo_here
from tests.support.device import ON_GPU
from tests.support.models import SEED, ModelCache
from tools.synth import FULL, Shape

pytestmark = pytest.mark.skipif(not ON_GPU, reason="kernels for the real widths are a GPU's")

SHAPE: Shape = replace(FULL, n_layer=4, n_vocab=4096, n_expert=48, indexer_top_k=64, ple_base=211, weight_gain=3.0)
EXPERTS = {"Q4_K, IQ4_NL": ("Q4_K", "IQ4_NL"), "IQ4_NL": ("IQ4_NL", "IQ4_NL"), "Q8_0": ("Q8_0", "Q8_0")}
COUNTS = (2, 3, 4, 5, 8, 13, 16)
STEPS = 3
LENGTH = 150


@pytest.fixture(scope="module", params=EXPERTS)
def wide(request: pytest.FixtureRequest, model_cache: ModelCache) -> Case:
    up, down = EXPERTS[request.param]
    path: Path = model_cache.write(f"wide-{up}-{down}.gguf", replace(SHAPE, expert_up=up, expert_down=down), SEED)
    return Case(path, SHAPE.n_vocab)


def rows_beside_each_other(case: Case, count: int, **options: object) -> list[np.ndarray]:
    """Logits of STEPS tokens of each of `count` sequences, computed in one row graph; prompts beyond the selection budget."""
    with case.open(n_slots=count, n_ctx=512, chunk_tokens=256, max_rollback=0, **options) as runner:
        states = [runner.new_sequence() for _ in range(count)]
        for number, state in enumerate(states):
            runner.prefill(state, case.prompt(LENGTH, number), want="none")
        found = []
        for step in range(STEPS):
            rows = runner.decode([(state, 11 + 5 * number + step) for number, state in enumerate(states)])
            found.append(np.array(rows))
        return [np.stack([step[number] for step in found]) for number in range(count)]


@pytest.fixture(scope="module")
def rows_alone(wide: Case) -> list[bytes]:
    """The same, one sequence after the other in one slot."""
    found = []
    with wide.open(n_slots=1, n_ctx=512, chunk_tokens=256, max_rollback=0) as runner:
        for number in range(max(COUNTS)):
            state = runner.new_sequence()
            runner.prefill(state, wide.prompt(LENGTH, number), want="none")
            rows = [np.array(runner.decode([(state, 11 + 5 * number + step)]))[0] for step in range(STEPS)]
            found.append(np.stack(rows).tobytes())
            state.free()
    return found


@pytest.mark.parametrize("count", COUNTS)
def test_a_row_has_the_same_bits_beside_others(wide: Case, rows_alone: list[bytes], count: int) -> None:
    found = rows_beside_each_other(wide, count)
    assert [rows.tobytes() for rows in found] == rows_alone[:count]


def test_control_a_batch_variant_product_shows(wide: Case, rows_alone: list[bytes]) -> None:
    found = rows_beside_each_other(wide, 4, debug_fault="batch_variant")
    with pytest.raises(AssertionError):
        assert [rows.tobytes() for rows in found] == rows_alone[:4]


@pytest.mark.parametrize("variable", ("LUCE_DISABLE_FUSION", "LUCE_DISABLE_LEAN"))
def test_fused_plain_and_general_kernels_agree(wide: Case, variable: str, tmp_path: Path) -> None:
    """The chunk and the rows after it in a process whose GPU launches every node alone, or takes no kernels made for a launch."""
    prompt = wide.prompt(LENGTH)
    here = solo_here(wide, prompt)
    assert len(here.tokens) == N_TOKENS
    found = solo_elsewhere(wide, prompt, tmp_path, {variable: "1"})
    assert found["tokens"] == here.tokens
    assert found["hashes"] == here.hashes


def test_control_another_arithmetic_shows(wide: Case, tmp_path: Path) -> None:
    prompt = wide.prompt(LENGTH)
    found = solo_elsewhere(wide, prompt, tmp_path, debug_fault="batch_variant")
    with pytest.raises(AssertionError):
        assert found["hashes"] == solo_here(wide, prompt).hashes
