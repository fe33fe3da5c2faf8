"""Reference values of the float32 original, computed by transformers (not by our own model).

    python -m tools.luce_tiny.fixtures DATA_DIR CHECKPOINT.npz OUT_STEM

Writes OUT_STEM.npz and OUT_STEM.json; the json says what is in the npz and how it was made.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import numpy as np
import torch

from . import tasks, tokenizer
from .chat import render
from .config import Config
from .model import LuceTiny
from .reference import load_weights, reference_model

POSITIONS = 5


def prompts(data: Path) -> list[tuple[str, list[int]]]:
    """(description, tokens): a chat question, held-out text and a long recall document."""
    tok = tokenizer.load(data)
    held = tokenizer.read_shard(data / "held.u16.xz")
    question = render([{"role": "user", "content": "What is a river?"}], add_generation_prompt=True)
    chat = tok.encode(question + "The user asks what the word river means.\n</think>\n\nRiver: a large").ids[:20]
    sources = tasks.Sources.load(data, held, tok)
    rng = random.Random(5)
    facts = [("Anna", "7421"), ("the blue door", "9036")]
    text = "The code of Anna is 7421.\n" + tasks.planted(rng, sources, facts[1:], 660)
    recall = tok.encode(text + "Question: What is the code of Anna?\nAnswer: The code of Anna is 7421.\n").ids
    return [
        ("a chat question in the template, first 20 tokens", chat),
        ("held-out text, 200 tokens, document boundaries included", held[30_000:30_200].astype(int).tolist()),
        ("a planted fact, filler, the question and its answer", recall),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("stem", type=Path)
    parser.add_argument("--perplexity", type=float, help="of the float32 model, as evaluate_gguf.py measured it")
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = LuceTiny(Config()).eval()
    load_weights(model, args.checkpoint)
    ours = [model.logits(torch.tensor([tokens]))[0].detach().numpy() for _, tokens in prompts(args.data)]
    reference = reference_model(model)
    arrays: dict[str, np.ndarray] = {}
    about = []
    for i, (text, tokens) in enumerate(prompts(args.data)):
        with torch.no_grad():
            logits = reference(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].numpy()
        positions = np.unique(np.linspace(0, len(tokens) - 1, POSITIONS).astype(np.int32))
        top = np.sort(logits, -1)
        arrays |= {
            f"tokens_{i}": np.array(tokens, np.int32), f"argmax_{i}": logits.argmax(-1).astype(np.int32),
            f"margin_{i}": (top[:, -1] - top[:, -2]).astype(np.float32),
            f"positions_{i}": positions, f"logits_{i}": logits[positions].astype(np.float32),
        }
        distance = float(np.abs(ours[i] - logits).max())
        about.append({"prompt": text, "tokens": len(tokens), "max_abs_difference_to_training_model": distance})
        print(about[-1], "argmax equal", bool((ours[i].argmax(-1) == logits.argmax(-1)).all()))
    args.stem.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(args.stem.with_suffix(".npz"), **arrays)  # type: ignore[arg-type]
    made = {
        "model": "luce-tiny, float32 original (before quantisation)",
        "made_by": "tools/luce_tiny/fixtures.py with transformers 5.24.0 Qwen4ExpForCausalLM, float32, eager attention, "
        "no cache, CPU; equal indexer scores go to the lower block index",
        "arrays": {
            "tokens_i": "token ids [T]", "argmax_i": "argmax of the logits at every position [T]",
            "margin_i": "best minus second best logit [T]", "positions_i": "positions whose full logits are kept",
            "logits_i": "float32 [len(positions), n_vocab]",
        },
        "prompts": about,
        "held_out_perplexity_f32": args.perplexity,
    }
    args.stem.with_suffix(".json").write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
