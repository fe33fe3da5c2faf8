"""Which drafts a model gets, from what was asked for and what its files have."""

from __future__ import annotations

from dataclasses import dataclass

from pyluce.options import LoadOptions, OptionError
from pyluce.spec import SpecOptions
from pyluce.weights import ModelFile, MtpStatus


@dataclass(frozen=True, slots=True)
class Speculation:
    """What was decided. `mtp_reason`: why the model's draft head is not used, empty when it is; `draft_path`: the file it is in."""

    options: SpecOptions
    mtp_reason: str = ""
    draft_path: str | None = None

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
    if "mtp" in sources and chosen.enabled:
        return Speculation(chosen, draft_path=model.mtp.path)
    if options.verify_width == 1:
        reason = "verify_width is 1"
    elif there:
        reason = "spec does not name it"
    return Speculation(chosen, reason)
