"""The metadata and tensors of a random model, and `write_model`.

Each tensor's values depend on the seed and its name only: files of the same seed and widths hold the same weights,
rounded to whatever types they were written in.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from pyluce.weights.ggml_types import TYPES_BY_NAME
from tools.synth.quantise import Quantiser
from tools.synth.shape import Shape
from tools.synth.tensors import Recipe, recipes
from tools.synth.vocabulary import EOS, vocabulary_metadata
from tools.synth.writer import Tensor, Value, write_gguf, write_shards

ARCHITECTURE: Final = "qwen4exp"
POOL_ROWS: Final = 1024
POOLED_VALUES: Final = 1 << 23
POOLED_EXPERT_VALUES: Final = 1 << 19
"""Tensors with more values than this draw their rows from a pool: ggml's quantisers manage a few MB a second."""
CHUNK_ROWS: Final = 16384


def write_model(
    path: Path, shape: Shape, *, seed: int = 1, library: Path | None = None, shards: int = 1, name: str = ""
) -> list[Path]:
    """Write the model and return its files.

    With `shards` > 1, `path` gives folder and stem: `model.gguf` becomes `model-00001-of-0000N.gguf` and so on.
    `library`: libggml-base, needed for types other than F32, F16, BF16 and Q8_0 (default: this project's build).
    """
    metadata = model_metadata(shape, seed, name or f"{path.stem} (random weights)")
    tensors = model_tensors(shape, seed, Quantiser(library))
    path.parent.mkdir(parents=True, exist_ok=True)
    if shards > 1:
        return write_shards(path.parent, path.stem, shards, metadata, tensors)
    write_gguf(path, metadata, tensors)
    return [path]


def model_metadata(shape: Shape, seed: int, name: str) -> dict[str, Value]:
    """All keys of the model, vocabulary included."""
    n_all = shape.n_layer + shape.mtp
    integers = {
        "block_count": n_all,
        "context_length": shape.n_ctx,
        "embedding_length": shape.n_embd,
        "attention.head_count": shape.n_head,
        "attention.head_count_kv": shape.n_head_kv,
        "attention.key_length": shape.head_dim,
        "attention.value_length": shape.head_dim,
        "attention.indexer.head_count": shape.indexer_heads,
        "attention.indexer.key_length": shape.indexer_dim,
        "attention.indexer.top_k": shape.indexer_top_k,
        "full_attention_interval": shape.full_interval,
        "expert_count": shape.n_expert,
        "expert_used_count": shape.n_expert_used,
        "expert_feed_forward_length": shape.n_ff_exp,
        "expert_shared_feed_forward_length": shape.n_ff_shexp,
        "hyper_connection.count": shape.hc_count,
        "hyper_connection.low_rank": shape.hc_low_rank,
        "ssm.conv_kernel": shape.ssm_conv,
        "ssm.inner_size": shape.value_width,
        "ssm.state_size": shape.ssm_state,
        "ssm.time_step_rank": shape.ssm_v_heads,
        "ssm.group_count": shape.ssm_k_heads,
        "rope.dimension_count": shape.rope_dim,
    }
    if shape.mtp:
        integers["nextn_predict_layers"] = 1
    ratios = [0 if shape.is_linear(i) else shape.compress_ratio for i in range(n_all)]
    out = {"general.architecture": Value("string", ARCHITECTURE), "general.name": Value("string", name)}
    out |= {f"{ARCHITECTURE}.{key}": Value("u32", value) for key, value in integers.items()}
    out |= {
        f"{ARCHITECTURE}.rope.freq_base": Value("f32", 1e7),
        f"{ARCHITECTURE}.rope.dimension_sections": Value("i32", list(shape.rope_sections)),
        f"{ARCHITECTURE}.attention.layer_norm_rms_epsilon": Value("f32", 1e-6),
        f"{ARCHITECTURE}.attention.recurrent_layers": Value("bool", [shape.is_linear(i) for i in range(n_all)]),
        f"{ARCHITECTURE}.attention.compress_ratios": Value("u32", ratios),
    }
    return out | _ple_metadata(shape, seed) | vocabulary_metadata(shape.n_vocab)


def _ple_metadata(shape: Shape, seed: int) -> dict[str, Value]:
    if shape.ple_layer is None:
        return {}
    rng = _generator(seed, "ple.layer_multipliers")
    sizes = shape.ple_sizes
    values = {
        "ple.layers": Value("u32", [shape.ple_layer]),
        "ple.ngram_size": Value("u32", shape.ple_ngram),
        "ple.heads_per_ngram": Value("u32", shape.ple_heads),
        "ple.conv_kernel": Value("u32", shape.ple_conv),
        "ple.eos_token_id": Value("u32", EOS),
        "embedding_length_per_layer_input": Value("u32", shape.ple_head_dim),
        "ple.layer_multipliers": Value("u64", [2 * int(m) + 1 for m in rng.integers(1 << 44, size=shape.ple_ngram)]),
        "ple.head_offsets": Value("u64", [sum(sizes[:i]) for i in range(len(sizes))]),
        "ple.head_vocab_sizes": Value("u64", sizes),
    }
    return {f"{ARCHITECTURE}.{key}": value for key, value in values.items()}


def model_tensors(shape: Shape, seed: int, quantiser: Quantiser) -> list[Tensor]:
    """Every tensor of the model in file order."""
    return [_tensor(recipe, seed, quantiser) for recipe in recipes(shape)]


def _tensor(recipe: Recipe, seed: int, quantiser: Quantiser) -> Tensor:
    def data() -> Iterator[npt.NDArray[np.uint8]]:
        return _rows(recipe, seed, quantiser)

    return Tensor(recipe.name, recipe.ne, TYPES_BY_NAME[recipe.type_name].id, data)


def _generator(seed: int, name: str) -> np.random.Generator:
    return np.random.default_rng([seed, zlib.crc32(name.encode())])


def _rows(recipe: Recipe, seed: int, quantiser: Quantiser) -> Iterator[npt.NDArray[np.uint8]]:
    rng = _generator(seed, recipe.name)
    width, n_rows = recipe.ne[0], math.prod(recipe.ne[1:])
    if width * n_rows > (POOLED_EXPERT_VALUES if len(recipe.ne) == 3 else POOLED_VALUES):
        pool = quantiser.convert(recipe.fill(rng, POOL_ROWS, width), recipe.type_name)
        for start in range(0, n_rows, CHUNK_ROWS):
            yield pool[rng.integers(0, POOL_ROWS, min(CHUNK_ROWS, n_rows - start))]
    else:
        yield quantiser.convert(recipe.fill(rng, n_rows, width), recipe.type_name)
