"""The draft head in numpy, float64, one sequence, from a GGUF whose tensors are F32: written from the model's description alone.

Shapes are numpy's, slowest axis first. S streams, H hidden size, d head size.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader


def rms(x: np.ndarray, gain: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * gain


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1.0 / (1.0 + np.exp(-x))


def silu(x: np.ndarray) -> np.ndarray:
    return x * sigmoid(x)


@dataclass
class MtpReference:
    """Feed it (hidden row, token) pairs in order; a copy's pairs do not come back."""

    weights: dict[str, np.ndarray]
    block: str
    n_head: int
    n_kv: int
    streams: int
    rope_dim: int
    rope_base: float
    eps: float
    n_used: int
    norm_by_stream: bool = False
    keys: list[np.ndarray] = field(default_factory=list)
    values: list[np.ndarray] = field(default_factory=list)

    @classmethod
    def load(cls, path: Path, *, norm_by_stream: bool = False) -> MtpReference:
        reader = GGUFReader(str(path))
        weights = {}
        for tensor in reader.tensors:
            if ".nextn." in tensor.name or tensor.name in ("token_embd.weight", "output.weight"):
                weights[tensor.name] = np.asarray(tensor.data, np.float64)
        at = next(name for name in weights if name.endswith("nextn.eh_proj.weight")).split("nextn")[0]
        for tensor in reader.tensors:
            if tensor.name.startswith(at):
                weights[tensor.name] = np.asarray(tensor.data, np.float64)

        def key(name: str) -> Any:
            value = reader.fields["qwen4exp." + name].contents()
            return max(value) if isinstance(value, list) else value

        return cls(
            weights, at, int(key("attention.head_count")), int(key("attention.head_count_kv")),
            int(key("hyper_connection.count")), int(key("rope.dimension_count")), float(key("rope.freq_base")),
            float(key("attention.layer_norm_rms_epsilon")), int(key("expert_used_count")), norm_by_stream,
        )  # fmt: skip

    def copy(self) -> MtpReference:
        return MtpReference(**{**self.__dict__, "keys": list(self.keys), "values": list(self.values)})

    def feed(self, hidden: np.ndarray, token: int) -> tuple[np.ndarray, np.ndarray]:
        """hidden [S*H] of position p and the token at p + 1: (the head's residual [S*H], logits [n_vocab])."""
        w = self.weights
        e = rms(w["token_embd.weight"][token], w[self.block + "nextn.enorm.weight"].ravel(), self.eps)
        gain = w[self.block + "nextn.hnorm.weight"].ravel()
        by_stream = hidden.reshape(self.streams, -1)
        if self.norm_by_stream:
            h = rms(by_stream, gain.reshape(self.streams, -1), self.eps)
        else:
            h = rms(hidden, gain, self.eps).reshape(self.streams, -1)
        res = np.stack([w[self.block + "nextn.eh_proj.weight"] @ np.concatenate([e, row]) for row in h])
        x, inject = self._mix(res, self.block + "hc_attn_")
        res = self._combine(res, self._attention(x), inject)
        x, inject = self._mix(res, self.block + "hc_ffn_")
        res = self._combine(res, self._experts(x), inject)
        x, _ = self._mix(res, self.block + "nextn.hc_head_")
        return res.ravel(), w["output.weight"] @ x

    def _mix(self, res: np.ndarray, prefix: str) -> tuple[np.ndarray, np.ndarray | None]:
        w = self.weights
        flat = rms(res, w[prefix + "norm.weight"].reshape(self.streams, -1), self.eps).ravel()
        low = silu(w[prefix + "down.weight"] @ flat / self.streams)
        gate = sigmoid(w[prefix + "up.weight"] @ low)
        mixed = (gate * flat).reshape(self.streams, -1).mean(0)
        inject = w.get(prefix + "inject.weight")
        return mixed, None if inject is None else 2.0 * sigmoid(inject @ flat / self.streams)

    @staticmethod
    def _combine(res: np.ndarray, out: np.ndarray, inject: np.ndarray | None) -> np.ndarray:
        assert inject is not None
        return res + inject[:, None] * out

    def _rope(self, x: np.ndarray, position: int) -> np.ndarray:
        half = self.rope_dim // 2
        angle = position * self.rope_base ** (-2.0 * np.arange(half) / self.rope_dim)
        a, b = x[..., :half], x[..., half : self.rope_dim]
        turned = np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], -1)
        return np.concatenate([turned, x[..., self.rope_dim :]], -1)

    def _attention(self, x: np.ndarray) -> np.ndarray:
        w, p = self.weights, len(self.keys)
        q_gate = (w[self.block + "attn_q.weight"] @ x).reshape(self.n_head, 2, -1)
        q = self._rope(rms(q_gate[:, 0], w[self.block + "attn_q_norm.weight"], self.eps), p)
        k = (w[self.block + "attn_k.weight"] @ x).reshape(self.n_kv, -1)
        self.keys.append(self._rope(rms(k, w[self.block + "attn_k_norm.weight"], self.eps), p))
        self.values.append((w[self.block + "attn_v.weight"] @ x).reshape(self.n_kv, -1))
        group = self.n_head // self.n_kv
        keys, values = (np.repeat(np.stack(part), group, axis=1) for part in (self.keys, self.values))
        scores = np.einsum("hd,thd->ht", q, keys) / np.sqrt(q.shape[-1])
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        out = np.einsum("ht,thd->hd", scores / scores.sum(-1, keepdims=True), values)
        return w[self.block + "attn_output.weight"] @ (out * sigmoid(q_gate[:, 1])).ravel()

    def _experts(self, x: np.ndarray) -> np.ndarray:
        w, b = self.weights, self.block
        logits = w[b + "ffn_gate_inp.weight"] @ x
        probs = np.exp(logits - logits.max())
        probs /= probs.sum()
        best = np.argsort(-logits, kind="stable")[: self.n_used]
        share = probs[best] / max(probs[best].sum(), 2.0**-14)
        out = np.zeros_like(x)
        for weight, e in zip(share, best, strict=True):
            hidden = silu(w[b + "ffn_gate_exps.weight"][e] @ x) * (w[b + "ffn_up_exps.weight"][e] @ x)
            out += weight * (w[b + "ffn_down_exps.weight"][e] @ hidden)
        shared = silu(w[b + "ffn_gate_shexp.weight"] @ x) * (w[b + "ffn_up_shexp.weight"] @ x)
        gate = sigmoid((w[b + "ffn_gate_inp_shexp.weight"].ravel() * x).sum())
        return out + gate * (w[b + "ffn_down_shexp.weight"] @ shared)
