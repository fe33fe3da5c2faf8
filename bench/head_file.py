"""A draft head in a file of its own, as heads are published: for libllama, which cannot use every head beside its trunk."""

from __future__ import annotations

import re
from pathlib import Path

from pyluce.weights import MtpStatus, open_model
from pyluce.weights.gguf_reader import GgufArray, MetaValue
from pyluce.weights.tensors import OUTPUT, TOKEN_EMBEDDING, TensorInfo
from tools.synth import Tensor, Value, write_gguf

RATIOS = "qwen4exp.attention.compress_ratios"
TRUNK_KEYS = re.compile(r"\.ple\.|per_layer_input$|^split\.|^general\.alignment$")


def write_head(model: Path, path: Path) -> None:
    """Write the draft head of `model` into a file of its own, with embedding, output and compress ratios of 0, as heads are published.

    libllama takes one compress ratio for a file. A head that attends to every token (ratio 0) in one file with layers that select is not
    for it: the head's graph (`graph_mtp` in models/qwen4exp.cpp) then makes the inputs of a selection that no layer reads, nothing
    allocates them, and setting them ends the process.
    """
    with open_model(model) as source:
        if source.mtp.status is not MtpStatus.PRESENT:
            raise ValueError(f"expected a draft head in {model}, found none: {source.mtp.reason}")
        metadata = {key: _typed(value) for key, value in source.metadata.items() if not TRUNK_KEYS.search(key)}
        metadata[RATIOS] = Value("u32", [0] * (source.hparams.n_layer + 1))
        borrowed = [source.tensors[name] for name in (TOKEN_EMBEDDING, OUTPUT) if name not in source.mtp.tensors]

        def tensor(info: TensorInfo) -> Tensor:
            return Tensor(info.name, info.ne, info.type_id, lambda: iter([source.read(info)]))

        write_gguf(path, metadata, [tensor(info) for info in (*borrowed, *source.mtp.tensors.values())])


def _typed(value: MetaValue) -> Value:
    if isinstance(value, GgufArray):
        return Value(value.kind, list(value.strings()) if value.kind == "string" else value.numbers().tolist())
    return Value({bool: "bool", int: "u32", float: "f32", str: "string"}[type(value)], value)
