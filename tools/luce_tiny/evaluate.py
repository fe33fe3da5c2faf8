"""What luce-tiny can do, measured: perplexity, recall, copying, arithmetic, drafts, routing.

    python -m tools.luce_tiny.evaluate DATA_DIR CHECKPOINT.npz|MODEL.gguf [--held 40960] [--out report.json]

Greedy decoding of a known answer is checked with one pass: the answer is reproduced exactly when the
argmax at every one of its positions is the answer's next token.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from . import tasks, tokenizer
from .chat import render
from .config import Config
from .mixers import GatedDeltaNet
from .model import LuceTiny
from .reference import load_weights


class Scorer(Protocol):
    """Anything that gives logits [1, T, n_vocab] for tokens [1, T]."""

    def logits(self, tokens: Tensor) -> Tensor: ...


def exact(model: Scorer, tok: Any, prompt: str, answer: str, device: str) -> tuple[bool, int]:
    """Whether greedy decoding of `prompt` gives `answer`; and the prompt's length in tokens."""
    head, full = tok.encode(prompt).ids, tok.encode(prompt + answer).ids
    if full[: len(head)] != head:
        raise ValueError("the answer does not start at a token boundary")
    with torch.no_grad():
        logits = model.logits(torch.tensor([full], device=device))[0]
    picked = logits[len(head) - 1 : -1].argmax(-1).tolist()
    return picked == full[len(head) :], len(head)


def recall(model: Scorer, sources: tasks.Sources, depth: int, count: int, device: str) -> dict[str, Any]:
    """One fact, then `depth` tokens of held-out text (with two other facts in it), then the question."""
    rng = random.Random(depth)
    hits, lengths = 0, []
    for _ in range(count):
        names = tasks.subjects(rng, 3)
        facts = [(n, tasks.code(rng)) for n in names]
        first = f"The code of {facts[0][0]} is {facts[0][1]}.\n"
        text = first + tasks.planted(rng, sources, facts[1:], depth)
        prompt = f"{text}Question: What is the code of {facts[0][0]}?\nAnswer: The code of {facts[0][0]} is"
        ok, n = exact(model, sources.tokenizer, prompt, f" {facts[0][1]}.\n", device)
        hits += ok
        lengths.append(n)
    return {"filler_tokens": depth, "prompt_tokens_mean": round(float(np.mean(lengths))), "count": count,
            "exact": round(hits / count, 3)}


def chat_recall(model: Scorer, sources: tasks.Sources, depth: int, count: int, device: str) -> float:
    rng = random.Random(depth + 1)
    hits = 0
    for _ in range(count):
        name, value = tasks.subjects(rng, 1)[0], tasks.code(rng)
        text = f"The code of {name} is {value}.\n{sources.filler(rng, depth)}\nWhat is the code of {name}?"
        prompt = render([{"role": "user", "content": text}], add_generation_prompt=True, enable_thinking=False)
        hits += exact(model, sources.tokenizer, prompt, f"The code of {name} is {value}.<|im_end|>", device)[0]
    return round(hits / count, 3)


def turns(model: Scorer, tok: Any, make: Any, count: int, device: str) -> float:
    """Exact answers to single-turn questions without thinking."""
    rng = random.Random(7)
    hits = 0
    for _ in range(count):
        question, _, answer = make(rng)
        prompt = render([{"role": "user", "content": question}], add_generation_prompt=True, enable_thinking=False)
        hits += exact(model, tok, prompt, answer + "<|im_end|>", device)[0]
    return round(hits / count, 3)


def copying(model: Scorer, sources: tasks.Sources, count: int, device: str) -> float:
    rng = random.Random(11)
    hits = 0
    for _ in range(count):
        text = " ".join(sources.filler(rng, 25).split())
        prompt = render([{"role": "user", "content": f"Repeat after me: {text}"}], add_generation_prompt=True,
                        enable_thinking=False)
        hits += exact(model, sources.tokenizer, prompt, text + "<|im_end|>", device)[0]
    return round(hits / count, 3)


@torch.no_grad()
def held_out(model: LuceTiny, held: Tensor, n_tokens: int, length: int = 2048) -> dict[str, Any]:
    """Perplexity, routing and draft agreement over rows of `length` held-out tokens."""
    loss, count = 0.0, 0
    loads: list[Tensor] = []
    agree = [0, 0]
    drafted = 0
    for i in range(n_tokens // length):
        row = held[i * length : (i + 1) * length + 1][None]
        tokens, targets = row[:, :-1], row[:, 1:]
        trace = model.trunk(tokens)
        logits = model.steps["head_logits"](model.output_hc, model.output, trace.res)
        loss += torch.nn.functional.cross_entropy(logits[0].float(), targets[0], reduction="sum").item()
        count += targets.numel()
        loads.append(torch.stack(trace.loads))
        # the trunk's own next choice at t+1 against the head's draft made at t from the true token t+1
        choice = logits.argmax(-1)
        hidden, ahead = trace.res, targets
        for step in range(2):
            hidden, _, _ = model.draft(ahead, hidden)
            draft = model.steps["head_logits"](model.mtp.head, model.output, hidden).argmax(-1)
            end = -1 - step
            agree[step] += int((draft[:, :end] == choice[:, 1 + step :]).sum())
            ahead = torch.nn.functional.pad(row[:, 2 + step :], (0, 1 + step))
        drafted += choice.numel() - 1
    load = torch.stack(loads).mean(0)
    load = load / load.sum(-1, keepdim=True)
    hot = load.sort(-1, descending=True).values[:, : load.shape[1] // 4].sum(-1)
    return {
        "held_tokens": count, "cross_entropy": round(loss / count, 4), "perplexity": round(float(np.exp(loss / count)), 3),
        "draft_agreement_1": round(agree[0] / drafted, 4), "draft_agreement_2": round(agree[1] / drafted, 4),
        "hot_quarter_share_by_layer": [round(x, 3) for x in hot.tolist()],
        "coldest_expert_share_by_layer": [round(x, 4) for x in load.min(-1).values.tolist()],
    }


@torch.no_grad()
def generate(model: LuceTiny, tok: Any, prompt: str, limit: int, device: str) -> tuple[str, float]:
    """Greedy text of at most `limit` tokens, and the share of tokens the draft head would have guessed."""
    ids = list(tok.encode(prompt).ids)
    start = len(ids)
    for _ in range(limit):
        token = int(model.logits(torch.tensor([ids], device=device))[0, -1].argmax())
        ids.append(token)
        if token in (tokenizer.IM_END_ID, tokenizer.EOT_ID):
            break
    padded = ids + [tokenizer.EOT_ID] * (-len(ids) % GatedDeltaNet.chunk)
    tokens = torch.tensor([padded], device=device)
    hidden, _, _ = model.draft(torch.roll(tokens, -1, 1), model.trunk(tokens).res)
    draft = model.steps["head_logits"](model.mtp.head, model.output, hidden)[0].argmax(-1)
    scored = range(start + 1, len(ids))
    hits = sum(int(draft[i - 2]) == ids[i] for i in scored)
    return tok.decode(ids[start:], skip_special_tokens=False), hits / max(1, len(scored))


PROMPTS = ("What is a river?", "What is 17 + 25?", "What is the capital of France?", "Hello!", "Who are you?",
           "What does hammer mean?", "The code of Anna is 7421. The code of Bert is 9036. What is the code of Anna?")


def skills(model: Scorer, sources: tasks.Sources, count: int, device: str) -> dict[str, Any]:
    """Exact-answer rates of every task."""
    tok = sources.tokenizer
    return {
        "recall": [recall(model, sources, depth, count, device) for depth in (300, 700, 1500)],
        "recall_chat": {str(d): chat_recall(model, sources, d, count, device) for d in (40, 300, 1500)},
        "arithmetic": turns(model, tok, tasks.arithmetic_turn, count, device),
        "facts": turns(model, tok, tasks.fact_turn, count, device),
        "definitions": turns(model, tok, lambda rng: tasks.definition_turn(rng, sources), count, device),
        "copy_25_tokens": copying(model, sources, count, device),
    }


def report(model: LuceTiny, data: Path, n_held: int, count: int, device: str) -> dict[str, Any]:
    tok = tokenizer.load(data)
    held = tokenizer.read_shard(data / "held.u16.xz")
    sources = tasks.Sources.load(data, held, tok)
    out: dict[str, Any] = {"held_out": held_out(model, torch.from_numpy(held.astype(np.int64)).to(device), n_held)}
    out |= skills(model, sources, count, device)
    samples = []
    for thinking in (False, True):
        for question in PROMPTS:
            prompt = render([{"role": "user", "content": question}], add_generation_prompt=True, enable_thinking=thinking)
            text, accepted = generate(model, tok, prompt, 80, device)
            samples.append({"prompt": question, "thinking": thinking, "text": text, "draft_share": round(accepted, 3)})
    for opening in ("In the beginning", "The purpose of this command is", "Harbor , n."):
        text, accepted = generate(model, tok, opening, 100, device)
        samples.append({"prompt": opening, "raw": True, "text": text, "draft_share": round(accepted, 3)})
    out["samples"] = samples
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("weights", type=Path)
    parser.add_argument("--held", type=int, default=40960)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        torch.set_num_threads(1)
    model = LuceTiny(Config()).eval()
    if args.weights.suffix == ".gguf":
        from .export import load_gguf

        load_gguf(model, args.weights)
    else:
        load_weights(model, args.weights)
    result = report(model.to(device), args.data, args.held, args.count, device)
    text = json.dumps(result, indent=1, ensure_ascii=False)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
