"""luce-tiny on a device beside the CPU, from one set of libraries: are the greedy texts the same, how far apart are the logits?

    python -m bench.device_tiny --device cuda:0 --record FILE

Logits are compared at every position of the CPU's own text, so that they are of the same tokens. Both round activations, the CPU to 8 bits
in all products, so a third run says which of them is nearer to what they both approximate: the same weights widened to float32, whose
products round nothing but sums.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.quants import dequantize

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
N_CTX = 1024


def write_widened(source: Path, target: Path) -> None:
    """The model with every weight as float32 of the same value."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, "", use_temp_file=False)
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            kind = field.types[0]
            writer.add_key_value(field.name, field.contents(), kind, field.types[-1] if len(field.types) > 1 else None)
    writer.add_key_value(
        "general.architecture", reader.fields["general.architecture"].contents(), gguf.GGUFValueType.STRING
    )
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type).reshape([int(n) for n in reversed(tensor.shape)])
        writer.add_tensor(tensor.name, np.ascontiguousarray(values, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


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


def first_difference(a: list[int], b: list[int]) -> int | None:
    """Where two texts part, None when they are the same."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), None)


def compare(model: Path, device: str) -> dict[str, Any]:
    """For every prompt: both texts, where they part, largest and mean difference of the logits, and the same against float32."""
    rows = []
    vocabulary = Vocabulary(model)
    tokenizer = Tokenizer(vocabulary)
    template = tokenizer.chat_template(vocabulary.chat_template)
    with tempfile.TemporaryDirectory() as folder:
        widened = Path(folder) / "float32.gguf"
        write_widened(model, widened)
        with (
            TrunkRunner(model, RunnerOptions(n_ctx=N_CTX)) as cpu,
            TrunkRunner(widened, RunnerOptions(n_ctx=N_CTX, repack=False)) as float32,
            TrunkRunner(model, RunnerOptions(n_ctx=N_CTX, device=device)) as other,
        ):
            for text in PROMPTS:
                prompt = tokenizer.encode_prompt(template.render([{"role": "user", "content": text}]))
                rows.append(compare_prompt(cpu, float32, other, prompt))
                rows[-1]["text"] = vocabulary.detokenize(rows[-1].pop("tokens")).decode("utf-8", "replace")
    vocabulary.close()
    return {"model": model.name, "device": device, "tokens_each": N_TOKENS, "prompts": rows}


def compare_prompt(cpu: TrunkRunner, float32: TrunkRunner, other: TrunkRunner, prompt: list[int]) -> dict[str, Any]:
    """One prompt on the three runners."""
    expected, reference = greedy(cpu, prompt)
    found, _ = greedy(other, prompt)
    _, logits = greedy(other, prompt, forced=expected)
    _, exact = greedy(float32, prompt, forced=expected)
    gap, parted = np.abs(logits - reference), first_difference(found, expected)
    row: dict[str, Any] = {
        "prompt_tokens": len(prompt),
        "tokens": expected,
        "same_tokens": parted is None,
        "first_difference": parted,
        "largest_difference": float(gap.max()),
        "mean_difference": float(gap.mean()),
        "largest_logit": float(np.abs(reference).max()),
        "cpu_to_float32": float(np.abs(reference - exact).mean()),
        "device_to_float32": float(np.abs(logits - exact).mean()),
    }
    if parted is not None:
        # up to here the inputs were the same
        row["margins"] = {
            name: margin(x[parted]) for name, x in (("cpu", reference), ("float32", exact), ("device", logits))
        }
        best = int(exact[parted].argmax())
        row["float32_chooses"] = (
            "the device's" if best == found[parted] else "the CPU's" if best == expected[parted] else "another"
        )
    return row


def margin(row: Any) -> float:
    """How far the largest logit is from the second."""
    second, first = np.sort(row)[-2:]
    return float(first - second)


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
            f"(mean {row['mean_difference']:.1e}, largest logit {row['largest_logit']:.1f}); mean distance from float32: "
            f"CPU {row['cpu_to_float32']:.1e}, {a.device} {row['device_to_float32']:.1e}",
            flush=True,
        )
        if not row["same_tokens"]:
            margins = ", ".join(f"{name} {value:.3f}" for name, value in row["margins"].items())
            print(
                f"    there the two best logits are apart by: {margins}; float32 chooses {row['float32_chooses']} token",
                flush=True,
            )


if __name__ == "__main__":
    main()
