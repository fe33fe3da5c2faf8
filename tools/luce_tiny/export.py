"""Checkpoint to GGUF: names, layout and types as the published quants of the big model have them.

    python -m tools.luce_tiny.export DATA_DIR CHECKPOINT.npz OUT.gguf [--f32]

Routed experts are Q4_K (gate, up) and IQ4_NL (down), other matrices Q8_0; norms, router, convolutions and
small projections F32. `--f32` writes everything in F32, for comparisons. Needs the project's libggml-base.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from pyluce.weights.ggml_types import TYPES_BY_NAME
from tools.synth.quantise import Quantiser
from tools.synth.writer import Tensor, Value, write_gguf

from . import tokenizer
from .chat import TEMPLATE_PATH
from .config import Config
from .model import LuceTiny

Array = npt.NDArray[np.float32]
F32_LEAVES = ("norm", "inject", "ffn_gate_inp", "ssm_alpha", "ssm_beta", "ssm_conv1d", "ple_conv1d")


def gguf_name(name: str, n_layer: int) -> str:
    """A parameter's name in the file; trunk blocks are blk.0.., the MTP block follows them."""
    for old, new in (
        ("blocks.", "blk."), ("mtp.block.", f"blk.{n_layer}."), ("mtp.head.", f"blk.{n_layer}.nextn.hc_head_"),
        ("mtp.", f"blk.{n_layer}.nextn."), ("output_hc.", "output_hc_"), ("ngram.table", "per_layer_token_embd"),
        ("ngram.", f"blk.{Config().ple_layer}."),
    ):
        if name.startswith(old):
            name = new + name[len(old) :]
            break
    name = name.removesuffix(".weight")
    for part in (".mixer", ".ffn"):
        name = name.replace(part + ".", ".")
    name = name.replace(".hc_attn.", ".hc_attn_").replace(".hc_ffn.", ".hc_ffn_").replace(".indexer_", ".indexer.")
    if name.endswith("ssm_dt"):
        return name + ".bias"
    return name.replace("ssm_a_log", "ssm_a") if name.endswith("ssm_a_log") else name + ".weight"


def tensor_type(name: str, ne0: int) -> str:
    """The type a tensor has in the quantised file."""
    stem = name.removesuffix(".weight")
    if stem.endswith("down_exps"):
        return "IQ4_NL"
    if stem.endswith(("gate_exps", "up_exps")):
        return "Q4_K"
    if stem.endswith(F32_LEAVES) or stem.endswith(("ssm_a", "ssm_dt.bias", "ffn_gate_inp_shexp")) or ne0 % 32:
        return "F32"
    return "Q8_0"


def arrays(model: LuceTiny) -> dict[str, Array]:
    """Every tensor of the file in numpy order (slowest axis first), float32."""
    out: dict[str, Array] = {}
    for name, p in model.state_dict().items():
        value = p.detach().float().numpy()
        out[gguf_name(name, model.config.n_layer)] = -np.exp(value) if name.endswith("ssm_a_log") else value
    order = ["token_embd.weight", "output.weight", "per_layer_token_embd.weight"]
    return {k: out[k] for k in [*order, *sorted((k for k in out if k not in order), key=block_order)]}


def block_order(name: str) -> tuple[int, str]:
    return (int(name.split(".")[1]) if name.startswith("blk.") else -1, name)


def metadata(data: Path, c: Config, quantised: bool) -> dict[str, Value]:
    a = "qwen4exp."
    meta = {
        "general.architecture": Value("string", "qwen4exp"),
        "general.type": Value("string", "model"),
        "general.name": Value("string", "luce-tiny"),
        "general.description": Value("string", "A 19M parameter qwen4exp model for tests and demonstrations"),
        "general.size_label": Value("string", "16x1M"),
        "general.file_type": Value("u32", 15 if quantised else 0),
        "general.quantization_version": Value("u32", 2),
    }
    blocks = c.n_layer + 1
    u32 = {
        "block_count": blocks, "nextn_predict_layers": 1, "context_length": c.n_ctx, "embedding_length": c.n_embd,
        "attention.head_count": c.n_head, "attention.head_count_kv": c.n_head_kv,
        "attention.key_length": c.head_dim, "attention.value_length": c.head_dim,
        "rope.dimension_count": c.rope_dim, "expert_count": c.n_expert, "expert_used_count": c.n_expert_used,
        "expert_feed_forward_length": c.n_ff_exp, "expert_shared_feed_forward_length": c.n_ff_shexp,
        "ssm.conv_kernel": c.ssm_conv, "ssm.state_size": c.ssm_state, "ssm.group_count": c.ssm_k_heads,
        "ssm.time_step_rank": c.ssm_v_heads, "ssm.inner_size": c.value_dim,
        "full_attention_interval": c.full_interval, "hyper_connection.count": c.hc,
        "hyper_connection.low_rank": c.hc_low_rank, "attention.indexer.head_count": c.indexer_heads,
        "attention.indexer.key_length": c.indexer_dim, "attention.indexer.top_k": c.indexer_top_k,
        "ple.ngram_size": c.ple_ngram, "ple.heads_per_ngram": c.ple_heads, "ple.conv_kernel": c.ple_conv,
        "ple.eos_token_id": c.ple_eos, "embedding_length_per_layer_input": c.ple_row_dim, "vocab_size": c.n_vocab,
    }
    meta |= {a + k: Value("u32", v) for k, v in u32.items()}
    trunk = [c.is_full(i) for i in range(c.n_layer)]
    meta |= {
        a + "rope.freq_base": Value("f32", c.rope_base),
        a + "rope.dimension_sections": Value("i32", list(c.rope_sections)),
        a + "attention.layer_norm_rms_epsilon": Value("f32", c.eps),
        # the MTP block attends densely: ratio 0
        a + "attention.compress_ratios": Value("u32", [c.compress_ratio if full else 0 for full in trunk] + [0]),
        a + "ple.layers": Value("u32", [c.ple_layer]),
        a + "ple.layer_multipliers": Value("u64", c.ple_multipliers),
        a + "ple.head_offsets": Value("u64", c.ple_head_offsets),
        a + "ple.head_vocab_sizes": Value("u64", c.ple_head_sizes),
    }
    return meta | vocabulary(data)


def vocabulary(data: Path) -> dict[str, Value]:
    """Tokens, merges, special ids and the chat template."""
    spec = json.loads((data / "tokenizer.json").read_text())
    by_id = {i: t for t, i in spec["model"]["vocab"].items()}
    by_id |= {item["id"]: item["content"] for item in spec["added_tokens"]}
    kinds = dict.fromkeys(tokenizer.CONTROL, 3) | dict.fromkeys(tokenizer.USER_DEFINED, 4)
    tokens = [by_id[i] for i in range(tokenizer.VOCAB_SIZE)]
    merges = [m if isinstance(m, str) else " ".join(m) for m in spec["model"]["merges"]]
    t = "tokenizer.ggml."
    return {
        t + "model": Value("string", "gpt2"),
        t + "pre": Value("string", "qwen35"),
        t + "tokens": Value("string", tokens),
        t + "token_type": Value("i32", [kinds.get(text, 1) for text in tokens]),
        t + "merges": Value("string", merges),
        t + "bos_token_id": Value("u32", tokenizer.EOT_ID),
        t + "eos_token_id": Value("u32", tokenizer.IM_END_ID),
        t + "eot_token_id": Value("u32", tokenizer.IM_END_ID),
        t + "padding_token_id": Value("u32", tokenizer.EOT_ID),
        t + "add_bos_token": Value("bool", False),
        "tokenizer.chat_template": Value("string", TEMPLATE_PATH.read_text()),
    }


def write(data: Path, model: LuceTiny, out: Path, quantised: bool = True) -> None:
    quantiser = Quantiser()
    tensors = []
    for name, array in arrays(model).items():
        array = np.ascontiguousarray(array, np.float32)
        kind = tensor_type(name, array.shape[-1]) if quantised and array.ndim > 1 else "F32"

        def produce(array: Array = array, kind: str = kind) -> list[npt.NDArray[np.uint8]]:
            return [quantiser.convert(array.reshape(-1, array.shape[-1]), kind)]

        tensors.append(Tensor(name, tuple(reversed(array.shape)), TYPES_BY_NAME[kind].id, produce))
    write_gguf(out, metadata(data, model.config, quantised), tensors)


def load_gguf(model: LuceTiny, path: Path) -> None:
    """Load a file written here into the model, dequantised to float32."""
    from gguf import GGUFReader
    from gguf.quants import dequantize

    found: dict[str, Callable[[], Array]] = {
        t.name: (lambda t=t: dequantize(t.data, t.tensor_type)) for t in GGUFReader(path).tensors
    }
    state = {}
    for name, p in model.state_dict().items():
        value = found[gguf_name(name, model.config.n_layer)]().astype(np.float32)
        value = np.log(-value) if name.endswith("ssm_a_log") else value
        state[name] = torch.from_numpy(value.reshape(p.shape).copy())
    model.load_state_dict(state)


def main() -> None:
    from .reference import load_weights

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--f32", action="store_true")
    args = parser.parse_args()
    model = LuceTiny(Config()).eval()
    load_weights(model, args.checkpoint)
    write(args.data, model, args.out, quantised=not args.f32)
    print(f"{args.out}: {args.out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
