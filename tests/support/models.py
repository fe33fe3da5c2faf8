"""Random tiny models by weight type, written once a session into one folder that all test folders share."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tools.synth import TINY, Shape, write_model

WEIGHT_TYPES = ("F32", "F16", "Q8_0", "Q4_K", "IQ4_NL")

TEST_SHAPE: Shape = replace(
    TINY, n_layer=6, full_interval=3, n_vocab=288, n_head=4, n_expert=8, n_expert_used=2, indexer_top_k=32
)
"""4 linear and 2 full-attention layers, K-quant rows, and a budget of 32 tokens: prompts from 40 tokens on select."""

ORACLE_SHAPE: Shape = replace(
    TINY,
    n_embd=128,
    n_head=4,
    n_ff_exp=64,
    n_ff_shexp=64,
    hc_low_rank=32,
    n_vocab=320,
    indexer_top_k=48,
    weight_gain=1.0,
)
"""6 linear and 2 full-attention layers in F32, narrow enough for the slow reference; a budget of 12 blocks."""

SMOOTH_SHAPE: Shape = replace(TEST_SHAPE, n_layer=3, n_expert=4, n_expert_used=4, weight_gain=1.0)
"""Every expert is used and no prompt within the budget selects: rounding changes the logits a little, never a choice."""

SEED = 20
ORACLE_SEED = 7
ORACLE_EOS = 0

ROOT = Path(__file__).resolve().parents[2]


def luce_tiny_path() -> Path:
    """The model that ships with the package. FileNotFoundError when there is none."""
    found = sorted((ROOT / "pyluce" / "data").glob("luce-tiny*.gguf"))
    if not found:
        raise FileNotFoundError(f"expected luce-tiny*.gguf in {ROOT / 'pyluce' / 'data'}, found none")
    return found[0]


class ModelCache:
    """Models of TEST_SHAPE by weight type; a file that exists is not written again."""

    def __init__(self, folder: Path):
        self._folder = folder

    @property
    def vocab(self) -> int:
        return TEST_SHAPE.n_vocab

    def tiny(self, weight_type: str) -> Path:
        """The model with every matrix of `weight_type` (rows that do not fit it: the nearest that they fit)."""
        return self.write(f"tiny-{weight_type}.gguf", TEST_SHAPE.with_type(weight_type), SEED)

    def smooth(self, weight_type: str) -> Path:
        """SMOOTH_SHAPE with every matrix of `weight_type`."""
        return self.write(f"smooth-{weight_type}.gguf", SMOOTH_SHAPE.with_type(weight_type), SEED)

    def oracle(self) -> Path:
        """The model that the committed reference logits belong to."""
        return self.write("oracle.gguf", ORACLE_SHAPE, ORACLE_SEED)

    def luce_tiny_f32(self) -> Path:
        """luce-tiny with every weight widened to F32, as the reference computes it."""
        path = self._folder / "luce-tiny-f32.gguf"
        if not path.exists():
            from tests.support.dequantise import dequantise_gguf

            dequantise_gguf(luce_tiny_path(), path)
        return path

    def write(self, name: str, shape: Shape, seed: int) -> Path:
        path = self._folder / name
        if not path.exists():
            unfinished = path.with_suffix(".part")
            write_model(unfinished, shape, seed=seed, name=path.stem)
            unfinished.replace(path)
        return path


@pytest.fixture(scope="session")
def model_cache(tmp_path_factory: pytest.TempPathFactory) -> ModelCache:
    """Imported by the conftest of each folder that needs it."""
    folder = tmp_path_factory.getbasetemp() / "models"
    folder.mkdir(exist_ok=True)
    return ModelCache(folder)
