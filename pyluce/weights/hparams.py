"""The hyper-parameters of a `qwen4exp` model, checked one by one and against each other.

Much of what is refused here loads elsewhere without a word and computes something else, for example full-attention
layers with a compress ratio of 0 (dense attention).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from pyluce.weights.errors import refuse
from pyluce.weights.fields import Fields
from pyluce.weights.gguf_reader import GgufArray, MetaValue

ARCHITECTURE: Final = "qwen4exp"

MAX_LAYERS: Final = 512
MAX_EXPERTS: Final = 1024
MAX_VOCAB: Final = 1 << 22
MAX_CONTEXT: Final = 1 << 26
MAX_WIDTH: Final = 1 << 17
MAX_NGRAM: Final = 8
MAX_PLE_HEADS: Final = 64
MAX_ROW: Final = (1 << 31) - 1

_PLE_KEYS = (
    "ple.ngram_size", "ple.heads_per_ngram", "ple.conv_kernel", "ple.head_offsets", "ple.head_vocab_sizes",
    "ple.layer_multipliers", "ple.eos_token_id", "embedding_length_per_layer_input",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class PleParams:
    """The n-gram table: which rows a token reads, and which layer adds them.

    Heads are ordered by n-gram length: `heads_per_ngram` heads for n = 2, then as many for n = 3, and so on.
    Row of head h: `hash mod head_vocab_sizes[h] + head_offsets[h]`.
    """

    layer: int
    ngram_size: int
    heads_per_ngram: int
    n_heads: int
    head_dim: int
    conv_kernel: int
    eos_token_id: int
    image_token_id: int | None
    multipliers: tuple[int, ...]
    head_offsets: tuple[int, ...]
    head_vocab_sizes: tuple[int, ...]

    @property
    def n_rows(self) -> int:
        """Rows that the heads address; the table in the file may be padded beyond."""
        return max(o + s for o, s in zip(self.head_offsets, self.head_vocab_sizes, strict=True))


@dataclass(frozen=True, slots=True)
class HParams:
    """Sizes of one model. `n_layer` counts the trunk only; the MTP block is layer `n_layer` if `n_layer_nextn` is 1.

    Widths are in values, `ssm_inner` = `ssm_v_heads` * `ssm_state`; `indexer_top_k` is in tokens
    (`indexer_top_k` / `compress_ratio` blocks); `recurrent_layers[i]` is True for a linear (GDN) layer.
    """

    n_layer: int
    n_layer_nextn: int
    n_embd: int
    n_vocab: int
    n_ctx_train: int
    n_head: int
    n_head_kv: int
    head_dim: int
    rope_dim: int
    rope_sections: tuple[int, int, int, int]
    rope_freq_base: float
    rms_eps: float
    n_expert: int
    n_expert_used: int
    n_ff_exp: int
    n_ff_shexp: int
    hc_count: int
    hc_low_rank: int
    ssm_conv_kernel: int
    ssm_state: int
    ssm_k_heads: int
    ssm_v_heads: int
    ssm_inner: int
    indexer_heads: int
    indexer_dim: int
    indexer_top_k: int
    compress_ratio: int
    recurrent_layers: tuple[bool, ...]
    ple: PleParams | None
    name: str
    file_type: int | None

    @property
    def full_layers(self) -> tuple[int, ...]:
        """Indices of the trunk's full-attention layers."""
        return tuple(i for i, recurrent in enumerate(self.recurrent_layers) if not recurrent)

    @property
    def conv_channels(self) -> int:
        """Channels of the GDN convolution: K, K and V widths."""
        return 2 * self.ssm_k_heads * self.ssm_state + self.ssm_inner


def read_hparams(metadata: Mapping[str, MetaValue], path: str, *, mtp_only: bool = False) -> tuple[HParams, list[str]]:
    """(hyper-parameters, warnings) of the file's metadata; `ModelError` names the key.

    `mtp_only`: the file is an MTP sidecar, whose converter may leave the compress ratios at 0.
    """
    architecture = metadata.get("general.architecture")
    if architecture != ARCHITECTURE:
        hint = "This engine runs qwen4exp models only"
        refuse(path, "general.architecture", expected=ARCHITECTURE, found=repr(architecture), hint=hint)
    fields = Fields(metadata, path, ARCHITECTURE + ".")
    n_all = fields.integer("block_count", 1, MAX_LAYERS)
    n_nextn = fields.integer("nextn_predict_layers", 0, 1, default=0)
    n_layer = n_all - n_nextn
    if n_layer < 1:
        fields.refuse("block_count", "a trunk beside the MTP block", f"{n_all} with {n_nextn} of them for MTP")
    recurrent = _recurrent_layers(fields, n_layer, n_all)
    full = [i for i in range(n_all) if i >= n_layer or not recurrent[i]]
    everywhere = list(range(n_all))

    n_embd = fields.integer("embedding_length", 1, MAX_WIDTH)
    n_vocab = _vocabulary_size(fields)
    head_dim = fields.integer("attention.key_length", 2, 1024)
    value_dim = fields.integer("attention.value_length", 2, 1024)
    if value_dim != head_dim:
        fields.refuse("attention.value_length", f"the key length, {head_dim}", value_dim)
    n_head = fields.uniform("attention.head_count", n_all, 1, 1024, full)
    n_head_kv = fields.uniform("attention.head_count_kv", n_all, 1, 1024, full)
    if n_head % n_head_kv:
        fields.refuse("attention.head_count", f"a multiple of the {n_head_kv} KV heads", n_head)

    n_expert = fields.integer("expert_count", 1, MAX_EXPERTS)
    state = fields.integer("ssm.state_size", 1, 1024)
    k_heads = fields.integer("ssm.group_count", 1, 1024)
    v_heads = fields.integer("ssm.time_step_rank", 1, 1024)
    inner = fields.integer("ssm.inner_size", 1, MAX_WIDTH)
    if inner != v_heads * state:
        fields.refuse("ssm.inner_size", f"time_step_rank * state_size, {v_heads} * {state}", inner)
    if v_heads % k_heads:
        fields.refuse("ssm.time_step_rank", f"a multiple of the {k_heads} K heads (group_count)", v_heads)

    indexer_dim = fields.integer("attention.indexer.key_length", 2, 1024)
    top_k = fields.integer("attention.indexer.top_k", 1, MAX_CONTEXT)
    ratio = _compress_ratio(fields, recurrent, n_layer, n_all, top_k, mtp_only)
    rope_dim, sections = _rope(fields, head_dim, indexer_dim)
    _refuse_other_arithmetic(fields)

    hparams = HParams(
        n_layer=n_layer,
        n_layer_nextn=n_nextn,
        n_embd=n_embd,
        n_vocab=n_vocab,
        n_ctx_train=fields.integer("context_length", 1, MAX_CONTEXT),
        n_head=n_head,
        n_head_kv=n_head_kv,
        head_dim=head_dim,
        rope_dim=rope_dim,
        rope_sections=sections,
        rope_freq_base=fields.number("rope.freq_base", 1.0, 1e12),
        rms_eps=fields.number("attention.layer_norm_rms_epsilon", 1e-12, 1e-2),
        n_expert=n_expert,
        n_expert_used=fields.uniform("expert_used_count", n_all, 1, n_expert, everywhere),
        n_ff_exp=fields.uniform("expert_feed_forward_length", n_all, 1, MAX_WIDTH, everywhere),
        n_ff_shexp=fields.integer("expert_shared_feed_forward_length", 1, MAX_WIDTH),
        hc_count=fields.integer("hyper_connection.count", 2, 16),
        hc_low_rank=fields.integer("hyper_connection.low_rank", 1, MAX_WIDTH),
        ssm_conv_kernel=fields.integer("ssm.conv_kernel", 2, 16),
        ssm_state=state,
        ssm_k_heads=k_heads,
        ssm_v_heads=v_heads,
        ssm_inner=inner,
        indexer_heads=fields.integer("attention.indexer.head_count", 1, 1024),
        indexer_dim=indexer_dim,
        indexer_top_k=top_k,
        compress_ratio=ratio,
        recurrent_layers=recurrent,
        ple=_ple(fields, n_layer, n_embd, n_vocab, recurrent),
        name=_general_text(metadata, "general.name"),
        file_type=_general_integer(metadata, "general.file_type"),
    )
    warnings = [f"{path}: key {key} is not known to this engine and was ignored" for key in fields.unused()]
    return hparams, warnings


def _recurrent_layers(fields: Fields, n_layer: int, n_all: int) -> tuple[bool, ...]:
    """True for each linear layer of the trunk, from the list, the interval, or both if they agree."""
    listed = fields.integers("attention.recurrent_layers", n_all, 0, 1, optional=True)
    interval = fields.integer("full_attention_interval", 1, MAX_LAYERS, default=0 if listed else 4)
    if interval == 0 and listed is not None:
        trunk = tuple(bool(x) for x in listed[:n_layer])
    else:
        trunk = tuple((i + 1) % interval != 0 for i in range(n_layer))
    if listed is not None:
        wanted = [*map(int, trunk), *[0] * (n_all - n_layer)]
        for i, (have, want) in enumerate(zip(listed, wanted, strict=True)):
            if have != want:
                role = "the MTP block is a full-attention layer" if i >= n_layer else f"a full layer every {interval}"
                fields.refuse("attention.recurrent_layers", f"{want} at layer {i} ({role})", have)
    if all(trunk):
        fields.refuse("full_attention_interval", f"a full-attention layer among the {n_layer} of the trunk", "none")
    return trunk


def _compress_ratio(
    fields: Fields, recurrent: tuple[bool, ...], n_layer: int, n_all: int, top_k: int, mtp_only: bool
) -> int:
    """The block size of the indexer: one for all full layers, above 1, a divisor of the budget."""
    key = "attention.compress_ratios"
    hint = "A converter that does not know the layer type writes zeros: dense attention. Convert the model again"
    ratios = fields.per_layer(key, n_all, 0, MAX_CONTEXT, optional=True)
    if ratios is None:
        fields.refuse(key, "a ratio for every full-attention layer (they carry an indexer)", "no such key", hint)
    scalar = not isinstance(fields.get(key), GgufArray)
    if mtp_only and not any(ratios):
        return 0
    ratio = next((r for i, r in enumerate(ratios[:n_layer]) if not recurrent[i]), 0)
    for i, found in enumerate(ratios):
        if i >= n_layer:
            if found not in (0, ratio):
                fields.refuse(key, f"0 or {ratio} for the MTP block, layer {i}", found, hint)
        elif recurrent[i]:
            if found and not scalar:
                fields.refuse(key, f"0 for the linear layer {i}", found, hint)
        elif found < 2:
            fields.refuse(key, f"a ratio above 1 for the full-attention layer {i} (it carries an indexer)", found, hint)
        elif found != ratio:
            fields.refuse(key, f"one ratio for all full-attention layers ({ratio})", f"{found} at layer {i}", hint)
    if top_k % ratio:
        fields.refuse("attention.indexer.top_k", f"a multiple of the compress ratio {ratio}", top_k)
    return ratio


def _rope(fields: Fields, head_dim: int, indexer_dim: int) -> tuple[int, tuple[int, int, int, int]]:
    rope_dim = fields.integer("rope.dimension_count", 2, min(head_dim, indexer_dim))
    if rope_dim % 2:
        fields.refuse("rope.dimension_count", "an even number", rope_dim)
    sections = fields.integers("rope.dimension_sections", 4, 0, rope_dim // 2)
    assert sections is not None
    if sum(sections) != rope_dim // 2:
        expected = f"four sections with the sum {rope_dim // 2} (half of rope.dimension_count)"
        fields.refuse("rope.dimension_sections", expected, list(sections))
    a, b, c, d = sections
    return rope_dim, (a, b, c, d)


def _vocabulary_size(fields: Fields) -> int:
    """From the token list; the key `vocab_size` must agree, or stand alone in a file without a vocabulary."""
    stated = fields.integer("vocab_size", 1, MAX_VOCAB, default=0)
    tokens = fields.metadata.get("tokenizer.ggml.tokens")
    if tokens is None:
        if not stated:
            fields.refuse("vocab_size", "the number of tokens, or tokenizer.ggml.tokens", "neither")
        return stated
    if not isinstance(tokens, GgufArray) or tokens.kind != "string" or not 1 <= tokens.length <= MAX_VOCAB:
        expected = f"an array of 1 to {MAX_VOCAB} strings"
        refuse(fields.path, "tokenizer.ggml.tokens", expected=expected, found=tokens)
    if stated and stated != tokens.length:
        fields.refuse("vocab_size", f"{tokens.length}, the length of tokenizer.ggml.tokens", stated)
    return tokens.length


def _refuse_other_arithmetic(fields: Fields) -> None:
    """Keys that change what is computed, in ways that this engine does not compute."""
    scaling = fields.text("rope.scaling.type", "none")
    factor = fields.number("rope.scaling.factor", 0.0, 1e6, default=1.0)
    if scaling != "none" and factor not in (0.0, 1.0):
        fields.refuse("rope.scaling.type", "no RoPE scaling", f"{scaling} with factor {factor:g}", "Not supported")
    for key, plain, meaning in (
        ("expert_group_count", (0, 1), "experts in one group"),
        ("expert_gating_func", (0, 1), "softmax routing (1)"),
        ("expert_weights_scale", (0, 1), "expert weights that are not scaled"),
    ):
        value = fields.get(key)
        if value is not None and value not in plain:
            fields.refuse(key, meaning, value, "Not supported")
    for key in ("expert_weights_norm", "expert_group_used_count"):
        fields.get(key)


def _ple(fields: Fields, n_layer: int, n_embd: int, n_vocab: int, recurrent: tuple[bool, ...]) -> PleParams | None:
    layers = fields.get("ple.layers")
    if layers is None or (isinstance(layers, GgufArray) and layers.length == 0):
        stray = [key for key in _PLE_KEYS if fields.has(key)]
        if stray:
            fields.refuse("ple.layers", f"the PLE layer, as there is {stray[0]}", "no such key or an empty list")
        return None
    listed = fields.integers("ple.layers", 1, 0, n_layer - 1)
    assert listed is not None
    layer = listed[0]
    if not recurrent[layer]:
        fields.refuse("ple.layers", "a linear layer (its state holds the PLE convolution)", f"full layer {layer}")

    ngram_size = fields.integer("ple.ngram_size", 2, MAX_NGRAM)
    per_ngram = fields.integer("ple.heads_per_ngram", 1, MAX_PLE_HEADS)
    n_heads = (ngram_size - 1) * per_ngram
    if n_heads > MAX_PLE_HEADS:
        fields.refuse("ple.heads_per_ngram", f"at most {MAX_PLE_HEADS} heads in all", n_heads)
    head_dim = fields.integer("embedding_length_per_layer_input", 1, MAX_WIDTH)
    if head_dim * n_heads != n_embd:
        expected = f"embedding_length / heads, {n_embd} / {n_heads}"
        fields.refuse("embedding_length_per_layer_input", expected, head_dim)
    multipliers = fields.integers("ple.layer_multipliers", ngram_size, 1, (1 << 64) - 1)
    sizes = fields.integers("ple.head_vocab_sizes", n_heads, 1, MAX_ROW)
    offsets = fields.integers("ple.head_offsets", n_heads, 0, MAX_ROW)
    assert multipliers is not None and sizes is not None and offsets is not None
    end = 0
    for offset, size in sorted(zip(offsets, sizes, strict=True)):
        if offset < end:
            fields.refuse("ple.head_offsets", f"ranges that do not overlap (from {end} on)", f"a head at {offset}")
        end = offset + size
    if end > MAX_ROW:
        fields.refuse("ple.head_offsets", f"rows up to {MAX_ROW}", end)
    image = fields.integer("ple.image_token_id", 0, n_vocab - 1, default=0)
    return PleParams(
        layer=layer,
        ngram_size=ngram_size,
        heads_per_ngram=per_ngram,
        n_heads=n_heads,
        head_dim=head_dim,
        conv_kernel=fields.integer("ple.conv_kernel", 2, 16),
        eos_token_id=fields.integer("ple.eos_token_id", 0, n_vocab - 1),
        image_token_id=image or None,
        multipliers=multipliers,
        head_offsets=offsets,
        head_vocab_sizes=sizes,
    )


def _general_text(metadata: Mapping[str, MetaValue], key: str) -> str:
    value = metadata.get(key)
    return value if isinstance(value, str) else ""


def _general_integer(metadata: Mapping[str, MetaValue], key: str) -> int | None:
    value = metadata.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) else None
