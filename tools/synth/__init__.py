"""Random-weight `qwen4exp` models for tests and benchmarks: right names, shapes, types and vocabulary, no sense."""

from __future__ import annotations

from tools.synth.model import model_metadata, model_tensors, write_model
from tools.synth.quantise import Quantiser, find_library
from tools.synth.shape import FULL, MICRO, PRESETS, TINY, Shape
from tools.synth.writer import Tensor, Value, write_gguf, write_shards

__all__ = [
    "FULL",
    "MICRO",
    "PRESETS",
    "TINY",
    "Quantiser",
    "Shape",
    "Tensor",
    "Value",
    "find_library",
    "model_metadata",
    "model_tensors",
    "write_gguf",
    "write_model",
    "write_shards",
]
