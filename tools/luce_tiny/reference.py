"""Checks `model.py` against transformers' Qwen4ExpForCausalLM in float32.

    python -m tools.luce_tiny.reference [checkpoint.npz]    # random weights without an argument

The reference's indexer breaks ties by torch.topk's undefined order; here it is given the project's
rule (equal scores: lower block index first) by replacing `Tensor.topk`, which only the indexer uses.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .config import Config
from .model import LuceTiny, initialise


def grouped(weight: Tensor, config: Config, axis: int = 0) -> Tensor:
    """Value heads from tiled (this project, GGUF) to grouped (transformers) order along `axis`."""
    heads, keys = config.ssm_v_heads, config.ssm_k_heads
    order = [j * keys + k for k in range(keys) for j in range(heads // keys)]
    size = weight.shape[axis] // heads
    index = torch.cat([torch.arange(h * size, (h + 1) * size) for h in order])
    return weight.index_select(axis, index)


def to_reference(state: dict[str, Tensor], config: Config) -> dict[str, Tensor]:
    """Our parameters under transformers' names and conventions."""
    c = config
    out = {
        "model.embed_tokens.weight": state["token_embd"],
        "lm_head.weight": state["output"],
    }

    def hyper(source: str, target: str) -> None:
        out[f"{target}.hc_norm.weight"] = state[f"{source}.norm"] - 1
        out[f"{target}.input_mix_weight_down.weight"] = state[f"{source}.down.weight"]
        out[f"{target}.input_mix_weight_up.weight"] = state[f"{source}.up.weight"]
        if f"{source}.inject.weight" in state:
            out[f"{target}.block_inject_weight.weight"] = state[f"{source}.inject.weight"]

    hyper("output_hc", "model.hyper_connection_mixer")
    for i in range(c.n_layer):
        s, t = f"blocks.{i}", f"model.layers.{i}"
        hyper(f"{s}.hc_attn", f"{t}.attn_hyper_connection")
        hyper(f"{s}.hc_ffn", f"{t}.mlp_hyper_connection")
        m = f"{s}.mixer"
        if c.is_full(i):
            a = f"{t}.self_attn"
            for ours, theirs in (("q", "q"), ("k", "k"), ("v", "v"), ("output", "o")):
                out[f"{a}.{theirs}_proj.weight"] = state[f"{m}.attn_{ours}.weight"]
            for x in ("q", "k"):
                out[f"{a}.{x}_norm.weight"] = state[f"{m}.attn_{x}_norm"] - 1
                out[f"{a}.indexer.{x}_layernorm.weight"] = state[f"{m}.indexer_{x}_norm"] - 1
            out[f"{a}.indexer.index_qk_proj.weight"] = torch.cat(
                [state[f"{m}.indexer_q_proj.weight"], state[f"{m}.indexer_k_proj.weight"]]
            )
        else:
            a = f"{t}.linear_attn"
            qk = 2 * c.key_dim
            qkv, conv = state[f"{m}.attn_qkv.weight"], state[f"{m}.ssm_conv1d"]
            out[f"{a}.in_proj_qkv.weight"] = torch.cat([qkv[:qk], grouped(qkv[qk:], c)])
            out[f"{a}.conv1d.weight"] = torch.cat([conv[:qk], grouped(conv[qk:], c)])[:, None]
            out[f"{a}.in_proj_z.weight"] = grouped(state[f"{m}.attn_gate.weight"], c)
            out[f"{a}.in_proj_a.weight"] = grouped(state[f"{m}.ssm_alpha.weight"], c)
            out[f"{a}.in_proj_b.weight"] = grouped(state[f"{m}.ssm_beta.weight"], c)
            out[f"{a}.A_log"] = grouped(state[f"{m}.ssm_a_log"], c)
            out[f"{a}.dt_bias"] = grouped(state[f"{m}.ssm_dt"], c)
            out[f"{a}.norm.weight"] = state[f"{m}.ssm_norm"]
            out[f"{a}.out_proj.weight"] = grouped(state[f"{m}.ssm_out.weight"], c, axis=1)
        f = f"{s}.ffn"
        out[f"{t}.mlp.gate.weight"] = state[f"{f}.ffn_gate_inp.weight"]
        out[f"{t}.mlp.experts.gate_up_proj"] = torch.cat([state[f"{f}.ffn_gate_exps"], state[f"{f}.ffn_up_exps"]], 1)
        out[f"{t}.mlp.experts.down_proj"] = state[f"{f}.ffn_down_exps"]
        out[f"{t}.mlp.shared_expert_gate.weight"] = state[f"{f}.ffn_gate_inp_shexp"][None]
        for x in ("gate", "up", "down"):
            out[f"{t}.mlp.shared_expert.{x}_proj.weight"] = state[f"{f}.ffn_{x}_shexp.weight"]
        if i == c.ple_layer:
            for x in ("key", "value"):
                out[f"{t}.ple.{x}_proj.weight"] = state[f"ngram.ple_{x}.weight"]
            for x in ("key", "query", "conv"):
                out[f"{t}.ple.norm_{x}.weight"] = state[f"ngram.ple_norm_{x}"] - 1
            out[f"{t}.ple.conv1d.weight"] = state["ngram.ple_conv1d"][:, None]
            out[f"{t}.ple.ple_embedding.ngram_embedding.weight"] = state["ngram.table"]
    return out


def reference_model(model: LuceTiny) -> Any:
    """Qwen4ExpForCausalLM with our weights, eager attention, float32, ties to the lower index."""
    from transformers.models.qwen4_exp.configuration_qwen4_exp import Qwen4ExpTextConfig
    from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpForCausalLM

    c = model.config
    config = Qwen4ExpTextConfig(
        vocab_size=c.n_vocab, hidden_size=c.n_embd, num_hidden_layers=c.n_layer, num_attention_heads=c.n_head,
        num_key_value_heads=c.n_head_kv, head_dim=c.head_dim, max_position_embeddings=c.n_ctx, rms_norm_eps=c.eps,
        rope_parameters={
            "rope_type": "default", "rope_theta": c.rope_base, "partial_rotary_factor": c.rope_dim / c.head_dim,
            "mrope_section": list(c.rope_sections[:3]), "mrope_interleaved": True,
        },
        linear_conv_kernel_dim=c.ssm_conv, linear_key_head_dim=c.ssm_state, linear_value_head_dim=c.ssm_state,
        linear_num_key_heads=c.ssm_k_heads, linear_num_value_heads=c.ssm_v_heads, hc_count=c.hc,
        hc_lowrank=c.hc_low_rank, ple_layer_ids=[c.ple_layer + 1], ple_embed_dim=c.ple_dim,
        ple_conv_kernel_size=c.ple_conv, ngram_size=c.ple_ngram, heads_per_ngram=c.ple_heads,
        ngram_vocab_size_base=c.ple_vocab_base, seed=c.ple_seed, split_ngram_parts=1,
        indexer_n_heads=c.indexer_heads, indexer_kv_heads=1, indexer_head_dim=c.indexer_dim,
        indexer_budget=c.indexer_top_k, indexer_compress_ratio=c.compress_ratio,
        num_experts_per_tok=c.n_expert_used, num_experts=c.n_expert, moe_intermediate_size=c.n_ff_exp,
        shared_expert_intermediate_size=c.n_ff_shexp, output_gate_type="sigmoid", eos_token_id=c.ple_eos,
        pad_token_id=None, bos_token_id=None, tie_word_embeddings=False, attn_implementation="eager",
    )
    reference = Qwen4ExpForCausalLM(config).eval().float()
    missing, unexpected = reference.load_state_dict(to_reference(model.state_dict(), c), strict=False)
    missing = [m for m in missing if "multipliers" not in m and "ngram_heads" not in m]
    if missing or unexpected:
        raise SystemExit(f"missing {missing}, unexpected {unexpected}")

    def stable_topk(self: Tensor, k: int, dim: int = -1) -> Any:
        return torch.return_types.topk(
            tuple(x.narrow(dim, 0, k) for x in torch.sort(self, dim=dim, descending=True, stable=True))
        )

    torch.Tensor.topk = stable_topk  # type: ignore[method-assign,assignment]
    return reference


def load_weights(model: LuceTiny, path: Path) -> None:
    """Load a checkpoint written by `train.py` (npz of float32 or float16 arrays)."""
    with np.load(path) as data:
        state = {k: torch.from_numpy(data[k].astype(np.float32)) for k in data.files}
    model.load_state_dict(state)


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = LuceTiny(Config()).eval()
    initialise(model)
    if len(sys.argv) > 1:
        load_weights(model, Path(sys.argv[1]))
    else:  # make every gate and norm matter
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn_like(p) * (0.1 if p.dim() == 1 else 0.02))
    ours_topk = torch.Tensor.topk
    reference = reference_model(model)
    their_topk = torch.Tensor.topk
    rng = np.random.default_rng(0)
    for length in (20, 130, 400):
        tokens = torch.from_numpy(rng.integers(0, 4096, (1, length)))
        tokens[:, ::37] = model.config.ple_eos
        with torch.no_grad():
            torch.Tensor.topk = their_topk  # type: ignore[method-assign]
            theirs = reference(input_ids=tokens, use_cache=False).logits
            torch.Tensor.topk = ours_topk  # type: ignore[method-assign]
            ours = model.logits(tokens)
        print(f"{length} tokens: max abs difference {(ours - theirs).abs().max():.2e}, logits std {theirs.std():.2f}")


if __name__ == "__main__":
    main()
