#!/usr/bin/env python3
"""Write the committed reference logits: `python -m tests.oracles.make_fixtures [tiny] [luce-tiny]`.

Needs the project's environment and, as LUCE_ORACLE_PYTHON or in `.venv-oracle`, the reference's (`make test-oracle`
creates it). The random model itself is not committed: tests write it again, and its SHA-256 is in the fixture.

Of several prompts the one with the widest margin is kept. The margin is the smallest distance between a selected and
a rejected block or expert: below float32's rounding error two correct implementations select differently and differ
by far more than rounding, so a prompt with a narrow margin would test luck.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from pyluce.native import Vocabulary
from pyluce.weights import open_model
from tests.oracles.columns import FIXTURES, Reference, file_sha256
from tests.support.dequantise import dequantise_gguf
from tests.support.models import ORACLE_EOS, ORACLE_SEED, ORACLE_SHAPE, luce_tiny_path
from tests.support.runs import prompt_tokens
from tools.synth import write_model

ROOT = Path(__file__).resolve().parents[2]
N_TOKENS = 1000
EOS_AT = (100, 101, 350, 700, 703, 998)
TINY_FIXTURE = FIXTURES / "oracle_tiny_f32.npz"
LUCE_TINY_FIXTURE = FIXTURES / "oracle_luce_tiny_f32.npz"


def oracle_python() -> Path | None:
    """The interpreter of the reference's environment, or None when there is none."""
    named = os.environ.get("LUCE_ORACLE_PYTHON")
    path = Path(named) if named else ROOT / ".venv-oracle" / "bin" / "python"
    return path if path.exists() else None


def run_reference(model: Path, prompts: list[list[int]], *options: str) -> dict[str, Any]:
    """What transformers_reference.py writes for these prompts, as a dictionary."""
    python = oracle_python()
    if python is None:
        raise SystemExit("expected the reference's environment (make test-oracle creates it), found none")
    with tempfile.TemporaryDirectory() as folder:
        tokens, out = Path(folder) / "tokens.json", Path(folder) / "out.npz"
        tokens.write_text(json.dumps(prompts))
        script = Path(__file__).with_name("transformers_reference.py")
        done = subprocess.run(
            [str(python), str(script), str(model), str(tokens), str(out), *options], capture_output=True, text=True
        )
        if done.returncode:
            raise RuntimeError(f"the reference failed for {model}:\n{done.stderr}")
        with np.load(out) as stored:
            return {name: stored[name] for name in stored.files}


def make_tiny(n_seeds: int) -> None:
    """Random weights, a vocabulary of 320, 1,000 tokens with end-of-text inside, a budget of 48 tokens."""
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "oracle.gguf"
        write_model(model, ORACLE_SHAPE, seed=ORACLE_SEED, name="oracle")
        prompts = [prompt_tokens(N_TOKENS, seed, ORACLE_SHAPE.n_vocab, ORACLE_EOS, EOS_AT) for seed in range(n_seeds)]
        save_widest(TINY_FIXTURE, model, run_reference(model, prompts), n_seeds)


def make_luce_tiny(n_prompts: int) -> None:
    """The shipped model widened to float32, on this project's own documentation with end-of-text inside."""
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "luce-tiny-f32.gguf"
        dequantise_gguf(luce_tiny_path(), model)
        prompts = documentation_prompts(luce_tiny_path())[:n_prompts]
        result = run_reference(model, prompts)
        save_widest(LUCE_TINY_FIXTURE, luce_tiny_path(), result, len(prompts))


def documentation_prompts(model: Path) -> list[list[int]]:
    """Windows of N_TOKENS tokens of the README and docs/, as this model's vocabulary cuts them."""
    text = "\n\n".join(path.read_text() for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))])
    with Vocabulary(model) as vocabulary, open_model(model) as file:
        tokens = [int(token) for token in vocabulary.tokenize(text)]
        ple = file.hparams.ple
    windows = [tokens[start : start + N_TOKENS] for start in range(0, len(tokens) - N_TOKENS + 1, N_TOKENS)]
    for window in windows if ple is not None else []:
        for position in EOS_AT:
            window[position] = ple.eos_token_id
    return windows


def save_widest(path: Path, model: Path, result: dict[str, Any], n_prompts: int) -> None:
    margins = [min(float(result[f"block_gap_{i}"]), float(result[f"router_gap_{i}"])) for i in range(n_prompts)]
    best = int(np.argmax(margins))
    about = {**json.loads(str(result["reference"])), "margin": margins[best], "model_sha256": file_sha256(model)}
    reference = Reference.from_logits(result[f"tokens_{best}"], result[f"logits_{best}"], about)
    FIXTURES.mkdir(exist_ok=True)
    reference.save(path)
    shown = ", ".join(f"{margin:.1e}" for margin in margins)
    print(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1e6:.2f} MB; margins {shown}; kept prompt {best}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("which", nargs="*", choices=["tiny", "luce-tiny"], default=[])
    parser.add_argument("--seeds", type=int, default=8, help="prompts to choose from")
    args = parser.parse_args()
    which = args.which or ["tiny", "luce-tiny"]
    if "tiny" in which:
        make_tiny(args.seeds)
    if "luce-tiny" in which:
        make_luce_tiny(args.seeds)


if __name__ == "__main__":
    sys.exit(main())
