"""The flags about where routed experts live."""

from __future__ import annotations

from typing import Any

import click
from click.core import ParameterSource

from pyluce.memory.streams import AUTOMATIC
from pyluce.options import MAX_STREAMS
from pyluce.placement.hot import DEFAULT_BUDGET_MIB
from pyluce.placement.learner import DEFAULT_SWAP_MIB_S
from pyluce.placement.options import MAX_BUDGET_MIB


class OrNone(click.ParamType):  # type: ignore[type-arg]
    """Text, or `none`, which takes back what a profile or a variable says."""

    name = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str | None:
        return None if value in (None, "none") else str(value)


class Streams(click.ParamType):  # type: ignore[type-arg]
    """A number of streams, or `auto`, which is 0."""

    name = "auto|N"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if value == "auto":
            return AUTOMATIC
        try:
            count = int(value)
        except ValueError:
            self.fail(f"expected auto or a number of streams, found {value!r}", param, ctx)
        if not 1 <= count <= MAX_STREAMS:
            self.fail(f"expected auto or 1 to {MAX_STREAMS}, found {count}", param, ctx)
        return count


PLACEMENT_FLAGS = (
    click.option(
        "--expert-device",
        type=OrNone(),
        metavar="DEVICE|none",
        envvar="LUCE_EXPERT_DEVICE",
        show_envvar=True,
        help="A second device, which holds the routed experts.  [default: none, the device itself]",
    ),
    click.option(
        "--expert-placement",
        type=OrNone(),
        metavar="FILE|auto|auto:FILE|none",
        envvar="LUCE_EXPERT_PLACEMENT",
        show_envvar=True,
        help="Which experts are on the device too: those a routing table names, or learned while serving.  [default: none]",
    ),
    click.option(
        "--expert-budget-mib",
        type=click.IntRange(0, MAX_BUDGET_MIB),
        envvar="LUCE_EXPERT_BUDGET_MB",
        show_envvar=True,
        help=f"Memory of the device for those.  [default: {DEFAULT_BUDGET_MIB}]",
    ),
    click.option(
        "--expert-swap-mib-s",
        type=click.FloatRange(0.0),
        envvar="LUCE_EXPERT_SWAP_MIB_S",
        show_envvar=True,
        help=f"With auto: MiB a second that may be copied to the device.  [default: {DEFAULT_SWAP_MIB_S}]",
    ),
    click.option(
        "--prompt-streams",
        type=Streams(),
        default="auto",
        show_default=True,
        envvar="LUCE_PROMPT_STREAMS",
        show_envvar=True,
        help="With --expert-device: chunks of a prompt that are computed at the same time, so that both devices have work; auto: 2 where it pays.",
    ),
)

_NAMES = ("expert_device", "expert_placement", "expert_budget_mib", "expert_swap_mib_s", "prompt_streams")


def take_placement(given: dict[str, Any]) -> dict[str, Any]:
    """Take the values of these flags out of `given`, as fields of LoadOptions.

    What a profile says about hot experts and streams does not apply when a flag took its expert device away, nor do a budget, a limit
    and streams in the environment, which are there for other runs.
    """
    values = {name: given.pop(name) for name in _NAMES}
    source = click.get_current_context().get_parameter_source
    yields = {
        "expert_placement": (ParameterSource.DEFAULT_MAP,),
        "expert_budget_mib": (ParameterSource.DEFAULT_MAP, ParameterSource.ENVIRONMENT),
        "expert_swap_mib_s": (ParameterSource.DEFAULT_MAP, ParameterSource.ENVIRONMENT),
    }
    for name, sources in yields.items():
        needed = values["expert_device"] if name == "expert_placement" else values["expert_placement"]
        if needed is None and source(name) in sources:
            values[name] = None
    inherited = (ParameterSource.DEFAULT_MAP, ParameterSource.ENVIRONMENT)
    if values["expert_device"] is None and source("prompt_streams") in inherited:
        values["prompt_streams"] = AUTOMATIC
    return values
