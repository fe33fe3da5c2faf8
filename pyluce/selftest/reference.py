"""The luce ops in numpy and float64, written from their formulas, not from the kernels: what tests and self-test compare with.

Arrays in numpy order [T, ...].
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
EPS = 1e-6


def sigmoid(x: Array) -> Array:
    return 1.0 / (1.0 + np.exp(-x))


def silu(x: Array) -> Array:
    return x * sigmoid(x)


def rms(x: Array, gain: Array) -> Array:
    return np.asarray(x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * gain)


def stream_rms(x: Array, gain: Array, n_stream: int) -> Array:
    """x [T, S*H]: each stream has its own norm."""
    t, width = x.shape
    return rms(x.reshape(t, n_stream, -1), gain.reshape(n_stream, -1)).reshape(t, width)


def rotate(x: Array, rope: Array) -> Array:
    """x [..., D], rope [..., n_rot] = cos | sin: pairs (i, i + n_rot/2)."""
    half = rope.shape[-1] // 2
    cos, sin = rope[..., :half], rope[..., half:]
    a, b = x[..., :half], x[..., half : 2 * half]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, x[..., 2 * half :]], -1)


def gdn(qkv: Array, z: Array, beta: Array, alpha: Array, conv: Array, misc: Array, n_k_head: int) -> Array:
    """One sequence from its start: qkv [T, channels], conv [taps, channels] oldest first -> [T, D*nv]."""
    t, nv = beta.shape
    d = z.shape[1] // nv
    taps = conv.shape[0]
    padded = np.concatenate([np.zeros((taps - 1, qkv.shape[1])), qkv])
    mixed = silu(sum(padded[k : k + t] * conv[k] for k in range(taps)))
    q = mixed[:, : n_k_head * d].reshape(t, n_k_head, d)
    k = mixed[:, n_k_head * d : 2 * n_k_head * d].reshape(t, n_k_head, d)
    v = mixed[:, 2 * n_k_head * d :].reshape(t, nv, d)
    q = q / np.sqrt((q * q).sum(-1, keepdims=True) + EPS) / np.sqrt(d)
    k = k / np.sqrt((k * k).sum(-1, keepdims=True) + EPS)
    decay = np.exp(np.logaddexp(0.0, alpha + misc[:nv]) * misc[nv : 2 * nv])
    state = np.zeros((nv, d, d))  # [head, value, key]
    out = np.empty((t, nv, d))
    for i in range(t):
        for head in range(nv):
            key, query = k[i, head % n_k_head], q[i, head % n_k_head]
            state[head] *= decay[i, head]
            delta = (v[i, head] - state[head] @ key) * sigmoid(beta[i, head])
            state[head] += np.outer(delta, key)
            out[i, head] = state[head] @ query
    return rms(out, misc[2 * nv :]).reshape(t, -1) * sigmoid(z)


def pooled_keys(raw: Array, gain: Array, block_rope: Array, ratio: int) -> Array:
    """Raw keys [T, D], rope rows of each block's first position [blocks, n_rot] -> [blocks, D]."""
    n = len(raw) // ratio
    mean = raw[: n * ratio].reshape(n, ratio, -1).mean(1)
    return rotate(rms(mean, gain), block_rope[:n])


def select(q: Array, pooled: Array, position: int, ratio: int, n_top: int) -> list[int]:
    """q [heads, D], pooled [blocks, D]: the blocks that the row at `position` attends to, rising."""
    n = (position + 1) // ratio
    scores = np.maximum(q @ pooled[:n].T, 0.0).sum(0)
    best = sorted(range(n), key=lambda b: (-scores[b], b))[:n_top]
    return sorted(best)


def attend(q: Array, k: Array, v: Array, gate: Array, cells: list[int], scale: float) -> Array:
    """q, gate [heads, D], k and v [tokens, kv_heads, D] -> [heads, D] over the tokens `cells`."""
    n_kv, out = k.shape[1], np.empty_like(q)
    keys, values = k[cells], v[cells]
    for kv, group in enumerate(np.split(np.arange(len(q)), n_kv)):
        scores = q[group] @ keys[:, kv].T * scale
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        out[group] = weights / weights.sum(-1, keepdims=True) @ values[:, kv]
    return out * sigmoid(gate)


def ple(
    key: Array,
    value: Array,
    residual: Array,
    gains: tuple[Array, Array, Array],
    conv: Array,
    dilation: int,
    n_stream: int,
) -> Array:
    """One sequence from its start -> the new residual [T, S*H]."""
    t, width = key.shape
    h = width // n_stream
    dot = (
        (stream_rms(key, gains[0], n_stream) * stream_rms(residual, gains[1], n_stream)).reshape(t, n_stream, h).sum(-1)
    )
    s = dot / np.sqrt(h)
    gate = sigmoid(np.sign(s) * np.sqrt(np.maximum(np.abs(s), 1e-6)))
    gated = (value[:, None, :] * gate[:, :, None]).reshape(t, width)
    normed = stream_rms(gated, gains[2], n_stream)
    taps = conv.shape[0]
    padded = np.concatenate([np.zeros(((taps - 1) * dilation, width)), normed])
    mixed = sum(padded[k * dilation : k * dilation + t] * conv[k] for k in range(taps))
    return np.asarray(residual + gated + silu(mixed))


def moe(picks: Array, logits: Array, ids: Array, shared: Array, gate: Array) -> Array:
    """picks [T, used, H], logits [T, E], ids [T, used], shared [T, H], gate [T, 1] -> [T, H]."""
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    w = np.take_along_axis(p, ids, -1)
    w /= np.maximum(w.sum(-1, keepdims=True), 2.0**-14)
    return np.asarray((picks * w[:, :, None]).sum(1) + shared * sigmoid(gate))
