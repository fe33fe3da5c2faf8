"""A model (no measurement) of decode and prefill on an R9700 with a Strix Halo, beside the published figures, and of what ours would do there.

    python -m bench.split_model                    # residuals, links, budgets, streams, curves of coverage
    python -m bench.split_model --routes FILE.csv  # the share that hot experts hold from a table of the model, instead of an assumption
    python -m bench.split_model --shares FILE.csv  # from a table of another model, by share of its experts
    python -m bench.split_model --json OUT --plot OUT.svg

docs/split.md says what is assumed. Needs no GPU, and none of the built libraries.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bench import split_ours
from bench import split_parameters as p
from bench.split_coverage import BUDGET, CURVES, Coverage, assumed, by_share, from_table
from bench.split_parameters import LINKS, MS, R9700, STRIX, US, Link
from bench.split_pipeline import busy
from bench.split_times import Decode, OurDecode, best, our_chunk, reference_chunk, tokens

LIMIT: Final = 0.15
CARD_MIB: Final = 12800
"""What the R9700 has left for hot experts when no prompts are kept, by the plan of the profile."""


@dataclass(frozen=True, slots=True)
class Residual:
    """A published figure and what the model says. `column`: alone or both. `share` is the model's error."""

    what: str
    column: str
    published: float
    model: float

    @property
    def share(self) -> float:
        return self.model / self.published - 1


def residuals(link: Link, coverage: float) -> list[Residual]:
    """Every figure of the two columns."""
    decode, chunk = Decode(), reference_chunk()
    a, prose = p.DRAFT_ACCEPTANCE, decode.prose_acceptance
    alone = best(lambda w: tokens(a, w) / decode.alone(w))[0]
    both = best(lambda w: tokens(a, w) / decode.split(w, coverage, link))[0]
    cold = best(lambda w: tokens(a, w) / decode.split(w, 0.0, link))[0]
    model = {
        "decode, short": (alone, both),
        "decode, short, no expert hot": (None, cold),
        "decode, code": (alone, both),
        "decode after 16K": (
            best(lambda w: tokens(prose, w) / (decode.alone(w) + decode.at_16k(STRIX, w)))[0],
            best(lambda w: tokens(prose, w) / (decode.split(w, coverage, link) + decode.at_16k(R9700, w)))[0],
        ),
        "prefill 16K": (chunk.alone(), chunk.split(2 * p.CHUNK, 2, link)),
    }
    found = []
    for what, (first, second) in p.PUBLISHED.items():
        for column, published, value in (("alone", first, model[what][0]), ("both", second, model[what][1])):
            if published is not None and value is not None:
                found.append(Residual(what, column, published, value))
    return found


def ours(link: Link, coverage: float) -> dict[str, float]:
    """What ours would do, tokens a second."""
    a, decode = p.DRAFT_ACCEPTANCE, OurDecode(Decode())
    summed = OurDecode(Decode(), all_picks=False)
    return {
        "decode, alone": best(lambda w: tokens(a, w) / decode.alone(w))[0],
        "decode, both, every pick back": best(lambda w: tokens(a, w) / decode.split(w, coverage, link))[0],
        "decode, both, sums back": best(lambda w: tokens(a, w) / summed.split(w, coverage, link))[0],
        "prefill, alone": our_chunk(all_picks=False).alone(),
        "prefill, both, every pick back": our_chunk(all_picks=True).split(2 * p.CHUNK, 2, link),
        "prefill, both, sums back": our_chunk(all_picks=False).split(2 * p.CHUNK, 2, link),
    }


def describe(link: Link, coverage: Coverage) -> dict[str, Any]:
    """Everything that the command prints."""
    decode, share = Decode(), coverage(BUDGET)
    found = residuals(link, share)
    spans = our_chunk(all_picks=False).pipeline(2 * p.CHUNK, 2, link)
    return {
        "link": link.name,
        "coverage": share,
        "unknowns": {
            "microseconds a kernel beyond its bytes": decode.kernel_seconds / US,
            "milliseconds of dense products a further row, Strix Halo": decode.row_seconds / MS,
            "acceptance of drafts of prose": decode.prose_acceptance,
        },
        "steps on the H200, ms: model, measured": {
            rows: (OurDecode(decode).measured_step(rows) / MS, seconds / MS)
            for rows, seconds in split_ours.STEPS.items()
        },
        "residuals": [
            {"what": r.what, "column": r.column, "published": r.published, "model": r.model, "error": r.share}
            for r in found
        ],
        "ours": ours(link, share),
        "ours by link": {other.name: ours(other, share) for other in LINKS.values()},
        "decode by budget, MiB": budgets(link, coverage, range(0, 14 * 1024, 2048)),
        "decode by curve": {name: by_curve(link, curve()) for name, curve in CURVES.items()},
        "prefill by streams": {rows: streams(link, rows) for rows in (4096, 8192, 16384)},
        "busy with 2 streams": {where: busy(spans, where) for where in ("target", "send", "experts", "back")},
    }


def budgets(link: Link, coverage: Coverage, sizes: Iterable[int]) -> dict[int, float]:
    """Our decode by the budget of hot experts, in MiB."""
    decode = OurDecode(Decode())
    return {
        mib: best(lambda w, mib=mib: tokens(p.DRAFT_ACCEPTANCE, w) / decode.split(w, coverage(mib), link))[0]  # type: ignore[misc]
        for mib in sizes
    }


def by_curve(link: Link, coverage: Coverage) -> dict[str, Any]:
    """Our decode by GiB of hot experts, what `BUDGET` holds, and the best budget that the card has room for, in MiB."""
    found = budgets(link, coverage, (0, 4096, BUDGET, CARD_MIB))
    every = budgets(link, coverage, range(0, CARD_MIB + 1, 512))
    return {
        "coverage": coverage(BUDGET),
        "tokens a second": found,
        "best budget": max(every, key=lambda mib: every[mib]),
    }


def streams(link: Link, rows: int) -> dict[int, float]:
    """Our prefill of a chunk by the number of streams."""
    return {n: our_chunk(all_picks=False).split(rows, n, link) for n in (1, 2, 3, 4)}


def print_text(found: dict[str, Any]) -> None:
    """The tables of docs/split.md."""
    print(f"A model, no measurement. {found['link']}; hot experts hold {found['coverage']:.0%} of the picks.\n")
    for name, value in found["unknowns"].items():
        print(f"{name}: {value:.2f}")
    for rows, (model, measured) in found["steps on the H200, ms: model, measured"].items():
        print(f"a step of {rows} on the H200: {model:.2f} ms by the model, {measured:.2f} measured")
    print("\n| | column | published | model | error |\n|---|---|---|---|---|")
    for r in found["residuals"]:
        mark = "" if abs(r["error"]) <= LIMIT else " (outside 15 %)"
        print(f"| {r['what']} | {r['column']} | {r['published']:,.1f} | {r['model']:,.1f} | {r['error']:+.0%}{mark} |")
    by_link = found["ours by link"]
    names = list(by_link)
    print(f"\n| ours, tokens a second | {' | '.join(names)} |\n|---|{'---|' * len(names)}")
    for what in found["ours"]:
        print(f"| {what} | {' | '.join(f'{by_link[name][what]:,.0f}' for name in names)} |")
    by_budget = found["decode by budget, MiB"]
    print("\ndecode by budget, MiB: " + ", ".join(f"{mib}: {value:.1f}" for mib, value in by_budget.items()))
    print("\n| coverage | of picks in 8 GiB | 0 | 4 | 8 | 12.5 GiB | best, GiB |\n|---|---|---|---|---|---|---|")
    for name, curve in found["decode by curve"].items():
        values = " | ".join(f"{value:.1f}" for value in curve["tokens a second"].values())
        print(f"| {name} | {curve['coverage']:.0%} | {values} | {curve['best budget'] / 1024:g} |")
    print()
    for rows, by_count in found["prefill by streams"].items():
        print(f"prefill, chunk of {rows}, by streams: " + ", ".join(f"{n}: {v:,.0f}" for n, v in by_count.items()))
    print(
        "busy with 2 streams: "
        + ", ".join(f"{where} {share:.0%}" for where, share in found["busy with 2 streams"].items())
    )


def plot(path: Path, link: Link, coverage: Coverage) -> None:
    """The first layers of a chunk in two streams as a timeline, and decode by budget."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, (top, bottom) = pyplot.subplots(2, 1, figsize=(9, 6))
    lanes = {"target": 3, "send": 2, "experts": 1, "back": 0}
    for span in our_chunk(all_picks=False).pipeline(2 * p.CHUNK, 2, link):
        if span.layer < 4:
            top.barh(
                lanes[span.where], span.end - span.begin, left=span.begin, color=f"C{span.stream}", edgecolor="white"
            )
    top.set(
        yticks=list(lanes.values()), yticklabels=list(lanes), xlabel="seconds", title=f"model: two streams, {link.name}"
    )
    found = budgets(link, coverage, range(0, 14 * 1024, 512))
    bottom.plot([mib / 1024 for mib in found], list(found.values()))
    bottom.set(xlabel="GiB of hot experts", ylabel="tokens a second", title="model: decode by budget")
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def _coverage(given: argparse.Namespace) -> Coverage:
    if given.routes is not None:
        return from_table(given.routes)
    return by_share(given.shares) if given.shares is not None else assumed()


def main(arguments: list[str]) -> int:
    """Print, and write what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    tables = parser.add_mutually_exclusive_group()
    tables.add_argument("--routes", type=Path, help="a routing table of the real model")
    tables.add_argument("--shares", type=Path, help="a routing table of another model, by share of its experts")
    parser.add_argument("--link", choices=sorted(LINKS), default="x4")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    given = parser.parse_args(arguments)
    try:
        coverage = _coverage(given)
    except ValueError as error:
        parser.error(str(error))
    found = describe(LINKS[given.link], coverage)
    print_text(found)
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if given.plot is not None:
        plot(given.plot, LINKS[given.link], coverage)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
