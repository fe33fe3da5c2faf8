"""Checks the tensors of a file against what the hyper-parameters ask for, and sorts out the MTP block."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from pyluce.weights.errors import refuse
from pyluce.weights.hparams import HParams
from pyluce.weights.tensors import (
    OUTPUT,
    PLE_TABLE,
    TOKEN_EMBEDDING,
    Expected,
    Role,
    TensorInfo,
    block_tensors,
    check_tensor,
    global_tensors,
    mtp_tensors,
    split_fused,
)

_BLOCK: Final = re.compile(r"blk\.(\d{1,6})\.")
_UNUSED: Final = "exp_probs_b.bias"


class MtpStatus(Enum):
    """Whether the draft head can be used. INCOMPLETE: a sidecar was found beside the model, but it does not fit."""

    ABSENT = "absent"
    PRESENT = "present"
    INCOMPLETE = "incomplete"


@dataclass(frozen=True, slots=True)
class Mtp:
    """The MTP block. `tensors` has the block's tensors (`blk.<n_layer>.*`) and, from a sidecar that brings its own,
    `token_embd.weight` and `output.weight`; `reason` says why it is not present."""

    status: MtpStatus
    reason: str = ""
    path: str = ""
    tensors: Mapping[str, TensorInfo] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True)
class Catalogue:
    """The checked tensors of a model: those of the trunk (with embedding and output), MTP apart."""

    tensors: dict[str, TensorInfo]
    mtp: Mtp
    warnings: list[str]


def check_model(path: str, hp: HParams, found: Mapping[str, TensorInfo]) -> Catalogue:
    """Check that each tensor of the trunk is there with its shape and an allowed type; `ModelError` names a bad one."""
    mtp_prefix = f"blk.{hp.n_layer}."
    if hp.n_layer_nextn and "blk.0.hc_attn_norm.weight" not in found and any(n.startswith(mtp_prefix) for n in found):
        hint = "Give the model's own file; this one is found beside it or named as the draft"
        refuse(path, "tensors", expected="a whole model", found="an MTP sidecar (no trunk blocks)", hint=hint)
    blocks = [*hp.full_layers, *range(hp.n_layer, hp.n_layer + hp.n_layer_nextn)]
    tensors = split_fused(found, hp, blocks)
    _refuse_stray_ple(path, hp, tensors)
    wanted = [*global_tensors(hp), *(t for layer in range(hp.n_layer) for t in block_tensors(hp, layer))]
    if OUTPUT in tensors:
        wanted.append(Expected(OUTPUT, (hp.n_embd, hp.n_vocab), Role.MATRIX))
    trunk = _resolve(path, hp, tensors, wanted)
    mtp = _mtp_of_file(path, hp, tensors)
    warnings = _refuse_unknown(path, hp, [n for n in tensors if n not in trunk and n not in mtp.tensors])
    return Catalogue(trunk, mtp, warnings)


def check_sidecar(path: str, hp: HParams, sidecar: HParams, found: Mapping[str, TensorInfo]) -> Mtp:
    """The MTP block of a file of its own, for the model with `hp`; `ModelError` if it belongs to another model."""
    if not sidecar.n_layer_nextn:
        refuse(path, "nextn_predict_layers", expected="1 (an MTP sidecar)", found="0 or no such key")
    same = (
        "n_layer", "n_embd", "n_vocab", "n_head", "n_head_kv", "head_dim", "rope_dim", "rope_sections",
        "rope_freq_base", "rms_eps", "n_expert", "n_expert_used", "n_ff_exp", "n_ff_shexp", "hc_count", "hc_low_rank",
    )  # fmt: skip
    for name in same:
        have, want = getattr(sidecar, name), getattr(hp, name)
        if have != want:
            hint = "This MTP sidecar belongs to another model"
            refuse(path, name, expected=f"{want}, as in the model", found=have, hint=hint)
    tensors = split_fused(found, hp, [hp.n_layer])
    wanted = list(mtp_tensors(hp))
    for name, role in ((TOKEN_EMBEDDING, Role.EMBEDDING), (OUTPUT, Role.MATRIX)):
        if name in tensors:
            wanted.append(Expected(name, (hp.n_embd, hp.n_vocab), role))
    return Mtp(MtpStatus.PRESENT, path=path, tensors=_resolve(path, hp, tensors, wanted))


def _resolve(
    path: str, hp: HParams, tensors: Mapping[str, TensorInfo], wanted: Iterable[Expected]
) -> dict[str, TensorInfo]:
    resolved: dict[str, TensorInfo] = {}
    for expected in wanted:
        name = expected.name
        fused = name.replace("ffn_gate_exps", "ffn_gate_up_exps").replace("ffn_up_exps", "ffn_gate_up_exps")
        if fused != name and name not in tensors and fused in tensors:
            expected = Expected(fused, (hp.n_embd, 2 * hp.n_ff_exp, hp.n_expert), Role.EXPERTS)
            name = fused
        if name not in tensors:
            hint = "The file is incomplete, or a shard is missing: download or convert it again"
            refuse(path, f"tensor {name}", expected=list(expected.ne), found="no such tensor", hint=hint)
        resolved[name] = check_tensor(path, tensors[name], expected)
    return resolved


def _mtp_of_file(path: str, hp: HParams, tensors: Mapping[str, TensorInfo]) -> Mtp:
    """The MTP block in the model's own file: all of it, or none (a converter may write the trunk alone)."""
    if not hp.n_layer_nextn:
        return Mtp(MtpStatus.ABSENT, reason="the file has no MTP block")
    if not any(n.startswith(f"blk.{hp.n_layer}.") for n in tensors):
        return Mtp(MtpStatus.ABSENT, reason="the file announces an MTP block but holds the trunk only")
    return Mtp(MtpStatus.PRESENT, path=path, tensors=_resolve(path, hp, tensors, mtp_tensors(hp)))


def _refuse_stray_ple(path: str, hp: HParams, tensors: Mapping[str, TensorInfo]) -> None:
    layer = None if hp.ple is None else hp.ple.layer
    for name in tensors:
        block = _BLOCK.match(name)
        if name == PLE_TABLE and layer is None:
            refuse(path, "qwen4exp.ple.layers", expected=f"the layer that uses {name}", found="no PLE keys")
        if block and ".ple_" in name and int(block[1]) != layer:
            expected = "no PLE tensors, as there are no PLE keys" if layer is None else f"PLE tensors in layer {layer}"
            refuse(path, f"tensor {name}", expected=expected, found=f"one in layer {block[1]}")


def _refuse_unknown(path: str, hp: HParams, names: Iterable[str]) -> list[str]:
    """`ModelError` for a tensor that this engine does not know; warnings for those that are known to be unused."""
    warnings = []
    for name in names:
        block = _BLOCK.match(name)
        if block and int(block[1]) >= hp.n_layer + hp.n_layer_nextn:
            expected = f"{hp.n_layer} blocks and {hp.n_layer_nextn} for MTP"
            refuse(path, f"tensor {name}", expected=expected, found="a block beyond them")
        if not name.endswith(_UNUSED):
            hint = "This engine would leave it out, and the model might compute something else"
            refuse(path, f"tensor {name}", expected="only tensors of the architecture", found="one more", hint=hint)
        warnings.append(f"{path}: tensor {name} is not used by this architecture and was ignored")
    return warnings
