"""The device suite's record as text (medians, ratios, the share of what the bytes of the weights allow) and as a plot.

python -m bench.device_report build/bench/device.json [--plot FILE.png] [--model FILE]
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from pathlib import Path
from typing import Any, Final

GOALS: Final = {"decode": 2.5, "prefill": 2.0, "batch": 2.5}
READ_BYTES_S: Final = 4.3e12
"""What an H200 reads a second from its memory, measured; for the floor of decode."""


def medians(values: dict[str, Any]) -> dict[str, float]:
    """Figures by name without the chunk size: of several chunk sizes the best, as a user would choose."""
    best: dict[str, float] = {}
    for name, rates in values.items():
        if isinstance(rates, list) and rates:
            short = re.sub(r", chunk \d+$", "", name)
            best[short] = max(best.get(short, 0.0), statistics.median(rates))
    return best


def ratios(document: dict[str, Any]) -> list[tuple[str, str, float | None, float | None]]:
    """(part, figure, ours, upstream's): medians in tokens a second. A greedy step of ours stands beside upstream's only kind."""
    rows = []
    for part in GOALS:
        values = document.get("parts", {}).get(part, {}).get("values") or {}
        ours, theirs = medians(values.get("ours", {})), medians(values.get("upstream", {}))
        rows += [(part, name, ours.get(name), theirs.get(name.removeprefix("greedy "))) for name in {**ours, **theirs}]
    return rows


def text(document: dict[str, Any], model: Path | None = None) -> str:
    """A markdown report."""
    device = document.get("device", {})
    about = ", ".join(filter(None, (device.get("description"), device.get("architecture"))))
    lines = [
        "",
        f"{document.get('date')}, {document.get('commit')}, {about}, {document.get('model')}, "
        f"medians of {document.get('repetitions')}",
        "",
        *checks(document),
        "",
        "| test | upstream tok/s | pyluce tok/s | ratio | goal |",
        "|---|---|---|---|---|",
    ]
    for part, name, ours, theirs in ratios(document):
        ratio = ours / theirs if ours and theirs else None
        goal = GOALS[part]
        judged = part != "batch" or ("decode of 4 " in name and "1024" not in name)
        met = "" if ratio is None or not judged else f"{goal} {'met' if ratio >= goal else 'missed'}"
        shown = [f"{value:,.1f}" if value else "" for value in (theirs, ours)]
        lines.append(f"| {name} | {shown[0]} | {shown[1]} | {f'{ratio:.2f}' if ratio else ''} | {met} |")
    return "\n".join([*lines, *within(document), *floor(document, model)])


def checks(document: dict[str, Any]) -> list[str]:
    """A line for each part that is a check."""
    parts, lines = document.get("parts", {}), []
    if "ops" in parts:
        results = parts["ops"]["values"] or []
        failed = sum(not r["ok"] for r in results)
        lines.append(f"* self-test: {len(results)} tests, {failed} failed, in {parts['ops']['seconds']:.0f} s")
    if "exact" in parts:
        counts = parts["exact"]["values"] or {"passed": 0, "failed": ["no report"], "skipped": 0}
        lines.append(
            f"* exactness: {counts['passed']} passed, {len(counts['failed'])} failed, {counts['skipped']} skipped, "
            f"in {parts['exact']['seconds']:.0f} s"
        )
        lines += [f"  * failed: {name}" for name in counts["failed"][:20]]
    if "tiny" in parts:
        rows = (parts["tiny"]["values"] or {}).get("prompts", [])
        same = sum(row["same_tokens"] for row in rows)
        gap = max((row["largest_difference"] for row in rows), default=float("nan"))
        lines.append(f"* luce-tiny: {same} of {len(rows)} greedy texts as on the CPU; logits at most {gap:.2e} apart")
    return lines


def within(document: dict[str, Any]) -> list[str]:
    """What is asked of our own figures among themselves."""
    ours = {name: value for _, name, value, _ in ratios(document) if value}
    decode = {int(name.split()[-1]): value for name, value in ours.items() if name.startswith("decode at")}
    lines = []
    if len(decode) > 1:
        fall = 1 - decode[max(decode)] / decode[min(decode)]
        lines.append(f"\nOur decode falls {fall:.1%} from depth {min(decode)} to {max(decode)} (goal: less than 10 %).")
    long = [(name, value) for name, value in ours.items() if re.match(r"decode of 4 x (?!1024$)", name)]
    single = decode.get(16_384) or next(iter(decode.values()), None)
    if long and single:
        lines.append(f"Our {long[0][0]} is {long[0][1] / single:.2f} times one stream at that depth (goal: above 3).")
    return lines


def floor(document: dict[str, Any], model: Path | None) -> list[str]:
    """How much of what the memory allows decode reaches."""
    decode = [(name, value) for _, name, value, _ in ratios(document) if value and name == "decode at 0"]
    if model is None or not decode:
        return []
    from bench.floor import weight_floor

    per_token = weight_floor(model).decode_bytes
    limit = READ_BYTES_S / per_token
    return [
        f"A token reads {per_token / 1e9:.2f} GB of weights: {READ_BYTES_S / 1e12:.1f} TB/s allow {limit:,.0f} tokens a second, "
        f"of which decode at depth 0 reaches {decode[0][1] / limit:.0%}."
    ]


def draw(document: dict[str, Any], path: Path) -> None:
    """Decode and prefill against depth, and decode against sequences, ours beside upstream's."""
    try:
        import matplotlib
    except ImportError:
        print("no plot: expected the package matplotlib, found none")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = ratios(document)
    figure, axes = pyplot.subplots(1, 3, figsize=(13, 4))
    panels = (
        ("Decode, one sequence", "tokens before", r"decode at (\d+)$"),
        ("Prefill", "tokens before", r"prefill of \d+ at (\d+)$"),
        ("Decode, short sequences at once", "sequences", r"decode of (\d+) x 1024$"),
    )
    for axis, (title, label, pattern) in zip(axes, panels, strict=True):
        points = [(int(found[1]), ours, theirs) for _, name, ours, theirs in rows if (found := re.match(pattern, name))]
        for side, index in (("pyluce", 1), ("upstream", 2)):
            line = sorted((point[0], point[index]) for point in points if point[index])
            axis.plot([x for x, _ in line], [y for _, y in line], marker="o", label=side)
        axis.set(title=title, xlabel=label, ylabel="tokens a second")
        axis.set_ylim(bottom=0)
        axis.legend()
        axis.grid(alpha=0.3)
    figure.suptitle(f"{document.get('device', {}).get('description')}, {document.get('model')}, {document.get('date')}")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    print(f"plot: {path}")


def main() -> None:
    """Print the report of a record, and draw it if asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("record", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--model", type=Path, help="for the floor")
    a = parser.parse_args()
    document = json.loads(a.record.read_text())
    print(text(document, a.model))
    if a.plot is not None:
        draw(document, a.plot)


if __name__ == "__main__":
    main()
