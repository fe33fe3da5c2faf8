"""The tables of `bench.device_spec`: our drafts' gain, and upstream's beside it."""

from __future__ import annotations

import statistics

from bench.acceptance import PROMPTS
from bench.drafts import CHANCES, TINY_WIDTHS, WIDTHS, Record

SIDES = ("ours", "upstream")


def report(record: Record) -> str:
    """Markdown of the parts that the record has."""
    sides = {side: record[side] for side in SIDES if side in record}
    lines: list[str] = []
    for part in (_prefill, _forced, _tiny):
        lines += part(sides)
    return "\n".join(lines)


def _prefill(sides: dict[str, Record]) -> list[str]:
    lines = []
    for side, found in sides.items():
        if row := found.get("prefill"):
            without, with_head = (statistics.median(row[name]) for name in ("without", "with"))
            lines.append(f"{side}: prefill {without:,.0f} without head, {with_head:,.0f} with: {row['costs']:+.1%}")
    return lines


def _forced(sides: dict[str, Record]) -> list[str]:
    """For each length a table: what a width gains at a chance over one row a step without a head, and its tokens a second."""
    lengths = dict.fromkeys(length for found in sides.values() for length in found.get("forced", {}))
    lines = []
    for length in lengths:
        rows = {side: found["forced"][length] for side, found in sides.items() if length in found.get("forced", {})}
        bases = [
            f"{side} {found['without head']['rate']:,.1f}" for side, found in rows.items() if "without head" in found
        ]
        lines += ["", f"After {int(length):,} tokens; without a head, tokens a second: {', '.join(bases)}", ""]
        widths = [*map(str, WIDTHS), "adaptive"]
        lines += ["| chance | side | " + " | ".join(widths) + " |", "|---" * (2 + len(widths)) + "|"]
        for chance in CHANCES:
            for side, found in rows.items():
                cells = [_gain(found.get(f"{chance} {width}")) for width in widths]
                lines.append(f"| {chance} | {side} | {' | '.join(cells)} |")
        for side, found in rows.items():
            lines += [f"{side}, {name}: {_gain(row)}" for name, row in found.items() if name.startswith("width 1")]
            if shares := [row["driver"] for row in found.values() if "driver" in row]:
                lines.append(f"{side}: {min(shares):.1%} to {max(shares):.1%} of the time outside of libllama")
    return lines


def _gain(row: Record | None) -> str:
    return f"{row['gain']:.2f} ({row['rate']:,.0f}; {row['tokens a step']:.2f})" if row else ""


def _tiny(sides: dict[str, Record]) -> list[str]:
    """For each kind of text: what a width gains over none, tokens a second and a step; then how often drafts are right by depth."""
    rows = {side: found["tiny"] for side, found in sides.items() if found.get("tiny")}
    if not rows:
        return []
    names = [*(f"width {width}" for width in TINY_WIDTHS), "adaptive"]
    lines = ["", "| text | side | without head | " + " | ".join(names) + " |", "|---" * (3 + len(names)) + "|"]
    depths = [
        "",
        f"| width {max(TINY_WIDTHS)} | side | right at depth 1, 2, ... | tokens a step |",
        "|---|---|---|---|",
    ]
    for kind in PROMPTS:
        for side, found in rows.items():
            base = found.get(f"{kind}, without head")
            if base is None:
                continue
            shown = [found.get(f"{kind}, {name}") for name in names]
            cells = [_gain(row and row | {"gain": row["rate"] / base["rate"]}) for row in shown]
            lines.append(f"| {kind} | {side} | {base['rate']:,.0f} | {' | '.join(cells)} |")
            if row := found.get(f"{kind}, width {max(TINY_WIDTHS)}"):
                rates = " ".join(f"{rate:.2f}" for rate in row["acceptance"])
                depths.append(f"| {kind} | {side} | {rates} | {row['tokens a step']:.2f} |")
    return lines + depths
