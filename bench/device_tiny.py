"""luce-tiny on a device beside the CPU, from one set of libraries: are the greedy texts the same, how far apart are the logits?

    python -m bench.device_tiny --device cuda:0 --record FILE

Logits are compared at every position of the CPU's own text, so that they are of the same tokens.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from pyluce.graph import RunnerOptions, TrunkRunner
from pyluce.native import load_libraries
from pyluce.native.devices import parse_device
from pyluce.native.vocabulary import Vocabulary
from pyluce.options import DEFAULT_MODEL
from pyluce.text import Tokenizer

PROMPTS = (
    "What is the capital of France?",
    "Write a short story about a cat that finds a key.",
    "Count from one to twenty.",
    "Name three colours and say what each is the colour of. " * 8,
)
N_TOKENS = 64


def greedy(runner: TrunkRunner, prompt: list[int], forced: list[int] | None = None) -> tuple[list[int], Any]:
    """Tokens chosen greedily after the prompt, and the logits [N_TOKENS, n_vocab] they come from; `forced` decides the inputs."""
    state = runner.new_sequence()
    try:
        logits = [np.array(runner.prefill(state, prompt))]
        chosen = [int(logits[0].argmax())]
        while len(chosen) < N_TOKENS:
            token = chosen[-1] if forced is None else forced[len(chosen) - 1]
            logits.append(np.array(runner.decode([(state, token)]))[0])
            chosen.append(int(logits[-1].argmax()))
        return chosen, np.stack(logits)
    finally:
        state.free()


def compare(model: Path, device: str) -> dict[str, Any]:
    """For every prompt: both texts, whether their tokens are the same, largest and mean difference of the logits."""
    rows = []
    vocabulary = Vocabulary(model)
    tokenizer = Tokenizer(vocabulary)
    template = tokenizer.chat_template(vocabulary.chat_template)
    with (
        TrunkRunner(model, RunnerOptions(n_ctx=1024)) as cpu,
        TrunkRunner(model, RunnerOptions(n_ctx=1024, device=device)) as other,
    ):
        for text in PROMPTS:
            prompt = tokenizer.encode_prompt(template.render([{"role": "user", "content": text}]))
            expected, reference = greedy(cpu, prompt)
            found, _ = greedy(other, prompt)
            _, logits = greedy(other, prompt, forced=expected)
            gap = np.abs(logits - reference)
            rows.append(
                {
                    "prompt_tokens": len(prompt),
                    "same_tokens": found == expected,
                    "first_difference": next(
                        (i for i, (a, b) in enumerate(zip(found, expected, strict=True)) if a != b), None
                    ),
                    "largest_difference": float(gap.max()),
                    "mean_difference": float(gap.mean()),
                    "largest_logit": float(np.abs(reference).max()),
                    "text": vocabulary.detokenize(expected).decode("utf-8", "replace"),
                }
            )
    vocabulary.close()
    return {"model": model.name, "device": device, "tokens_each": N_TOKENS, "prompts": rows}


def main() -> None:
    """Compare, print, record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL)
    parser.add_argument("--device", required=True)
    parser.add_argument("--record", type=Path, required=True)
    a = parser.parse_args()
    load_libraries(parse_device(a.device)[0])
    result = compare(a.model, a.device)
    a.record.write_text(json.dumps(result))
    for row in result["prompts"]:
        same = "the same text" if row["same_tokens"] else f"another text from token {row['first_difference']} on"
        print(
            f"  {row['prompt_tokens']} prompt tokens: {same}, logits at most {row['largest_difference']:.2e} apart "
            f"(mean {row['mean_difference']:.1e}, largest logit {row['largest_logit']:.1f})",
            flush=True,
        )


if __name__ == "__main__":
    main()
