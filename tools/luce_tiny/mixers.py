"""The two token mixers of qwen4exp: gated delta net and indexed full attention.

Shapes are written slowest axis first (PyTorch order). B sequences of T tokens; heads as in `Config`.
Value heads of the delta net are stored tiled (value head j reads key head j mod K), as in the GGUF.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .config import Config


def rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """RMS norm over the last axis in float32, times `gain`."""
    x = x.float()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * gain


def l2_norm(x: Tensor) -> Tensor:
    x = x.float()
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6)


def rope_table(config: Config, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin [length, rope_dim] of text positions (all M-RoPE sections carry the same position)."""
    half = torch.arange(0, config.rope_dim, 2, dtype=torch.float32, device=device) / config.rope_dim
    angle = torch.arange(length, dtype=torch.float32, device=device)[:, None] * config.rope_base**-half
    angle = torch.cat([angle, angle], -1)
    return angle.cos(), angle.sin()


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first rope_dim values of x [..., T, D] (halves paired, NeoX order)."""
    n = cos.shape[-1]
    head, rest = x[..., :n], x[..., n:]
    turned = torch.cat([-head[..., n // 2 :], head[..., : n // 2]], -1)
    return torch.cat([head * cos + turned * sin, rest], -1)


class UnitLowerInverse(torch.autograd.Function):
    """(I + A)^-1 for strictly lower triangular A [..., C, C], with the closed-form gradient."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, a: Tensor) -> Tensor:
        eye = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
        inverse = torch.linalg.solve_triangular(a + eye, eye.expand_as(a), upper=False, unitriangular=True)
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> Tensor:  # type: ignore[override]
        (inverse,) = ctx.saved_tensors  # type: ignore[attr-defined]
        turned = inverse.transpose(-1, -2)
        return -(turned @ grad @ turned).tril(-1)


@torch.compiler.disable
def scan_chunks(a: Tensor, kb: Tensor, vb: Tensor, k_out: Tensor, decay: Tensor) -> tuple[Tensor, Tensor]:
    """The sequential part of the chunked delta rule.

    a [N, M, C, C] strictly lower; kb, vb, k_out [N, M, C, D]; decay [N, M, 1, 1], with N chunks in order and
    M = batch times heads. Returns the new values [N, M, C, D] and the state before each chunk [N, M, D, D].
    """
    with torch.autocast(a.device.type, enabled=False):
        inverse = UnitLowerInverse.apply(a)
        u, w = (inverse @ vb).unbind(0), (inverse @ kb).unbind(0)
        k_turned, decays = k_out.transpose(-1, -2).unbind(0), decay.unbind(0)
        state = torch.zeros(vb.shape[1], vb.shape[3], vb.shape[3], dtype=vb.dtype, device=vb.device)
        states, values = [], []
        for n in range(len(u)):
            states.append(state)
            value = torch.baddbmm(u[n], w[n], state, alpha=-1)
            values.append(value)
            state = torch.baddbmm(state * decays[n], k_turned[n], value)
        return torch.stack(values), torch.stack(states)


class ScanInputs(NamedTuple):
    """What `GatedDeltaNet.prepare` hands to the scan and to `finish` (all float32, chunked)."""

    a: Tensor
    kb: Tensor
    vb: Tensor
    k_out: Tensor
    decay: Tensor
    q_in: Tensor
    intra: Tensor
    z: Tensor


class GatedDeltaNet(nn.Module):
    """Linear attention with a decaying delta-rule state of [ssm_state, ssm_state] a value head."""

    chunk = 64

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.attn_qkv = nn.Linear(config.n_embd, config.conv_dim, bias=False)
        self.attn_gate = nn.Linear(config.n_embd, config.value_dim, bias=False)
        self.ssm_conv1d = nn.Parameter(torch.empty(config.conv_dim, config.ssm_conv))
        self.ssm_alpha = nn.Linear(config.n_embd, config.ssm_v_heads, bias=False)
        self.ssm_beta = nn.Linear(config.n_embd, config.ssm_v_heads, bias=False)
        self.ssm_a_log = nn.Parameter(torch.empty(config.ssm_v_heads))
        self.ssm_dt = nn.Parameter(torch.empty(config.ssm_v_heads))
        self.ssm_norm = nn.Parameter(torch.ones(config.ssm_state))
        self.ssm_out = nn.Linear(config.value_dim, config.n_embd, bias=False)

    def _chunked(self, x: Tensor, heads: int) -> Tensor:
        """[B, T, heads, D] to [N, B * heads, C, D]; T is a multiple of the chunk."""
        b, t, _, d = x.shape
        x = x.reshape(b, t // self.chunk, self.chunk, heads, d)
        return x.permute(1, 0, 3, 2, 4).reshape(t // self.chunk, b * heads, self.chunk, d)

    def prepare(self, x: Tensor) -> ScanInputs:
        """x [B, T, n_embd], T a multiple of the chunk (pad with zeros on the right)."""
        c = self.config
        b, t, _ = x.shape
        qkv = F.pad(self.attn_qkv(x).float(), (0, 0, c.ssm_conv - 1, 0))
        qkv = F.silu(sum(qkv[:, i : i + t] * self.ssm_conv1d[:, i] for i in range(c.ssm_conv)))  # type: ignore[arg-type]
        q, k, v = qkv.split([c.key_dim, c.key_dim, c.value_dim], -1)
        tile = c.ssm_v_heads // c.ssm_k_heads
        q = l2_norm(q.reshape(b, t, c.ssm_k_heads, -1)).repeat(1, 1, tile, 1) * c.ssm_state**-0.5
        k = l2_norm(k.reshape(b, t, c.ssm_k_heads, -1)).repeat(1, 1, tile, 1)
        v = v.reshape(b, t, c.ssm_v_heads, -1).float()
        beta = torch.sigmoid(self.ssm_beta(x).float())[..., None]
        g = -self.ssm_a_log.float().exp() * F.softplus(self.ssm_alpha(x).float() + self.ssm_dt)
        q, k, v, beta, g = (self._chunked(i, c.ssm_v_heads) for i in (q, k, v, beta, g[..., None]))
        total = g.squeeze(-1).cumsum(-1)
        lower = torch.ones(self.chunk, self.chunk, dtype=torch.bool, device=x.device).tril()
        ratio = (total[..., :, None] - total[..., None, :]).masked_fill(~lower, -math.inf).exp()
        with torch.autocast(x.device.type, enabled=False):
            a = ((k * beta) @ k.transpose(-1, -2) * ratio).tril(-1)
            intra = (q @ k.transpose(-1, -2)) * ratio
        grow = total.exp()[..., None]
        last = total[..., -1:]
        return ScanInputs(
            a=a, kb=k * beta * grow, vb=v * beta, k_out=k * (last - total).exp()[..., None],
            decay=last.exp()[..., None], q_in=q * grow, intra=intra, z=self.attn_gate(x),
        )

    def finish(self, s: ScanInputs, values: Tensor, states: Tensor) -> Tensor:
        """Read the states, norm, gate and project: [B, T, n_embd]."""
        c = self.config
        b, t, _ = s.z.shape
        with torch.autocast(s.z.device.type, enabled=False):
            out = s.q_in @ states + s.intra @ values
        out = out.reshape(t // self.chunk, b, c.ssm_v_heads, self.chunk, c.ssm_state)
        out = out.permute(1, 0, 3, 2, 4).reshape(b, t, c.ssm_v_heads, c.ssm_state)
        out = rms_norm(out, self.ssm_norm, c.eps)
        return self.ssm_out((out * torch.sigmoid(s.z.float()).view_as(out)).reshape(b, t, -1))


class Attention(nn.Module):
    """Gated full attention whose indexer picks blocks of `compress_ratio` tokens (QSA)."""

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        c = config
        self.attn_q = nn.Linear(c.n_embd, 2 * c.n_head * c.head_dim, bias=False)
        self.attn_k = nn.Linear(c.n_embd, c.n_head_kv * c.head_dim, bias=False)
        self.attn_v = nn.Linear(c.n_embd, c.n_head_kv * c.head_dim, bias=False)
        self.attn_output = nn.Linear(c.n_head * c.head_dim, c.n_embd, bias=False)
        self.attn_q_norm = nn.Parameter(torch.ones(c.head_dim))
        self.attn_k_norm = nn.Parameter(torch.ones(c.head_dim))
        self.indexer_q_proj = nn.Linear(c.n_embd, c.indexer_heads * c.indexer_dim, bias=False)
        self.indexer_k_proj = nn.Linear(c.n_embd, c.indexer_dim, bias=False)
        self.indexer_q_norm = nn.Parameter(torch.ones(c.indexer_dim))
        self.indexer_k_norm = nn.Parameter(torch.ones(c.indexer_dim))

    def block_scores(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Scores of all complete blocks, [B, T, NB]; -1 where a block is not complete at that query."""
        c = self.config
        b, t, _ = x.shape
        blocks = t // c.compress_ratio
        q = self.indexer_q_proj(x).reshape(b, t, c.indexer_heads, c.indexer_dim).transpose(1, 2)
        q = rope(rms_norm(q, self.indexer_q_norm, c.eps), cos, sin)
        raw = self.indexer_k_proj(x).float()[:, : blocks * c.compress_ratio]
        pooled = raw.reshape(b, blocks, c.compress_ratio, c.indexer_dim).mean(2)
        starts = slice(0, blocks * c.compress_ratio, c.compress_ratio)
        k = rope(rms_norm(pooled, self.indexer_k_norm, c.eps), cos[starts], sin[starts])
        with torch.autocast(x.device.type, enabled=False):
            score = torch.relu(q @ k[:, None].transpose(-1, -2)).sum(1) / math.sqrt(c.indexer_dim)
        return score.masked_fill(~self.visible_blocks(t, x.device), -1.0)

    def visible_blocks(self, t: int, device: torch.device) -> Tensor:
        """[T, NB]: block b is complete at query t when its last token is at or before t."""
        ratio = self.config.compress_ratio
        ends = torch.arange(t // ratio, device=device) * ratio + ratio - 1
        return ends[None, :] <= torch.arange(t, device=device)[:, None]

    def select(self, scores: Tensor) -> Tensor:
        """The tokens each query may see [B, T, T]: its best blocks (ties to the lower index) and the tail."""
        c = self.config
        b, t, blocks = scores.shape
        budget = min(c.indexer_top_k // c.compress_ratio, blocks)
        if self.training:  # a bias below the scores' own noise orders ties; faster than a stable sort
            order = (scores - torch.arange(blocks, device=scores.device) * 1e-7).topk(budget, -1).indices
        else:
            order = torch.sort(scores, dim=-1, descending=True, stable=True).indices[..., :budget]
        chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, order, True)
        chosen = chosen & self.visible_blocks(t, scores.device)
        tokens = chosen.repeat_interleave(c.compress_ratio, -1)
        tokens = F.pad(tokens, (0, t - tokens.shape[-1]))
        position = torch.arange(t, device=scores.device)
        tail_start = (position + 1) // c.compress_ratio * c.compress_ratio
        tail = (position[None] >= tail_start[:, None]) & (position[None] <= position[:, None])
        return tokens | tail

    def attend(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, T, n_embd] to causal logits [B, H, T, T] (float32), values [B, KV, T, D], gate [B, T, H, D]."""
        c = self.config
        b, t, _ = x.shape
        q, gate = self.attn_q(x).reshape(b, t, c.n_head, 2 * c.head_dim).chunk(2, -1)
        k = self.attn_k(x).reshape(b, t, c.n_head_kv, c.head_dim)
        v = self.attn_v(x).reshape(b, t, c.n_head_kv, c.head_dim).transpose(1, 2)
        q = rope(rms_norm(q, self.attn_q_norm, c.eps).transpose(1, 2), cos, sin).to(v.dtype)
        k = rope(rms_norm(k, self.attn_k_norm, c.eps).transpose(1, 2), cos, sin).to(v.dtype)
        q = q.reshape(b, c.n_head_kv, c.n_head // c.n_head_kv * t, c.head_dim)
        logits = (q @ k.transpose(-1, -2)).reshape(b, c.n_head, t, t).float() * c.head_dim**-0.5
        causal = torch.ones(t, t, dtype=torch.bool, device=x.device).tril()
        return logits.masked_fill(~causal, -math.inf), v, gate

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, sparse: bool, distil: bool) -> tuple[Tensor, Tensor]:
        """x [B, T, n_embd] to (output [B, T, n_embd], indexer loss)."""
        c = self.config
        b, t, _ = x.shape
        logits, v, gate = self.attend(x, cos, sin)
        loss = logits.new_zeros(())
        mask = None
        if (sparse or distil) and t >= c.compress_ratio:
            scores = self.block_scores(x.detach(), cos, sin)
            if distil:
                loss = self.distil_loss(scores, logits.detach())
            if sparse:
                mask = self.select(scores.detach())[:, None]
        weights = torch.softmax(logits if mask is None else logits.masked_fill(~mask, -math.inf), -1).to(v.dtype)
        out = (weights.reshape(b, c.n_head_kv, -1, t) @ v).reshape(b, c.n_head, t, c.head_dim)
        out = out.transpose(1, 2).float() * torch.sigmoid(gate.float())
        return self.attn_output(out.reshape(b, t, -1)), loss

    def block_mass(self, logits: Tensor) -> Tensor:
        """Attention mass of each complete block, summed over heads and normalised: [B, T, NB]."""
        c = self.config
        b, _, t, _ = logits.shape
        blocks = t // c.compress_ratio
        mass = torch.softmax(logits, -1)[..., : blocks * c.compress_ratio]
        mass = mass.reshape(b, c.n_head, t, blocks, c.compress_ratio).sum((1, 4))
        mass = mass * self.visible_blocks(t, logits.device)
        return mass / mass.sum(-1, keepdim=True).clamp_min(1e-9)

    def distil_loss(self, scores: Tensor, logits: Tensor) -> Tensor:
        """KL from the attention mass of each block (summed over heads) to the softmax of the scores."""
        c = self.config
        target = self.block_mass(logits)
        visible = self.visible_blocks(scores.shape[1], scores.device)
        log_p = torch.log_softmax(scores.masked_fill(~visible, -1e9), -1)
        kl = (torch.xlogy(target, target) - target * log_p).sum(-1)
        return kl[:, c.compress_ratio :].mean()
