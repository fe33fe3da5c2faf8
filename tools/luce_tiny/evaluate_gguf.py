"""The same measurements on a GGUF file, computed by libllama (the project's build) instead of PyTorch.

    python -m tools.luce_tiny.evaluate_gguf DATA_DIR MODEL.gguf [--held 40960] [--count 40] [--out report.json]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyluce.native import LlamaContext
from pyluce.native.ggml import GGMLType

from . import tasks, tokenizer
from .evaluate import skills


class LlamaScorer:
    """Logits of one sequence from position 0, F32 cache, no flash attention."""

    def __init__(self, path: Path, n_ctx: int = 2560):
        self.context = LlamaContext(path, n_ctx=n_ctx, n_batch=n_ctx, n_ubatch=512, kv_type=GGMLType.F32)

    def logits(self, tokens: Tensor) -> Tensor:
        self.context.clear()
        return torch.from_numpy(np.asarray(self.context.decode(tokens[0].tolist(), want="all")))[None]


def perplexity(scorer: LlamaScorer, held: np.ndarray, n_tokens: int, length: int = 2048) -> dict[str, Any]:
    loss, count = 0.0, 0
    for i in range(n_tokens // length):
        row = torch.from_numpy(held[i * length : (i + 1) * length + 1].astype(np.int64))
        logits = scorer.logits(row[None, :-1])[0]
        loss += torch.nn.functional.cross_entropy(logits, row[1:], reduction="sum").item()
        count += length
    return {"held_tokens": count, "cross_entropy": round(loss / count, 4), "perplexity": round(np.exp(loss / count), 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("--held", type=int, default=40960)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    held = tokenizer.read_shard(args.data / "held.u16.xz")
    sources = tasks.Sources.load(args.data, held, tokenizer.load(args.data))
    scorer = LlamaScorer(args.model)
    result: dict[str, Any] = {"held_out": perplexity(scorer, held, args.held)} if args.held else {}
    if args.count:
        result |= skills(scorer, sources, args.count, "cpu")
    scorer.context.close()
    text = json.dumps(result, indent=1)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
