"""Train luce-tiny on one GPU within a given time.

    python -m tools.luce_tiny.train DATA_DIR OUT_DIR --seconds 1200

DATA_DIR holds train.u16.xz, held.u16.xz, tokenizer.json and definitions.tsv. The schedule follows the
clock: warm-up, a constant rate, a linear descent to zero; dense attention first, sparse (what the model
runs with) from `--sparse-from` on. Writes OUT_DIR/log.jsonl and OUT_DIR/checkpoint.npz (float16 matrices).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from . import tasks, tokenizer
from .config import Config
from .evaluate import recall
from .model import LuceTiny, initialise
from .optim import build
from .reference import load_weights


def synthesise(data: Path, corpus_path: Path, length: int, seed: int, queue: Any) -> None:
    """Worker: puts [8, length] uint16 blocks of synthetic rows on the queue for ever."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    corpus = np.load(corpus_path, mmap_mode="r")
    sources = tasks.Sources.load(data, corpus, tokenizer.load(data))
    rng = random.Random(seed)
    while True:
        queue.put(np.stack([tasks.row(rng, sources, length) for _ in range(8)]))


class Batches:
    """Rows of the corpus at random offsets, with a share of synthetic rows from worker processes."""

    def __init__(self, data: Path, scratch: Path, rows: int, length: int, share: float, workers: int, device: str):
        corpus = tokenizer.read_shard(data / "train.u16.xz")
        scratch.mkdir(parents=True, exist_ok=True)
        np.save(scratch / "corpus.npy", corpus)
        self.corpus = torch.from_numpy(corpus.astype(np.int32)).to(device)
        self.rows, self.length, self.share, self.device = rows, length + 1, share, device
        context = mp.get_context("spawn")
        self.queue = context.Queue(64)
        for i in range(workers):
            arguments = (data, scratch / "corpus.npy", self.length, 1000 + i, self.queue)
            context.Process(target=synthesise, args=arguments, daemon=True).start()
        self.pool: list[Tensor] = []
        self.fresh = self.drawn = 0

    def next(self) -> Tensor:
        """int64 [rows, length + 1]."""
        n_task = max(1, int(self.rows * self.share + random.random()))
        while not self.queue.empty() or len(self.pool) < n_task:
            for row in torch.from_numpy(self.queue.get().astype(np.int64)):
                self.pool.append(row)
                self.fresh += 1
            if len(self.pool) > 4096:
                break
        # newest rows first; a slow producer makes rows repeat, never the trainer wait
        picked = [self.pool.pop() for _ in range(n_task)]
        if len(self.pool) < 256:
            self.pool = picked + self.pool
        self.drawn += n_task
        start = torch.randint(0, len(self.corpus) - self.length, (self.rows - n_task, 1), device=self.device)
        text = self.corpus[start + torch.arange(self.length, device=self.device)].long()
        return torch.cat([torch.stack(picked).to(self.device), text])


def losses(model: LuceTiny, batch: Tensor, sparse: bool, depth: int, balance_weight: float = 3e-4) -> dict[str, Tensor]:
    """All training losses of one batch [B, T + 1]; the draft head never moves the trunk."""
    tokens, targets = batch[:, :-1], batch[:, 1:]
    trace = model.trunk(tokens, sparse, distil=True)
    ce, z = model.steps["head_loss"](model.output_hc, model.output, trace.res, targets)
    out = {"ce": ce, "z": z, "indexer": trace.indexer_loss, "balance": trace.balance_loss}
    hidden = trace.res.detach()
    total = ce + 1e-4 * z + trace.indexer_loss + balance_weight * trace.balance_loss
    ahead = targets
    for step in range(1, depth + 1):
        hidden, indexer, balance = model.draft(ahead, hidden, distil=step == 1)
        goal = torch.nn.functional.pad(batch[:, 1 + step :], (0, step), value=-100)
        mtp, _ = model.steps["head_loss"](model.mtp.head, model.output.detach(), hidden, goal)
        out[f"mtp{step}"] = mtp
        total = total + 0.5 * mtp + balance_weight * balance + (indexer if step == 1 else 0)
        ahead = torch.nn.functional.pad(batch[:, 1 + step :], (0, step))
    out["total"] = total
    out["loads"] = torch.stack(trace.loads)
    return out


def lr_scale(progress: float, warmup: float, decay_from: float) -> float:
    if progress < warmup:
        return progress / warmup
    return 1.0 if progress < decay_from else max(0.0, (1 - progress) / (1 - decay_from))


def save(model: LuceTiny, path: Path) -> None:
    """Matrices rounded to float16, vectors and the router in float32."""
    state = {}
    for name, p in model.state_dict().items():
        array = p.detach().float().cpu().numpy()
        small = array.ndim < 2 or "gate_inp" in name or "inject" in name
        state[name] = array if small else array.astype(np.float16)
    np.savez(path.with_suffix(".tmp.npz"), **state)  # type: ignore[arg-type]
    path.with_suffix(".tmp.npz").replace(path)


@torch.no_grad()
def held_out(model: LuceTiny, held: Tensor, sparse: bool) -> float:
    """Cross-entropy of rows of held-out text [R, T + 1], uncompiled."""
    steps, model.steps = model.steps, model.plain_steps
    model.eval()
    total = 0.0
    for rows in held.split(8):
        trace = model.trunk(rows[:, :-1], sparse)
        total += model.steps["head_loss"](model.output_hc, model.output, trace.res, rows[:, 1:])[0].item() * len(rows)
    model.train()
    model.steps = steps
    return total / len(held)


def probe(model: LuceTiny, sources: tasks.Sources, device: str) -> list[float]:
    """Share of planted codes reproduced after 200 and 1,200 tokens."""
    steps, model.steps = model.steps, model.plain_steps
    model.eval()
    out = [float(recall(model, sources, depth, 10, device)["exact"]) for depth in (200, 1200)]
    model.train()
    model.steps = steps
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=1200)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--share", type=float, default=0.24, help="of synthetic rows")
    parser.add_argument("--sparse-from", type=float, default=0.45)
    parser.add_argument("--decay-from", type=float, default=0.4)
    parser.add_argument("--muon-lr", type=float, default=4e-3)
    parser.add_argument("--adam-lr", type=float, default=2e-3)
    parser.add_argument("--balance", type=float, default=3e-4, help="weight of the expert balance loss")
    parser.add_argument("--workers", type=int, default=10)
    parser.add_argument("--max-steps", type=int, default=1 << 30)
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--no-compile", action="store_true")
    args = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    args.out.mkdir(parents=True, exist_ok=True)
    batches = Batches(args.data, args.out / "scratch", args.rows, args.length, args.share, args.workers, device)
    held_tokens = tokenizer.read_shard(args.data / "held.u16.xz").astype(np.int64)
    n = min(24, (len(held_tokens) - 1) // args.length)
    held = torch.from_numpy(np.stack([held_tokens[i * args.length :][: args.length + 1] for i in range(n)])).to(device)

    sources = tasks.Sources.load(args.data, held_tokens.astype(np.uint16), tokenizer.load(args.data))

    model = LuceTiny(Config()).to(device).train()
    initialise(model)
    if args.resume:
        load_weights(model, args.resume)
    optimisers = build(model, args.muon_lr, args.adam_lr)
    if not args.no_compile:
        model.compile_steps()
    log = (args.out / "log.jsonl").open("a", buffering=1)
    began = last_time = last_save = time.time()
    warm = 0.0  # seconds spent compiling the first step do not count against the schedule
    step = last_step = 0
    while True:
        progress = (time.time() - began - warm) / args.seconds if step else 0.0
        if progress >= 1 or step >= args.max_steps:
            break
        sparse = progress >= args.sparse_from
        depth = 2 if sparse else 1
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = losses(model, batches.next(), sparse, depth, args.balance)
        loss["total"].backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scale = lr_scale(progress, 0.02, args.decay_from)
        for optimiser in optimisers:
            for group in optimiser.param_groups:
                group["lr"] = group["base_lr"] * scale
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        step += 1
        if step == 1:
            if device == "cuda":
                torch.cuda.synchronize()
            warm = time.time() - began
        if step % 50 == 0 or step in (1, 2, 5, 10, 20):
            now = time.time()
            item: dict[str, Any] = {k: round(v.item(), 4) for k, v in loss.items() if v.dim() == 0}
            rate = (step - last_step) * args.rows * args.length / (now - last_time)
            item |= {"step": step, "progress": round(progress, 4), "lr": round(scale, 3), "norm": round(norm.item(), 2),
                     "tok_s": int(rate), "seconds": round(now - began, 1), "fresh": round(batches.fresh / batches.drawn, 2),
                     "hot4": round(loss["loads"].sort(-1, descending=True).values[:, :4].sum(-1).mean().item() / 4, 3)}
            if step % 500 == 0:
                with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                    item["held"] = round(held_out(model, held, sparse), 4)
                    item["recall"] = probe(model, sources, device)
            log.write(json.dumps(item) + "\n")
            print(json.dumps(item), flush=True)
            last_time, last_step = time.time(), step
            if time.time() - last_save > 60:
                save(model, args.out / "checkpoint.npz")
                last_save = time.time()
    save(model, args.out / "checkpoint.npz")
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        final = held_out(model, held, True)
    log.write(json.dumps({"step": step, "held_sparse": round(final, 4), "seconds": round(time.time() - began, 1)}) + "\n")
    (args.out / "done").write_text("done\n")
    print("done", step, final, flush=True)
    for child in mp.active_children():
        child.kill()


if __name__ == "__main__":
    main()
