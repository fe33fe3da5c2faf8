"""Reading models: GGUF files and shards, hyper-parameters, the tensor table, placement, the lazily read PLE table."""

from __future__ import annotations

from pyluce.weights.catalogue import Mtp, MtpStatus
from pyluce.weights.errors import ModelError
from pyluce.weights.gguf_reader import GgufArray, MetaValue
from pyluce.weights.hparams import HParams, PleParams
from pyluce.weights.model_file import ModelFile, Progress, open_model
from pyluce.weights.placement import PlacementReport, Weights, place_weights
from pyluce.weights.ple_hash import FEW_TOKENS, ple_few_row_ids, ple_row_ids, ple_window_row_ids
from pyluce.weights.ple_table import GatherCounts, PleTable
from pyluce.weights.tensors import TensorInfo

__all__ = [
    "FEW_TOKENS",
    "GgufArray",
    "GatherCounts",
    "HParams",
    "MetaValue",
    "ModelError",
    "ModelFile",
    "Mtp",
    "MtpStatus",
    "PlacementReport",
    "PleParams",
    "PleTable",
    "Progress",
    "TensorInfo",
    "Weights",
    "open_model",
    "place_weights",
    "ple_few_row_ids",
    "ple_row_ids",
    "ple_window_row_ids",
]
