"""What a GPU has instead of the CPU's shortcuts, run on the CPU: weights in a buffer of their own, inputs through copies."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest

from pyluce.graph import RunnerOptions, TrunkRunner
from pyluce.graph import runner as module
from pyluce.native.ggml_backend import ggml_backend_tensor_memset
from pyluce.weights import place_weights, placement
from tests.support.models import ModelCache, model_cache  # noqa: F401
from tests.support.real_model import require_libraries

OPTIONS = RunnerOptions(n_ctx=512, n_slots=2, chunk_tokens=64, repack=False)


@contextmanager
def like_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Weights are copied, and no memory of the device can be written by the host directly: inputs are staged and prepared ahead."""
    with monkeypatch.context() as patch:
        patch.setattr(module, "place_weights", partial(place_weights, copy=True))
        patch.setattr(module, "ggml_backend_buft_is_host", lambda buffer_type: False)
        yield


def logits(path: Any) -> tuple[list[bytes], dict[str, Any]]:
    """Of chunks, rows, a copied sequence, a rollback and a restored snapshot."""
    rng = np.random.default_rng(3)
    with TrunkRunner(path, OPTIONS) as runner:
        prompt = [int(t) for t in rng.integers(1, runner.vocab_size, 150)]
        state = runner.new_sequence()
        found = [runner.prefill(state, prompt, want="all")]
        snapshot = state.snapshot()
        other = state.copy()
        for token in prompt[:5]:
            found.append(runner.decode([(state, token), (other, token + 1)]))
        state.rollback(3)
        found.append(runner.decode([(state, 7), (state, 8)]))
        other.free()
        runner.poison_free_state()
        other = runner.new_sequence()
        other.restore(snapshot)
        found.append(runner.decode([(other, 9)]))
        return [np.asarray(part).tobytes() for part in found], dict(runner.memory_report())


@pytest.mark.parametrize("tied", [False, True])
def test_the_same_bits_without_the_cpus_shortcuts(
    model_cache: ModelCache,  # noqa: F811
    tied: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    require_libraries()
    path = model_cache.tiny("Q8_0")
    if tied:
        opened = module.open_model

        def without_output(*args: Any, **more: Any) -> Any:
            model = opened(*args, **more)
            del model.tensors["output.weight"]
            return model

        monkeypatch.setattr(module, "open_model", without_output)
    expected, _ = logits(path)
    with like_a_gpu(monkeypatch):
        found, report = logits(path)
    assert found == expected
    assert report["weights"]["device_bytes"] > 0


def test_control_a_wrong_upload_shows(model_cache: ModelCache, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    require_libraries()
    expected, _ = logits(model_cache.tiny("Q8_0"))
    whole = placement.upload

    def one_wrong(model: Any, infos: Any, tensors: Any, *rest: Any) -> None:
        whole(model, infos, tensors, *rest)
        ggml_backend_tensor_memset(tensors["blk.2.attn_output.weight"], 0, 0, 34)

    monkeypatch.setattr(placement, "upload", one_wrong)
    with like_a_gpu(monkeypatch):
        found, _ = logits(model_cache.tiny("Q8_0"))
    assert found != expected
