#!/usr/bin/env python3
"""Teacher-forced float32 logits of a qwen4exp GGUF from `transformers`, the model's own reference.

Runs in an environment of its own (`requirements.txt` beside this file) and imports nothing of pyluce: the file is
read with the PyPI package `gguf`, dequantised to float32, and turned back into a `Qwen4ExpForCausalLM` by the inverse
of the conversion that GGUF files of this architecture went through.

    transformers_reference.py model.gguf tokens.json out.npz [--hidden] [--ties lower|shipped]

`tokens.json` holds one list of token ids, or a list of such lists. `out.npz` holds for the i-th list:

* `tokens_i`  int32 [T];
* `logits_i`  float32 [T, n_vocab]: row t was computed from tokens 0..t;
* `hidden_i`  float32 [n_layer, T, hc * n_embd], only with --hidden: the residual streams after each layer;
* `block_gap_i`, `router_gap_i`  float32: how far the closest call was, see `ClosestCalls`;

and once `reference`, a JSON string: versions, tie rule, SHA-256 of the model file.

Of equal indexer scores the lower block index is selected (`--ties lower`); neither torch nor ggml defines an order,
ReLU makes exact ties common, and pyluce's rule is this one. `--ties shipped` leaves torch's order.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from gguf import GGUFReader
from gguf.quants import dequantize
from transformers.models.qwen4_exp import modeling_qwen4_exp as hf
from transformers.models.qwen4_exp.configuration_qwen4_exp import Qwen4ExpTextConfig

ARCH = "qwen4exp"


class GgufModel:
    """Metadata and float32 tensors of one GGUF file, or of all shards of one model."""

    def __init__(self, path: Path):
        self._readers = [GGUFReader(str(p)) for p in shard_paths(path)]
        fields = self._readers[0].fields
        self.metadata: dict[str, Any] = {
            name: field.contents() for name, field in fields.items() if not name.startswith("tokenizer.ggml.")
        }
        self._tensors = {t.name: t for reader in self._readers for t in reader.tensors}
        arch = self.metadata.get("general.architecture")
        if arch != ARCH:
            raise SystemExit(f"{path}: expected general.architecture {ARCH!r}, found {arch!r}")

    def get(self, key: str, default: Any = None) -> Any:
        """Value of `qwen4exp.<key>`; without a default a missing key ends the program."""
        value = self.metadata.get(f"{ARCH}.{key}", default)
        if value is None:
            raise SystemExit(f"the file has no key {ARCH}.{key}")
        return value

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor as float32, in numpy's order of axes (slowest first)."""
        if name not in self._tensors:
            raise SystemExit(f"the file has no tensor {name}")
        stored = self._tensors[name]
        values = np.ascontiguousarray(dequantize(stored.data, stored.tensor_type), dtype=np.float32)
        shape = tuple(int(n) for n in reversed(stored.shape))
        return torch.from_numpy(values.reshape(shape).copy())


def shard_paths(path: Path) -> list[Path]:
    """All files of a model given any of them (`-0000i-of-0000N` siblings, or the file itself)."""
    stem, _, count = path.stem.rpartition("-of-")
    base, _, index = stem.rpartition("-")
    if not (base and index.isdigit() and count.isdigit()):
        return [path]
    n = int(count)
    return [path.with_name(f"{base}-{i:05d}-of-{n:05d}{path.suffix}") for i in range(1, n + 1)]


def layer_counts(model: GgufModel) -> tuple[int, list[bool]]:
    """Number of trunk layers, and for each whether it is a linear (GDN) layer."""
    n_layer = int(model.get("block_count")) - int(model.get("nextn_predict_layers", 0))
    interval = int(model.get("full_attention_interval", 4))
    linear = model.get("attention.recurrent_layers", [bool((i + 1) % interval) for i in range(n_layer)])
    linear = [bool(x) for x in linear][:n_layer]
    ratios = [int(x) for x in model.get("attention.compress_ratios")][:n_layer]
    dense = [i for i in range(n_layer) if not linear[i] and ratios[i] == 0]
    if dense:
        raise SystemExit(f"full-attention layers {dense} have compress ratio 0: this file was converted wrongly")
    return n_layer, linear


def build_config(model: GgufModel) -> Qwen4ExpTextConfig:
    n_layer, linear = layer_counts(model)
    ratio = max(int(x) for x in model.get("attention.compress_ratios"))
    head_dim, rope_dim = int(model.get("attention.key_length")), int(model.get("rope.dimension_count"))
    v_heads = int(model.get("ssm.time_step_rank"))
    vocab = model.tensor("token_embd.weight").shape[0]
    ple = [int(i) for i in model.get("ple.layers", [])]
    extra: dict[str, Any] = {}
    if ple:
        heads = (int(model.get("ple.ngram_size")) - 1) * int(model.get("ple.heads_per_ngram"))
        extra = {
            "ple_layer_ids": [i + 1 for i in ple],  # one larger in this configuration than in the file
            "ple_embed_dim": int(model.get("embedding_length_per_layer_input")) * heads,
            "ple_conv_kernel_size": int(model.get("ple.conv_kernel")),
            "ngram_size": int(model.get("ple.ngram_size")),
            "heads_per_ngram": int(model.get("ple.heads_per_ngram")),
            "ngram_vocab_size_base": 11,  # only sizes the placeholders that load_hash_constants replaces
            "eos_token_id": int(model.get("ple.eos_token_id")),
        }
    return Qwen4ExpTextConfig(
        vocab_size=vocab,
        hidden_size=int(model.get("embedding_length")),
        num_hidden_layers=n_layer,
        # "full_attention" in this list would be renamed; the indexed name is what the model tests for
        layer_types=["linear_attention" if is_linear else "indexed_attention" for is_linear in linear],
        num_attention_heads=int(model.get("attention.head_count")),
        num_key_value_heads=int(model.get("attention.head_count_kv")),
        head_dim=head_dim,
        max_position_embeddings=int(model.get("context_length", 32768)),
        rms_norm_eps=float(model.get("attention.layer_norm_rms_epsilon")),
        rope_parameters={
            "rope_type": "default",
            "rope_theta": float(model.get("rope.freq_base")),
            "partial_rotary_factor": rope_dim / head_dim,
            "mrope_section": [int(x) for x in model.get("rope.dimension_sections")][:3],
            "mrope_interleaved": True,
        },
        linear_conv_kernel_dim=int(model.get("ssm.conv_kernel")),
        linear_key_head_dim=int(model.get("ssm.state_size")),
        linear_value_head_dim=int(model.get("ssm.inner_size")) // v_heads,
        linear_num_key_heads=int(model.get("ssm.group_count")),
        linear_num_value_heads=v_heads,
        moe_intermediate_size=int(model.get("expert_feed_forward_length")),
        shared_expert_intermediate_size=int(model.get("expert_shared_feed_forward_length")),
        num_experts=int(model.get("expert_count")),
        num_experts_per_tok=int(model.get("expert_used_count")),
        hc_count=int(model.get("hyper_connection.count")),
        hc_lowrank=int(model.get("hyper_connection.low_rank")),
        indexer_n_heads=int(model.get("attention.indexer.head_count")),
        indexer_kv_heads=1,
        indexer_head_dim=int(model.get("attention.indexer.key_length")),
        indexer_budget=int(model.get("attention.indexer.top_k")),
        indexer_compress_ratio=ratio,
        norm_topk_prob=True,
        output_gate_type="sigmoid",
        tie_word_embeddings=False,
        attn_implementation="eager",
        experts_implementation="eager",
        **extra,
    )


def grouped_from_tiled(x: torch.Tensor, axis: int, k_heads: int, head_dim: int) -> torch.Tensor:
    """Value heads back from the file's tiled order (all first heads of the groups, then all second) to groups."""
    moved = x.movedim(axis, 0)
    rest = moved.shape[1:]
    moved = moved.reshape(-1, k_heads, head_dim, *rest).transpose(0, 1).reshape(-1, *rest)
    return moved.movedim(0, axis).contiguous()


def state_dict(model: GgufModel, config: Qwen4ExpTextConfig) -> dict[str, torch.Tensor]:
    """Every parameter of the reference model from the file's tensors; zero-centred gains lose their 1."""
    out: dict[str, torch.Tensor] = {}

    def put(name: str, tensor_name: str, change: Callable[[torch.Tensor], torch.Tensor] | None = None) -> None:
        value = model.tensor(tensor_name)
        out[name] = value if change is None else change(value)

    def gain(x: torch.Tensor) -> torch.Tensor:
        return x.reshape(-1) - 1

    head = "output.weight" if "output.weight" in model else "token_embd.weight"
    put("model.embed_tokens.weight", "token_embd.weight")
    put("lm_head.weight", head)
    mixer = "model.hyper_connection_mixer."
    put(mixer + "hc_norm.weight", "output_hc_norm.weight", gain)
    put(mixer + "input_mix_weight_down.weight", "output_hc_down.weight")
    put(mixer + "input_mix_weight_up.weight", "output_hc_up.weight")
    for i, layer_type in enumerate(config.layer_types):
        to, blk = f"model.layers.{i}.", f"blk.{i}."
        for ours, theirs in (("attn", "attn"), ("ffn", "mlp")):
            hc = f"{to}{theirs}_hyper_connection."
            put(hc + "hc_norm.weight", f"{blk}hc_{ours}_norm.weight", gain)
            put(hc + "input_mix_weight_down.weight", f"{blk}hc_{ours}_down.weight")
            put(hc + "input_mix_weight_up.weight", f"{blk}hc_{ours}_up.weight")
            put(hc + "block_inject_weight.weight", f"{blk}hc_{ours}_inject.weight")
        put_experts(put, out, model, to + "mlp.", blk)
        if layer_type == "linear_attention":
            put_linear_attention(put, config, to + "linear_attn.", blk)
        else:
            put_attention(put, out, model, to + "self_attn.", blk, gain)
        if i + 1 in config.ple_layer_ids:
            ple = to + "ple."
            for part in ("norm_key", "norm_query", "norm_conv"):
                put(f"{ple}{part}.weight", f"{blk}ple_{part}.weight", gain)
            put(ple + "key_proj.weight", f"{blk}ple_key.weight")
            put(ple + "value_proj.weight", f"{blk}ple_value.weight")
            put(ple + "conv1d.weight", f"{blk}ple_conv1d.weight", lambda x: x.unsqueeze(1))
            put(ple + "ple_embedding.ngram_embedding.weight", "per_layer_token_embd.weight")
    return out


def put_experts(put: Callable[..., None], out: dict[str, torch.Tensor], model: GgufModel, to: str, blk: str) -> None:
    fused = f"{blk}ffn_gate_up_exps.weight"
    if fused in model:
        put(to + "experts.gate_up_proj", fused)
    else:
        halves = [model.tensor(f"{blk}ffn_{part}_exps.weight") for part in ("gate", "up")]
        out[to + "experts.gate_up_proj"] = torch.cat(halves, dim=1)
    put(to + "experts.down_proj", f"{blk}ffn_down_exps.weight")
    put(to + "gate.weight", f"{blk}ffn_gate_inp.weight")
    put(to + "shared_expert_gate.weight", f"{blk}ffn_gate_inp_shexp.weight", lambda x: x.reshape(1, -1))
    for part in ("gate", "up", "down"):
        put(f"{to}shared_expert.{part}_proj.weight", f"{blk}ffn_{part}_shexp.weight")


def put_linear_attention(put: Callable[..., None], config: Qwen4ExpTextConfig, to: str, blk: str) -> None:
    k_heads, v_dim = config.linear_num_key_heads, config.linear_value_head_dim
    n_qk = 2 * k_heads * config.linear_key_head_dim

    def rows(x: torch.Tensor, head_dim: int = v_dim) -> torch.Tensor:
        return grouped_from_tiled(x, 0, k_heads, head_dim)

    def heads(x: torch.Tensor) -> torch.Tensor:
        return rows(x, 1)

    def value_rows(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x[:n_qk], rows(x[n_qk:])])

    put(to + "in_proj_qkv.weight", f"{blk}attn_qkv.weight", value_rows)
    put(to + "in_proj_z.weight", f"{blk}attn_gate.weight", rows)
    put(to + "in_proj_b.weight", f"{blk}ssm_beta.weight", heads)
    put(to + "in_proj_a.weight", f"{blk}ssm_alpha.weight", heads)
    put(to + "conv1d.weight", f"{blk}ssm_conv1d.weight", lambda x: value_rows(x).unsqueeze(1))
    put(to + "dt_bias", f"{blk}ssm_dt.bias", heads)
    put(to + "A_log", f"{blk}ssm_a", lambda x: heads(torch.log(-x.reshape(-1))))
    put(to + "norm.weight", f"{blk}ssm_norm.weight")  # the one norm that is not zero-centred
    put(to + "out_proj.weight", f"{blk}ssm_out.weight", lambda x: grouped_from_tiled(x, 1, k_heads, v_dim))


def put_attention(
    put: Callable[..., None],
    out: dict[str, torch.Tensor],
    model: GgufModel,
    to: str,
    blk: str,
    gain: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    for theirs, ours in (("q_proj", "attn_q"), ("k_proj", "attn_k"), ("v_proj", "attn_v"), ("o_proj", "attn_output")):
        put(f"{to}{theirs}.weight", f"{blk}{ours}.weight")  # q_proj: [q | gate] interleaved per head in both
    put(to + "q_norm.weight", f"{blk}attn_q_norm.weight", gain)
    put(to + "k_norm.weight", f"{blk}attn_k_norm.weight", gain)
    parts = [model.tensor(f"{blk}indexer.{part}_proj.weight") for part in ("q", "k")]
    out[to + "indexer.index_qk_proj.weight"] = torch.cat(parts)
    put(to + "indexer.q_layernorm.weight", f"{blk}indexer.q_norm.weight", gain)
    put(to + "indexer.k_layernorm.weight", f"{blk}indexer.k_norm.weight", gain)


def load_hash_constants(net: hf.Qwen4ExpForCausalLM, model: GgufModel, config: Qwen4ExpTextConfig) -> None:
    """Take the PLE hash constants and the table's size from the file instead of deriving them from a seed."""
    for layer_id in config.ple_layer_ids:
        embedding = net.model.layers[layer_id - 1].ple.ple_embedding
        multipliers = [int(x) for x in model.get("ple.layer_multipliers")][: config.ngram_size]
        if max(multipliers) * config.vocab_size >= 1 << 63:
            raise SystemExit("multiplier times vocabulary exceeds int64, where this reference and the file differ")
        embedding.layer_multipliers = torch.tensor(multipliers, dtype=torch.long)
        sizes, offsets = model.get("ple.head_vocab_sizes"), model.get("ple.head_offsets")
        embedding.ngram_heads_vocab_sizes = torch.tensor([int(x) for x in sizes], dtype=torch.long)
        embedding.ngram_heads_offsets = torch.tensor([int(x) for x in offsets], dtype=torch.long)
        rows, width = model.tensor("per_layer_token_embd.weight").shape
        embedding.ngram_embedding = torch.nn.Embedding(rows, width)


def build_model(model: GgufModel) -> hf.Qwen4ExpForCausalLM:
    config = build_config(model)
    net = hf.Qwen4ExpForCausalLM(config).float().eval()
    load_hash_constants(net, model, config)
    missing, unexpected = net.load_state_dict(state_dict(model, config), strict=False)
    hash_constants = ("layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets")
    missing = [name for name in missing if not name.endswith(hash_constants)]
    if missing or unexpected:
        raise SystemExit(f"parameters without a tensor: {missing}; tensors without a parameter: {unexpected}")
    rotary = net.model.rotary_emb.inv_freq.numel() * 2
    if rotary != int(model.get("rope.dimension_count")):
        raise SystemExit(f"expected {model.get('rope.dimension_count')} rotary dimensions, found {rotary}")
    return net


class TopK(NamedTuple):
    values: torch.Tensor
    indices: torch.Tensor


class ClosestCalls:
    """Smallest distance between the last selected and the first rejected candidate, exact ties left out.

    Two correct float32 implementations may select differently once this approaches their rounding error (1e-6 or so),
    and then differ by far more than rounding. A fixture is only a fair test while both numbers are well above it.
    """

    def __init__(self) -> None:
        self.block = self.router = float("inf")

    def see_blocks(self, ordered: torch.Tensor, k: int) -> None:
        if k < ordered.numel():
            gap = float(ordered[k - 1] - ordered[k])
            self.block = min(self.block, gap) if gap > 0 else self.block

    def see_router(self, _module: Any, _args: Any, output: tuple[torch.Tensor, ...]) -> None:
        router_logits, scores, _ = output
        k = scores.shape[-1]
        if k < router_logits.shape[-1]:
            top = torch.topk(router_logits, k + 1, dim=-1).values
            self.router = min(self.router, float((top[..., k - 1] - top[..., k]).min()))


@contextlib.contextmanager
def ties_to_lower_index(calls: ClosestCalls) -> Iterator[None]:
    """Within, `Tensor.topk` (the method; only the indexer uses it) puts the lower index first among equal values."""
    shipped = torch.Tensor.topk

    def topk(self: torch.Tensor, k: int, dim: int = -1) -> TopK:
        ordered = torch.sort(self, dim=dim, descending=True, stable=True)
        calls.see_blocks(ordered.values, k)
        return TopK(ordered.values.narrow(dim, 0, k), ordered.indices.narrow(dim, 0, k))

    torch.Tensor.topk = topk  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.Tensor.topk = shipped  # type: ignore[method-assign]


def evaluate(net: hf.Qwen4ExpForCausalLM, tokens: list[int], ties: str, hidden: bool) -> dict[str, np.ndarray]:
    """Logits (and residual streams) of one teacher-forced pass over `tokens`, without a cache."""
    calls, layers = ClosestCalls(), []
    hooks = [layer.mlp.gate.register_forward_hook(calls.see_router) for layer in net.model.layers]
    if hidden:
        hooks += [layer.register_forward_hook(lambda _m, _a, out: layers.append(out[0])) for layer in net.model.layers]
    rule = ties_to_lower_index(calls) if ties == "lower" else contextlib.nullcontext()
    try:
        with torch.no_grad(), rule:
            logits = net(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    finally:
        for hook in hooks:
            hook.remove()
    out = {
        "tokens": np.asarray(tokens, np.int32),
        "logits": logits.float().numpy(),
        "block_gap": np.float32(calls.block),
        "router_gap": np.float32(calls.router),
    }
    if hidden:
        out["hidden"] = torch.stack(layers).numpy()
    return out


def sha256_of(paths: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def run(path: Path, prompts: list[list[int]], ties: str = "lower", hidden: bool = False) -> dict[str, Any]:
    """Everything that the npz file holds, for callers in the same environment."""
    net = build_model(GgufModel(path))
    out: dict[str, Any] = {}
    for i, tokens in enumerate(prompts):
        out |= {f"{name}_{i}": value for name, value in evaluate(net, tokens, ties, hidden).items()}
    about = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "ties": ties,
        "model_sha256": sha256_of(shard_paths(path)),
    }
    out["reference"] = json.dumps(about)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("tokens", type=Path, help="JSON: a list of token ids, or a list of such lists")
    parser.add_argument("out", type=Path)
    parser.add_argument("--ties", choices=("lower", "shipped"), default="lower")
    parser.add_argument("--hidden", action="store_true", help="also store the residual streams after each layer")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    prompts = json.loads(args.tokens.read_text())
    if prompts and isinstance(prompts[0], int):
        prompts = [prompts]
    result = run(args.model, prompts, args.ties, args.hidden)
    np.savez(args.out, **result)
    for i, tokens in enumerate(prompts):
        gaps = f"closest block {result[f'block_gap_{i}']:.2e}, closest expert {result[f'router_gap_{i}']:.2e}"
        print(f"{args.out}: {len(tokens)} tokens; {gaps}")


if __name__ == "__main__":
    main()
