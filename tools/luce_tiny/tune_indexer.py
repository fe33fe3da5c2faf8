"""After training: sharpen the indexers alone on long recall, on a CPU.

    python -m tools.luce_tiny.tune_indexer DATA_DIR IN.npz OUT.npz [--rows 40] [--steps 200]

The trunk is frozen. Long recall documents are run once with dense attention; the inputs of the two
indexers and the attention mass at the answers' positions (and at random ones, so that ordinary text
keeps its selection) are kept. The indexers then learn that mass with the loss of training, plus, where a
far block holds much of it, the log probability of that block.
"""

from __future__ import annotations

import argparse
import random
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from . import tasks, tokenizer
from .config import Config
from .mixers import Attention, rms_norm, rope, rope_table, scan_chunks
from .model import LuceTiny, ffn_step, full_step, linear_in, linear_out, ngram_step
from .reference import load_weights
from .train import save

FAR_BLOCKS = 16
PEAK = 0.12


@dataclass(slots=True)
class Sample:
    """One layer's view of one row: indexer input [T, n_embd], queries [n], their target mass [n, NB]."""

    x: Tensor
    queries: Tensor
    mass: Tensor


def make_row(rng: random.Random, sources: tasks.Sources, length: int) -> tuple[Tensor, list[int]]:
    """A recall document of at most `length` tokens, and the positions that predict answer digits."""
    while True:
        maker = tasks.recall_raw if rng.random() < 0.5 else tasks.recall_chat
        text = maker(rng, sources, int(length * rng.uniform(0.45, 0.8)))
        ids = [tokenizer.EOT_ID, *sources.tokenizer.encode(text).ids]
        if len(ids) > length:
            continue
        digits = {sources.tokenizer.token_to_id(d) for d in "0123456789"}
        answers = [
            i - 1 for i in range(4, len(ids))
            if ids[i] in digits and i > len(ids) * 0.4 and sum(x in digits for x in ids[i - 4 : i + 4]) >= 3
        ]
        ids += [tokenizer.EOT_ID] * (length - len(ids))
        return torch.tensor([ids]), answers


@torch.no_grad()
def observe(model: LuceTiny, tokens: Tensor, queries: list[int]) -> list[Sample]:
    """Run the trunk densely and keep what the indexers need, one sample a full-attention layer."""
    cos, sin = rope_table(model.config, tokens.shape[1], tokens.device)
    res = torch.nn.functional.embedding(tokens, model.token_embd)[..., None, :].repeat(1, 1, model.config.hc, 1)
    out: list[Sample] = []
    index = torch.tensor(queries)
    for i, block in enumerate(model.blocks):
        if i == model.config.ple_layer:
            res = ngram_step(model.ngram, res, tokens)
        if block.full:
            x, _ = block.hc_attn.mix(res)  # type: ignore[operator,union-attr]
            mass = block.mixer.block_mass(block.mixer.attend(x, cos, sin)[0])  # type: ignore[operator,union-attr]
            out.append(Sample(x[0], index, mass[0, index]))
            if i == model.config.n_layer - 1:
                break
            res, _ = full_step(block, res, cos, sin, False, False)  # type: ignore[arg-type]
        else:
            s, weights = linear_in(block, res)  # type: ignore[arg-type]
            values, states = scan_chunks(s.a, s.kb, s.vb, s.k_out, s.decay)
            res = linear_out(block, res, s, values, states, weights)  # type: ignore[arg-type]
        res, _, _ = ffn_step(block, res)  # type: ignore[arg-type]
    return out


def query_scores(mixer: Attention, sample: Sample, cos: Tensor, sin: Tensor) -> Tensor:
    """`Attention.block_scores` for some queries only: [n, NB], -1e9 where not visible."""
    c = mixer.config
    blocks = sample.x.shape[0] // c.compress_ratio
    q = mixer.indexer_q_proj(sample.x[sample.queries]).reshape(-1, c.indexer_heads, c.indexer_dim).transpose(0, 1)
    q = rope(rms_norm(q, mixer.indexer_q_norm, c.eps), cos[sample.queries], sin[sample.queries])
    pooled = mixer.indexer_k_proj(sample.x).reshape(blocks, c.compress_ratio, c.indexer_dim).mean(1)
    k = rope(rms_norm(pooled, mixer.indexer_k_norm, c.eps), cos[:: c.compress_ratio], sin[:: c.compress_ratio])
    scores = torch.relu(q @ k.T).sum(0) / c.indexer_dim**0.5
    return scores.masked_fill(~mixer.visible_blocks(sample.x.shape[0], scores.device)[sample.queries], -1e9)


def far_peak(sample: Sample, ratio: int) -> tuple[Tensor, Tensor]:
    """Mass and index [n] of each query's strongest block at least FAR_BLOCKS away; mass below PEAK counts as none."""
    blocks = torch.arange(sample.mass.shape[1])
    peak, index = (sample.mass * (blocks < sample.queries[:, None] // ratio - FAR_BLOCKS)).max(-1)
    return (peak > PEAK).float(), index


def hit_rate(mixer: Attention, samples: list[Sample], cos: Tensor, sin: Tensor) -> float:
    """How often a strong far block is among the selected ones."""
    budget = mixer.config.indexer_top_k // mixer.config.compress_ratio
    hits, count = 0.0, 0.0
    for sample in samples:
        with torch.no_grad():
            scores = query_scores(mixer, sample, cos, sin)
        weight, index = far_peak(sample, mixer.config.compress_ratio)
        rank = (scores > scores.gather(1, index[:, None])).sum(-1)
        hits += float(((rank < budget) * weight).sum())
        count += float(weight.sum())
    return hits / max(count, 1.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("weights", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rows", type=int, default=40)
    parser.add_argument("--length", type=int, default=1792)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--lr", type=float, default=1e-3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = LuceTiny(Config()).eval()
    load_weights(model, args.weights)
    corpus = tokenizer.read_shard(args.data / "train.u16.xz")[:4_000_000]
    sources = tasks.Sources.load(args.data, corpus, tokenizer.load(args.data))
    rng = random.Random(99)
    mixers = [block.mixer for block in model.blocks if block.full]
    kept: list[list[Sample]] = [[] for _ in mixers]
    cache = args.out.with_suffix(".cache.pt")
    if cache.exists():
        kept = torch.load(cache, weights_only=False)
    else:
        for i in range(args.rows):
            tokens, answers = make_row(rng, sources, args.length)
            queries = sorted(set(answers[:60]) | set(rng.sample(range(100, args.length), 60)))
            for store, sample in zip(kept, observe(model, tokens, queries), strict=True):
                store.append(sample)
            print(f"row {i}: {len(answers)} answer positions", flush=True)
            torch.save(kept, cache)
    cos, sin = rope_table(model.config, args.length, torch.device("cpu"))
    for layer, (mixer, samples) in enumerate(zip(mixers, kept, strict=True)):
        held, train = samples[: len(samples) // 5], samples[len(samples) // 5 :]
        params = [p for name, p in mixer.named_parameters() if name.startswith("indexer")]
        optimiser = torch.optim.AdamW(params, lr=args.lr, betas=(0.9, 0.98), weight_decay=0.0)
        for step in range(args.steps + 1):
            if step % 50 == 0:
                print(f"layer {layer} step {step}: far blocks found {hit_rate(mixer, held, cos, sin):.3f}", flush=True)
            for group in optimiser.param_groups:
                group["lr"] = args.lr * (1 - step / (args.steps + 1))
            loss = torch.zeros(())
            for sample in rng.sample(train, min(4, len(train))):
                log_p = torch.log_softmax(query_scores(mixer, sample, cos, sin), -1)
                weight, index = far_peak(sample, model.config.compress_ratio)
                loss = loss - (sample.mass * log_p).sum(-1).mean()
                loss = loss - (weight * log_p.gather(1, index[:, None]).squeeze(1)).mean()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    save(model, args.out)


if __name__ == "__main__":
    main()
