"""Which drafts a model gets, from what was asked for and what its files have."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Final

from pyluce.options import LoadOptions, OptionError
from pyluce.spec import SpecOptions
from pyluce.spec.cost import Seed
from pyluce.weights import ModelFile, MtpStatus
from pyluce.weights.tensors import OUTPUT, PLE_TABLE, TOKEN_EMBEDDING, TensorInfo

CPU_ROW: Final = 0.6
"""What a row more costs on a CPU, as a share of a step of one row, until it is measured: luce-tiny's, whose rows share little."""


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
    """What the options ask for; without `spec` the draft head, if the model has one.

    Raises OptionError when a head is asked for that is not there.
    """
    reason = model.mtp.reason or "the model has no draft head"
    there = model.mtp.status is MtpStatus.PRESENT
    sources = options.spec if options.spec is not None else (("mtp",) if there else ())
    if "mtp" in sources and not there and options.verify_width != 1:
        raise OptionError(f"spec: mtp: {reason}")
    chosen = SpecOptions(sources, options.verify_width)
    seed = Seed(row=CPU_ROW) if options.device == "cpu" else Seed()
    if "mtp" in sources and chosen.enabled:
        return Speculation(chosen, draft_path=model.mtp.path, seed=replace(seed, draft=draft_share(model)))
    if options.verify_width == 1:
        reason = "verify_width is 1"
    elif there:
        reason = "spec does not name it"
    return Speculation(chosen, reason, seed=seed)


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
