"""The weights of the trunk, gathered layer by layer, with the few tensors that are derived at load time.

Derived: convolution kernels with the channel as the fast axis ([channels, taps], so that a tap is one vector) and
`misc` of a GDN layer ([2*n_v_heads + d] = dt bias | a | gain of the output norm).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pyluce.native.backend import Backend, BackendBuffer
from pyluce.native.ggml import GGMLType
from pyluce.native.luce import ggml_luce_dequantize_rows
from pyluce.native.tensors import TensorArena, tensor_set
from pyluce.weights.experts import EXPERT_PARTS, slots_name
from pyluce.weights.tensors import DRAFT_EMBEDDING, DRAFT_OUTPUT, OUTPUT, TOKEN_EMBEDDING, TensorInfo

if TYPE_CHECKING:
    from pyluce.weights import HParams, ModelFile, Weights


@dataclass(frozen=True, slots=True)
class MixWeights:
    """One hyper-connection: norm [hc*H], down [hc*H, rank], up [rank, hc*H], inject [hc*H, hc] (None at the output)."""

    norm: int
    down: int
    up: int
    inject: int | None


@dataclass(frozen=True, slots=True)
class GdnWeights:
    """A linear layer: qkv, z, beta, alpha, out projections; conv and misc derived."""

    qkv: int
    z: int
    beta: int
    alpha: int
    out: int
    conv: int
    misc: int


@dataclass(frozen=True, slots=True)
class IndexerWeights:
    """What chooses the blocks that a full-attention layer reads."""

    q: int
    k: int
    q_norm: int
    k_norm: int


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """A full-attention layer; without an indexer it reads everything."""

    q: int
    k: int
    v: int
    out: int
    q_norm: int
    k_norm: int
    indexer: IndexerWeights | None


@dataclass(frozen=True, slots=True)
class PleWeights:
    """The n-gram layer; conv derived."""

    key: int
    value: int
    norm_key: int
    norm_query: int
    norm_conv: int
    conv: int


@dataclass(frozen=True, slots=True)
class RoutedWeights:
    """Experts [n_in, n_out, n] each: gate and up apart, or fused in gate_up."""

    gate: int | None
    up: int | None
    gate_up: int | None
    down: int

    @classmethod
    def of(cls, get: Callable[[str], int | None], layer: int) -> RoutedWeights | None:
        """Those of a layer, by the names of the file; None when they are not there."""
        gate, up, gate_up, down = (get(f"blk.{layer}.{part}.weight") for part in EXPERT_PARTS)
        return None if down is None else cls(gate, up, gate_up, down)


@dataclass(frozen=True, slots=True)
class MoeWeights:
    """Router, routed experts, shared expert with its gate.

    With an expert device: `routed` are the hot experts, None if there are none, and `slots` I32 [n_expert] is where an expert is among them.
    """

    router: int
    routed: RoutedWeights | None
    slots: int | None
    shared_gate_in: int
    shared_gate: int
    shared_up: int
    shared_down: int


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One trunk layer."""

    attn_mix: MixWeights
    ffn_mix: MixWeights
    gdn: GdnWeights | None
    attention: AttentionWeights | None
    ple: PleWeights | None
    moe: MoeWeights


@dataclass(frozen=True, slots=True)
class MtpWeights:
    """The draft head: gains enorm [H] and hnorm [hc*H], eh_proj [2*H, H], its block, and the way to logits.

    draft_ids: the tokens that the rows of output and embedding are, None: every token.
    """

    enorm: int
    hnorm: int
    eh_proj: int
    block: LayerWeights
    head_mix: MixWeights
    output: int
    embedding: int
    draft_ids: npt.NDArray[np.int64] | None = None
    norm_groups: int = 1  # tests normalise each stream by itself, as libllama does


class TrunkWeights:
    """All layers and the output, as tensors of the placed weights. Owns the derived tensors.

    `mtp`: the draft head, where the model file has it attached.
    """

    def __init__(self, model: ModelFile, weights: Weights, backend: Backend) -> None:
        self._model = model
        self._weights = weights
        self._pending: list[tuple[int, npt.NDArray[Any]]] = []
        h = model.hparams
        self.arena = TensorArena.for_counts(16 * h.n_layer + 32)
        self.layers = [self._layer(h, i) for i in range(h.n_layer)]
        self.output_mix = MixWeights(
            self._vector("output_hc_norm.weight"),
            weights.tensor("output_hc_down.weight"),
            weights.tensor("output_hc_up.weight"),
            None,
        )
        self.output = weights.get("output.weight") or weights.tensor("token_embd.weight")
        self.mtp = self._mtp(h) if f"blk.{h.n_layer}.nextn.eh_proj.weight" in model.tensors else None
        self.buffer = self._fill(backend)

    def _fill(self, backend: Backend) -> BackendBuffer | None:
        """Give the derived tensors memory and their values."""
        buffer = BackendBuffer.for_arena(self.arena, backend.buffer_type) if self._pending else None
        for tensor, values in self._pending:
            tensor_set(tensor, values)
        self._pending.clear()
        return buffer

    @property
    def derived_bytes(self) -> int:
        """Bytes of the derived tensors' buffer."""
        return self.buffer.n_bytes if self.buffer is not None else 0

    def _layer(self, h: HParams, i: int) -> LayerWeights:
        b = f"blk.{i}."
        t = self._weights.tensor
        recurrent = i < h.n_layer and h.recurrent_layers[i]
        return LayerWeights(
            attn_mix=self._mix(b + "hc_attn_"),
            ffn_mix=self._mix(b + "hc_ffn_"),
            gdn=self._gdn(b) if recurrent else None,
            attention=None if recurrent else self._attention(b),
            ple=self._ple(b) if h.ple is not None and h.ple.layer == i else None,
            moe=MoeWeights(
                router=t(b + "ffn_gate_inp.weight"),
                routed=RoutedWeights.of(self._weights.get, i),
                slots=self._weights.get(slots_name(i)),
                shared_gate_in=t(b + "ffn_gate_inp_shexp.weight"),
                shared_gate=t(b + "ffn_gate_shexp.weight"),
                shared_up=t(b + "ffn_up_shexp.weight"),
                shared_down=t(b + "ffn_down_shexp.weight"),
            ),
        )

    def _mtp(self, h: HParams) -> MtpWeights:
        b = f"blk.{h.n_layer}.nextn."
        t, get = self._weights.tensor, self._weights.get
        return MtpWeights(
            enorm=self._vector(b + "enorm.weight"),
            hnorm=self._vector(b + "hnorm.weight"),
            eh_proj=t(b + "eh_proj.weight"),
            block=self._layer(h, h.n_layer),
            head_mix=MixWeights(
                self._vector(b + "hc_head_norm.weight"),
                t(b + "hc_head_down.weight"),
                t(b + "hc_head_up.weight"),
                None,
            ),
            output=self._compact(DRAFT_OUTPUT, OUTPUT) or get(DRAFT_OUTPUT) or self.output,
            embedding=self._compact(DRAFT_EMBEDDING) or get(DRAFT_EMBEDDING) or t(TOKEN_EMBEDDING),
            draft_ids=self._model.draft_ids,
        )

    def _compact(self, *names: str) -> int | None:
        """The rows of the draft vocabulary, of the first of these matrices or else of the trunk's embedding; None without such a vocabulary."""
        ids, tensors = self._model.draft_ids, self._model.tensors
        if ids is None:
            return None
        info = next((tensors[name] for name in names if name in tensors), None) or tensors[TOKEN_EMBEDDING]
        tensor = self.arena.new_tensor(info.type_id, (info.ne[0], len(ids)), f"draft_{info.name}"[:63])
        self._pending.append((tensor, self._gathered(info, ids)))
        return tensor

    def _gathered(self, info: TensorInfo, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
        return self._model.gather(info, ids)

    def _mix(self, prefix: str) -> MixWeights:
        t = self._weights.tensor
        return MixWeights(
            self._vector(prefix + "norm.weight"),
            t(prefix + "down.weight"),
            t(prefix + "up.weight"),
            t(prefix + "inject.weight"),
        )

    def _gdn(self, b: str) -> GdnWeights:
        t = self._weights.tensor
        misc = [self._values(b + name).ravel() for name in ("ssm_dt.bias", "ssm_a", "ssm_norm.weight")]
        return GdnWeights(
            qkv=t(b + "attn_qkv.weight"),
            z=t(b + "attn_gate.weight"),
            beta=t(b + "ssm_beta.weight"),
            alpha=t(b + "ssm_alpha.weight"),
            out=t(b + "ssm_out.weight"),
            conv=self._taps(b + "ssm_conv1d.weight"),
            misc=self._derived(np.concatenate(misc), b + "misc"),
        )

    def _attention(self, b: str) -> AttentionWeights:
        t = self._weights.tensor
        return AttentionWeights(
            q=t(b + "attn_q.weight"),
            k=t(b + "attn_k.weight"),
            v=t(b + "attn_v.weight"),
            out=t(b + "attn_output.weight"),
            q_norm=self._vector(b + "attn_q_norm.weight"),
            k_norm=self._vector(b + "attn_k_norm.weight"),
            indexer=self._indexer(b + "indexer.") if b + "indexer.q_proj.weight" in self._model.tensors else None,
        )

    def _indexer(self, b: str) -> IndexerWeights:
        return IndexerWeights(
            q=self._weights.tensor(b + "q_proj.weight"),
            k=self._weights.tensor(b + "k_proj.weight"),
            q_norm=self._vector(b + "q_norm.weight"),
            k_norm=self._vector(b + "k_norm.weight"),
        )

    def _ple(self, b: str) -> PleWeights:
        t = self._weights.tensor
        return PleWeights(
            key=t(b + "ple_key.weight"),
            value=t(b + "ple_value.weight"),
            norm_key=self._vector(b + "ple_norm_key.weight"),
            norm_query=self._vector(b + "ple_norm_query.weight"),
            norm_conv=self._vector(b + "ple_norm_conv.weight"),
            conv=self._taps(b + "ple_conv1d.weight"),
        )

    def _vector(self, name: str) -> int:
        """A gain: as it lies in the file, or widened when the file stores it in another type than F32."""
        if self._model.tensors[name].type_id == GGMLType.F32:
            return self._weights.tensor(name)
        return self._derived(self._values(name).ravel(), name)

    def _taps(self, name: str) -> int:
        """A depthwise kernel [taps, channels] of the file, as [channels, taps]."""
        return self._derived(np.ascontiguousarray(self._values(name).T), name)

    def _values(self, name: str) -> npt.NDArray[np.float32]:
        """The tensor's values, numpy order (slowest axis first)."""
        info = self._model.tensors[name]
        ne0, n_rows = info.ne[0], int(np.prod(info.ne[1:], dtype=np.int64))
        out = np.empty((n_rows, ne0), np.float32)
        row_bytes = info.nbytes // n_rows
        if not ggml_luce_dequantize_rows(
            info.type_id, self._model.address(info), row_bytes, None, n_rows, ne0, out.ctypes.data
        ):
            raise ValueError(f"{name}: type {info.type_id} cannot be widened to F32")
        return out

    def _derived(self, values: npt.NDArray[np.float32], name: str) -> int:
        tensor = self.arena.new_tensor(GGMLType.F32, tuple(reversed(values.shape)), name[:63])
        self._pending.append((tensor, values))
        return tensor

    def close(self) -> None:
        """Free the derived tensors. Idempotent."""
        if self.buffer is not None:
            self.buffer.close()
        self.arena.close()
