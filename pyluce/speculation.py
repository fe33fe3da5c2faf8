"""Which drafts a model gets, from what was asked for and what its files have."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from math import prod
from typing import Final

from pyluce.options import LoadOptions, OptionError
from pyluce.spec import SpecOptions
from pyluce.spec.cost import Seed
from pyluce.weights import ModelFile, MtpStatus
from pyluce.weights.tensors import OUTPUT, PLE_TABLE, TOKEN_EMBEDDING, TensorInfo

CPU_ROW: Final = 0.6
"""What a row more costs on a CPU, as a share of a step of one row, until it is measured: luce-tiny's, whose rows share little."""
CPU_BESIDE: Final = 0.5
"""What a draft step costs there more for a further sequence, as a share of a draft step of one."""
LIKELY: Final = 0.85
"""How often a first draft is right where text is easy."""
WOULD_NOT_PAY: Final = (
    "on a CPU the drafts of this head are expected to cost more than they save; spec mtp uses it all the same"
)


@dataclass(frozen=True, slots=True)
class Speculation:
    """What was decided. `mtp_reason`: why the model's draft head is not used, empty when it is; `draft_path`: the file it is in."""

    options: SpecOptions
    mtp_reason: str = ""
    draft_path: str | None = None
    seed: Seed = field(default_factory=Seed)

    @property
    def uses_head(self) -> bool:
        """The model's draft head drafts."""
        return self.options.enabled and "mtp" in self.options.sources


NO_SPECULATION = Speculation(SpecOptions(width=1), "no model")


def choose_speculation(model: ModelFile, options: LoadOptions) -> Speculation:
    """What the options ask for; without `spec` the draft head, if the model has one and, on a CPU, if its drafts can be expected to pay.

    Raises OptionError when a head is asked for that is not there.
    """
    reason = model.mtp.reason or "the model has no draft head"
    there = model.mtp.status is MtpStatus.PRESENT
    on_cpu = options.device == "cpu"
    seed = Seed(row=CPU_ROW, beside=CPU_BESIDE) if on_cpu else Seed()
    asked = options.spec is not None or options.draft is not None or options.verify_width != 0
    pays = there and (asked or not on_cpu or likely_gain(model, seed) >= 1.0)
    sources = options.spec if options.spec is not None else (("mtp",) if pays else ())
    if "mtp" in sources and not there and options.verify_width != 1:
        raise OptionError(f"spec: mtp: {reason}")
    chosen = SpecOptions(sources, options.verify_width)
    if "mtp" in sources and chosen.enabled:
        return Speculation(chosen, draft_path=model.mtp.path, seed=replace(seed, draft=draft_share(model)))
    if options.verify_width == 1:
        reason = "verify_width is 1"
    elif there:
        reason = "spec does not name it" if asked else WOULD_NOT_PAY
    return Speculation(chosen, reason, seed=seed)


def likely_gain(model: ModelFile, seed: Seed) -> float:
    """Tokens a second with one draft a step that is right `LIKELY` often, as a multiple of those without a head."""
    step = (1.0 + seed.row + draft_share(model)) * (1.0 + fill_share(model))
    return (1.0 + LIKELY) / step


def fill_share(model: ModelFile) -> float:
    """Multiplications that a token's keys and values of the head take, as a share of the trunk's."""
    hp = model.hparams
    block = f"blk.{hp.n_layer}."
    parts = {"nextn.eh_proj": hp.hc_count, "hc_attn_down": 1, "hc_attn_up": 1, "attn_k": 1, "attn_v": 1}
    head = {name: t for name, t in model.mtp.tensors.items() if name.startswith(block)}
    fill = sum(count * prod(head[f"{block}{part}.weight"].ne) for part, count in parts.items())
    aside = {PLE_TABLE, TOKEN_EMBEDDING} if OUTPUT in model.tensors else {PLE_TABLE}
    trunk = [t for name, t in model.tensors.items() if name not in aside and name not in head]
    return fill / sum(prod(t.ne) * (hp.n_expert_used / hp.n_expert if len(t.ne) == 3 else 1.0) for t in trunk)


def draft_share(model: ModelFile) -> float:
    """Bytes of weights that a draft step reads, as a share of those that a step of one row reads."""
    hp = model.hparams
    aside = {PLE_TABLE, TOKEN_EMBEDDING}

    def read(infos: Iterable[TensorInfo]) -> float:
        return sum(t.nbytes * (hp.n_expert_used / hp.n_expert if len(t.ne) == 3 else 1.0) for t in infos)

    head = [t for t in model.mtp.tensors.values() if t.name not in aside and ".indexer." not in t.name]
    trunk = [t for name, t in model.tensors.items() if name not in aside and t.name not in model.mtp.tensors]
    output = model.tensors.get(OUTPUT, model.tensors[TOKEN_EMBEDDING])
    both = [] if OUTPUT in model.mtp.tensors else [output]
    return read([*head, *both]) / read([*trunk, output] if OUTPUT not in model.tensors else trunk)
