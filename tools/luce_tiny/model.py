"""luce-tiny in PyTorch: a qwen4exp trunk with n-gram table, hyper-connections, experts and an MTP block.

In eval mode it computes what the reference implementation computes (`evaluate.py parity` checks it); for
training, every expert runs on every token with a masked weight, and the indexer is one matrix product.
Parameter names follow the GGUF tensor names; norm gains are stored as they are in the GGUF (1 at start).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .config import Config
from .mixers import Attention, GatedDeltaNet, ScanInputs, rms_norm, rope_table, scan_chunks


class HyperConnection(nn.Module):
    """Reads one block input out of `hc` residual streams and says how strongly each takes the output."""

    def __init__(self, config: Config, inject: bool = True):
        super().__init__()
        c = self.config = config
        self.norm = nn.Parameter(torch.ones(c.hc_dim))
        self.down = nn.Linear(c.hc_dim, c.hc_low_rank, bias=False)
        self.up = nn.Linear(c.hc_low_rank, c.hc_dim, bias=False)
        self.inject = nn.Linear(c.hc_dim, c.hc, bias=False) if inject else None

    def mix(self, res: Tensor) -> tuple[Tensor, Tensor | None]:
        """res [B, T, hc, D] to (block input [B, T, D], stream weights [B, T, hc] or None)."""
        c = self.config
        flat = rms_norm(res, self.norm.view(c.hc, c.n_embd), c.eps).flatten(-2)
        gate = torch.sigmoid(self.up(F.silu(self.down(flat) / c.hc)).float())
        mixed = (gate * flat).unflatten(-1, (c.hc, c.n_embd)).mean(-2)
        if self.inject is None:
            return mixed, None
        return mixed, 2 * torch.sigmoid(self.inject(flat).float() / c.hc)


class Experts(nn.Module):
    """16 routed experts, top 4, and one shared expert with a scalar gate."""

    def __init__(self, config: Config):
        super().__init__()
        c = self.config = config
        self.ffn_gate_inp = nn.Linear(c.n_embd, c.n_expert, bias=False)
        self.ffn_gate_exps = nn.Parameter(torch.empty(c.n_expert, c.n_ff_exp, c.n_embd))
        self.ffn_up_exps = nn.Parameter(torch.empty(c.n_expert, c.n_ff_exp, c.n_embd))
        self.ffn_down_exps = nn.Parameter(torch.empty(c.n_expert, c.n_embd, c.n_ff_exp))
        self.ffn_gate_inp_shexp = nn.Parameter(torch.empty(c.n_embd))
        self.ffn_gate_shexp = nn.Linear(c.n_embd, c.n_ff_shexp, bias=False)
        self.ffn_up_shexp = nn.Linear(c.n_embd, c.n_ff_shexp, bias=False)
        self.ffn_down_shexp = nn.Linear(c.n_ff_shexp, c.n_embd, bias=False)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [B, T, D] float32 to (weights, zero where not picked; softmax), both [B, T, E]."""
        with torch.autocast(x.device.type, enabled=False):
            probs = torch.softmax(F.linear(x.float(), self.ffn_gate_inp.weight), -1)
        value, index = probs.topk(self.config.n_expert_used, -1)
        value = value / value.sum(-1, keepdim=True).clamp_min(2.0**-14)
        return torch.zeros_like(probs).scatter(-1, index, value), probs

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns (output [B, T, D], balance loss, share of tokens that picked each expert [E])."""
        c = self.config
        weights, probs = self.route(x)
        hidden = F.silu(F.linear(x, self.ffn_gate_exps.flatten(0, 1))) * F.linear(x, self.ffn_up_exps.flatten(0, 1))
        hidden = hidden.unflatten(-1, (c.n_expert, c.n_ff_exp)) * weights[..., None].to(hidden.dtype)
        out = F.linear(hidden.flatten(-2), self.ffn_down_exps.permute(1, 0, 2).flatten(1))
        shared = self.ffn_down_shexp(F.silu(self.ffn_gate_shexp(x)) * self.ffn_up_shexp(x))
        gate = torch.sigmoid((x.float() * self.ffn_gate_inp_shexp).sum(-1, keepdim=True))
        load = (weights > 0).float().mean((0, 1))
        balance = c.n_expert / c.n_expert_used * (load * probs.mean((0, 1))).sum()
        return out.float() + gate * shared.float(), balance, load


class Ngram(nn.Module):
    """The hashed n-gram table and its gated, convolved injection into every stream (PLE)."""

    def __init__(self, config: Config):
        super().__init__()
        c = self.config = config
        self.table = nn.Parameter(torch.empty(c.ple_rows, c.ple_row_dim))
        self.ple_key = nn.Linear(c.ple_dim, c.hc_dim, bias=False)
        self.ple_value = nn.Linear(c.ple_dim, c.n_embd, bias=False)
        self.ple_norm_key = nn.Parameter(torch.ones(c.hc_dim))
        self.ple_norm_query = nn.Parameter(torch.ones(c.hc_dim))
        self.ple_norm_conv = nn.Parameter(torch.ones(c.hc_dim))
        self.ple_conv1d = nn.Parameter(torch.zeros(c.hc_dim, c.ple_conv))

    def rows(self, tokens: Tensor) -> Tensor:
        """Table rows of each position, int64 [B, T, heads]; a missing or cut predecessor reads as EOS."""
        c = self.config
        context = [tokens]
        cut = torch.zeros_like(tokens, dtype=torch.bool)
        for shift in range(1, c.ple_ngram):
            back = F.pad(tokens, (shift, 0), value=c.ple_eos)[:, : tokens.shape[1]]
            back = back.masked_fill(cut, c.ple_eos)
            cut = cut | (back == c.ple_eos)
            context.append(back)
        mixed = context[0] * c.ple_multipliers[0]
        out = []
        for n in range(1, c.ple_ngram):
            mixed = mixed ^ (context[n] * c.ple_multipliers[n])
            for h in range((n - 1) * c.ple_heads, n * c.ple_heads):
                out.append(mixed % c.ple_head_sizes[h] + c.ple_head_offsets[h])
        return torch.stack(out, -1)

    def forward(self, res: Tensor, tokens: Tensor) -> Tensor:
        c = self.config
        embedding = F.embedding(self.rows(tokens), self.table).flatten(-2)
        streams = (c.hc, c.n_embd)
        key = rms_norm(self.ple_key(embedding).unflatten(-1, streams), self.ple_norm_key.view(streams), c.eps)
        query = rms_norm(res, self.ple_norm_query.view(streams), c.eps)
        score = (key * query).sum(-1, keepdim=True) / math.sqrt(c.n_embd)
        gate = torch.sigmoid(score.abs().clamp_min(1e-6).sqrt() * score.sign())
        gated = gate * self.ple_value(embedding).float()[..., None, :]
        normed = rms_norm(gated, self.ple_norm_conv.view(streams), c.eps).flatten(-2)
        history = (c.ple_conv - 1) * c.ple_ngram
        padded = F.pad(normed, (0, 0, history, 0))
        conv = sum(
            padded[:, k * c.ple_ngram : k * c.ple_ngram + tokens.shape[1]] * self.ple_conv1d[:, k]
            for k in range(c.ple_conv)
        )
        return res + gated + F.silu(conv).unflatten(-1, streams)  # type: ignore[arg-type]


class Block(nn.Module):
    """Hyper-connected token mixer, then hyper-connected experts."""

    def __init__(self, config: Config, full: bool):
        super().__init__()
        self.full = full
        self.hc_attn = HyperConnection(config)
        self.mixer: Attention | GatedDeltaNet = Attention(config) if full else GatedDeltaNet(config)
        self.hc_ffn = HyperConnection(config)
        self.ffn = Experts(config)


def combine(res: Tensor, out: Tensor, weights: Tensor) -> Tensor:
    return res + out.float()[..., None, :] * weights[..., None]


def linear_in(block: Block, res: Tensor) -> tuple[ScanInputs, Tensor]:
    x, weights = block.hc_attn.mix(res)
    return block.mixer.prepare(x), weights  # type: ignore[operator,return-value]


def linear_out(block: Block, res: Tensor, s: ScanInputs, values: Tensor, states: Tensor, weights: Tensor) -> Tensor:
    return combine(res, block.mixer.finish(s, values, states), weights)  # type: ignore[operator]


def full_step(block: Block, res: Tensor, cos: Tensor, sin: Tensor, sparse: bool, distil: bool) -> tuple[Tensor, Tensor]:
    x, weights = block.hc_attn.mix(res)
    out, loss = block.mixer(x, cos, sin, sparse, distil)
    return combine(res, out, weights), loss  # type: ignore[arg-type]


def ffn_step(block: Block, res: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    x, weights = block.hc_ffn.mix(res)
    out, balance, load = block.ffn(x)
    return combine(res, out, weights), balance, load  # type: ignore[arg-type]


def ngram_step(ngram: Ngram, res: Tensor, tokens: Tensor) -> Tensor:
    return ngram(res, tokens)  # type: ignore[no-any-return]


def mtp_in(mtp: Mtp, embedding: Tensor, hidden: Tensor) -> Tensor:
    """embedding [B, T, D] of the next tokens, hidden [B, T, hc, D] to the block's residual [B, T, hc, D]."""
    c = mtp.config
    e = rms_norm(embedding, mtp.enorm, c.eps)[..., None, :].expand_as(hidden)
    h = rms_norm(hidden.flatten(-2), mtp.hnorm, c.eps).view_as(hidden)
    return mtp.eh_proj(torch.cat([e, h], -1)).float()  # type: ignore[no-any-return]


def head_logits(head: HyperConnection, output: Tensor, res: Tensor) -> Tensor:
    return F.linear(head.mix(res)[0], output)


def head_loss(head: HyperConnection, output: Tensor, res: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """(mean cross-entropy, mean squared log-normaliser); targets [B, T], -100 where there is none."""
    logits = head_logits(head, output, res).float()
    norm = logits.logsumexp(-1)
    picked = logits.gather(-1, targets.clamp_min(0)[..., None]).squeeze(-1)
    keep = (targets >= 0).float()
    count = keep.sum().clamp_min(1)
    return ((norm - picked) * keep).sum() / count, (norm.square() * keep).sum() / count


class Mtp(nn.Module):
    """The draft head: predicts token t+2 from the trunk residual at t and the embedding of token t+1."""

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.enorm = nn.Parameter(torch.ones(config.n_embd))
        self.hnorm = nn.Parameter(torch.ones(config.hc_dim))
        self.eh_proj = nn.Linear(2 * config.n_embd, config.n_embd, bias=False)
        self.block = Block(config, full=True)
        self.head = HyperConnection(config, inject=False)


class Trace(NamedTuple):
    """What one pass over the trunk leaves behind."""

    res: Tensor
    indexer_loss: Tensor
    balance_loss: Tensor
    loads: list[Tensor]


class LuceTiny(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        c = self.config = config
        self.token_embd = nn.Parameter(torch.empty(c.n_vocab, c.n_embd))
        self.ngram = Ngram(c)
        self.blocks = nn.ModuleList(Block(c, c.is_full(i)) for i in range(c.n_layer))
        self.output_hc = HyperConnection(c, inject=False)
        self.output = nn.Parameter(torch.empty(c.n_vocab, c.n_embd))
        self.mtp = Mtp(c)
        plain: list[Callable[..., Any]] = [
            linear_in, linear_out, full_step, ffn_step, ngram_step, mtp_in, head_logits, head_loss,
        ]
        self.plain_steps: dict[str, Callable[..., Any]] = {f.__name__: f for f in plain}
        self.steps = self.plain_steps

    def compile_steps(self) -> None:
        """Compile each step once; blocks of one kind share the code."""
        torch._dynamo.config.cache_size_limit = 64
        self.steps = {name: torch.compile(f, dynamic=False) for name, f in self.plain_steps.items()}

    def run_block(
        self, block: Block, res: Tensor, cos: Tensor, sin: Tensor, sparse: bool, distil: bool
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        loss = None
        if block.full:
            res, loss = self.steps["full_step"](block, res, cos, sin, sparse, distil)
        else:
            s, weights = self.steps["linear_in"](block, res)
            values, states = scan_chunks(s.a, s.kb, s.vb, s.k_out, s.decay)
            res = self.steps["linear_out"](block, res, s, values, states, weights)
        res, balance, load = self.steps["ffn_step"](block, res)
        return res, loss, balance, load

    def trunk(self, tokens: Tensor, sparse: bool = True, distil: bool = False) -> Trace:
        """tokens [B, T] to the residual before the final mixer, [B, T, hc, D].

        T must be a multiple of the delta net's chunk; padding on the right changes nothing to its left.
        """
        c = self.config
        cos, sin = rope_table(c, tokens.shape[1], tokens.device)
        res = F.embedding(tokens, self.token_embd)[..., None, :].expand(-1, -1, c.hc, -1).contiguous()
        losses, balances, loads = [], [], []
        for i, block in enumerate(self.blocks):
            if i == c.ple_layer:
                res = self.steps["ngram_step"](self.ngram, res, tokens)
            res, loss, balance, load = self.run_block(block, res, cos, sin, sparse, distil)  # type: ignore[arg-type]
            losses += [] if loss is None else [loss]
            balances.append(balance)
            loads.append(load)
        return Trace(res, torch.stack(losses).mean(), torch.stack(balances).mean(), loads)

    def draft(self, next_tokens: Tensor, hidden: Tensor, distil: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """The MTP block over a whole sequence: (its residual [B, T, hc, D], indexer loss, balance loss)."""
        cos, sin = rope_table(self.config, next_tokens.shape[1], next_tokens.device)
        res = self.steps["mtp_in"](self.mtp, F.embedding(next_tokens, self.token_embd.detach()), hidden)
        res, loss, balance, _ = self.run_block(self.mtp.block, res, cos, sin, False, distil)
        return res, loss, balance  # type: ignore[return-value]

    def logits(self, tokens: Tensor, sparse: bool = True) -> Tensor:
        """tokens [B, T] of any length to logits [B, T, n_vocab]."""
        t = tokens.shape[1]
        padded = F.pad(tokens, (0, -t % GatedDeltaNet.chunk), value=self.config.ple_eos)
        res = self.trunk(padded, sparse).res[:, :t]
        return self.steps["head_logits"](self.output_hc, self.output, res)  # type: ignore[no-any-return]


def initialise(model: LuceTiny) -> None:
    """Start values: matrices by fan-in, block outputs small, gates open half way."""
    c = model.config
    for name, p in model.named_parameters():
        leaf = name.split(".")[-1] if not name.endswith(".weight") else name.split(".")[-2]
        if leaf in {"token_embd"}:
            nn.init.normal_(p, std=0.3)
        elif leaf == "table":
            nn.init.normal_(p, std=0.1)
        elif leaf in {"output", "ffn_gate_inp", "inject", "up", "ffn_gate_inp_shexp"}:
            nn.init.normal_(p, std=0.02)
        elif leaf == "ssm_a_log":
            with torch.no_grad():
                p.copy_(torch.linspace(0.02, 4.0, c.ssm_v_heads).log())
        elif leaf == "ssm_dt":
            nn.init.constant_(p, -1.0)
        elif leaf == "ssm_conv1d":
            nn.init.uniform_(p, -0.5, 0.5)
        elif p.dim() >= 2 and leaf != "ple_conv1d":
            nn.init.normal_(p, std=p.shape[-1] ** -0.5)
            if leaf in {"ssm_out", "attn_output", "ffn_down_exps", "ffn_down_shexp"}:
                with torch.no_grad():
                    p.mul_(0.3)
